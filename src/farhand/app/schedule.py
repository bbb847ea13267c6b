"""The schedule put together from the settings: scheduler, book of jobs, heartbeats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from zoneinfo import ZoneInfo

from farhand.config import Config, ConfigError
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.hub import Hub
from farhand.gateway.schedule.heartbeat import (
    PROMPT,
    Heartbeats,
    HeartbeatSettings,
    read_clock,
    read_interval,
    settle_jobs,
)
from farhand.gateway.schedule.job_runs import Courier, CronRuns
from farhand.gateway.schedule.job_turns import AgentTurns, maker_of
from farhand.gateway.schedule.jobs import CronBook
from farhand.gateway.schedule.scheduler import Scheduler, ScheduleSettings
from farhand.gateway.schedule.time_parsing import zone_named
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.sessions import Sessions
from farhand.machine.time_zone import machine_zone
from farhand.protocol.errors import NotFound, ToolError
from farhand.store.objects.base import Objects
from farhand.store.tables.cron import Job

log = logging.getLogger(__name__)

# Nodes get so long to come back before the first slot is taken.
SETTLE_SECONDS = 1.5


def schedule_settings(config: Config, environ: Mapping[str, str]) -> tuple[ScheduleSettings, HeartbeatSettings]:
    """Raises ConfigError naming the key at fault."""
    section, beat = config.schedule, config.heartbeat
    zone = _zone("[schedule] timezone", section.timezone, machine_zone(environ))
    for name, value in (("max_jobs", section.max_jobs), ("keep_runs", section.keep_runs)):
        if value < 1:
            raise ConfigError(f"[schedule] {name} must be at least 1, not {value}")
    if section.max_concurrent < 1 or section.timeout_seconds <= 0:
        raise ConfigError("[schedule] max_concurrent and timeout_seconds must be above 0")
    try:
        heartbeat = HeartbeatSettings(
            every_ms=read_interval(beat.every),
            zone=_zone("[heartbeat] timezone", beat.timezone, zone),
            start=read_clock(beat.active_start),
            end=read_clock(beat.active_end),
            agents=tuple(dict.fromkeys(session_keys.agent_id(agent) for agent in beat.agents)),
            prompt=beat.prompt or PROMPT,
            target=beat.target or "last",
        )
    except (ToolError, ValueError) as error:
        raise ConfigError(f"[heartbeat] {error}") from None
    if 0 < heartbeat.every_ms < 1000:
        raise ConfigError(f"[heartbeat] every must be at least one second, not {beat.every!r}")
    schedule = ScheduleSettings(
        zone=zone,
        enabled=section.enabled,
        max_concurrent=section.max_concurrent,
        keep_runs=section.keep_runs,
        timeout_seconds=section.timeout_seconds,
        max_jobs=section.max_jobs,
        report_failures=section.report_failures,
    )
    return schedule, heartbeat


class LiveSchedule:
    """`[schedule]` and `[heartbeat]` as the file has them now; while they cannot be used, as they were before."""

    def __init__(self, now: Callable[[], Config], environ: Mapping[str, str]) -> None:
        """Raises ConfigError naming the key at fault."""
        self._now = now
        self._environ = environ
        self._seen = now()
        self._schedule, self._heartbeat = schedule_settings(self._seen, environ)

    @property
    def schedule(self) -> ScheduleSettings:
        self._look()
        return self._schedule

    @property
    def heartbeat(self) -> HeartbeatSettings:
        self._look()
        return self._heartbeat

    def _look(self) -> None:
        config = self._now()
        if config is self._seen:
            return
        self._seen = config
        try:
            self._schedule, self._heartbeat = schedule_settings(config, self._environ)
        except ConfigError as error:
            log.error("the schedule stays as it was: %s", error)


async def open_schedule(
    hub: Hub,
    config: Callable[[], Config],
    environ: Mapping[str, str],
    objects: Objects,
    sessions: Sessions,
    *,
    courier: Courier | None = None,
) -> tuple[Scheduler, CronBook]:
    """A scheduler that has yet to be entered, and the book of its jobs. `config`: the settings as they are now.

    Raises ConfigError.
    """
    live = LiveSchedule(config, environ)
    hub.zone = lambda: live.schedule.zone
    settled: HeartbeatSettings | None = None

    async def settle_heartbeats() -> None:
        nonlocal settled
        wanted = live.heartbeat
        if wanted != settled:
            await hub.database.write(lambda store: settle_jobs(store, wanted))
            settled = wanted

    async def read_file(agent_id: str, name: str) -> str | None:
        try:
            _, data = await objects.get(f"agents/{agent_id}/{name}")
        except NotFound:
            return None
        return data.decode("utf-8", "replace")

    def reachable(job: Job) -> bool:
        pin = Pin.of(job.node, job.tag)
        return pin is None or any(node.online and pin.fits(node) for node in hub.node_registry.nodes.values())

    def paused(job: Job) -> str | None:
        return hub.credentials.ended(Principal(maker_of(job)).ids)

    turns = AgentTurns(sessions, hub.secrets.redact_text, hub.credentials.reduced)
    beats = Heartbeats(lambda: live.heartbeat, read_file, turns, courier)
    runs = CronRuns(lambda: live.schedule.zone, turns, beats.perform, courier)
    scheduler = Scheduler(
        hub.database,
        live.schedule,
        runs.perform,
        current=lambda: live.schedule,
        prepare=settle_heartbeats,
        reachable=reachable,
        paused=paused,
        held=lambda: hub.gate.frozen is not None,
        report=runs.report,
        alone=True,
        resume=True,
        settle_seconds=SETTLE_SECONDS,
    )
    return scheduler, CronBook(hub.database, scheduler, paused)


def _zone(setting: str, name: str, default: ZoneInfo) -> ZoneInfo:
    try:
        return zone_named(name) if name else default
    except ToolError as error:
        raise ConfigError(f"{setting}: {error}") from None
