"""The schedule put together from the settings: scheduler, book of jobs, heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from zoneinfo import ZoneInfo

from farhand.config import Config, ConfigError
from farhand.gateway import session_keys
from farhand.gateway.cron import CronBook
from farhand.gateway.cron_runs import Courier, CronRuns
from farhand.gateway.cron_turns import AgentTurns
from farhand.gateway.heartbeat import PROMPT, Heartbeats, HeartbeatSettings, read_clock, read_interval, settle_jobs
from farhand.gateway.hub import Hub
from farhand.gateway.moments import zone_named
from farhand.gateway.schedule import Scheduler, ScheduleSettings
from farhand.gateway.sessions import Sessions
from farhand.machine.time_zone import machine_zone
from farhand.protocol.errors import NotFound, ToolError
from farhand.store.cron import Job
from farhand.store.objects import Objects

SETTLE_SECONDS = 1.5
"""Nodes get so long to come back before the first slot is taken."""


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
        zone, section.enabled, section.max_concurrent, section.keep_runs, section.timeout_seconds
    )
    return schedule, heartbeat


async def open_schedule(
    hub: Hub,
    config: Config,
    environ: Mapping[str, str],
    objects: Objects,
    sessions: Sessions,
    *,
    courier: Courier | None = None,
) -> tuple[Scheduler, CronBook]:
    """A scheduler that has yet to be entered, and the book of its jobs. Raises ConfigError."""
    settings, heartbeat = schedule_settings(config, environ)

    async def read_file(agent_id: str, name: str) -> str | None:
        try:
            _, data = await objects.get(f"agents/{agent_id}/{name}")
        except NotFound:
            return None
        return data.decode("utf-8", "replace")

    def reachable(job: Job) -> bool:
        if job.node is None and job.tag is None:
            return True
        return any(
            node.online and job.node in (None, node.card.node_id) and (job.tag is None or job.tag in node.card.tags)
            for node in hub.roster.nodes.values()
        )

    await hub.database.write(lambda store: settle_jobs(store, heartbeat))
    turns = AgentTurns(sessions)
    beats = Heartbeats(heartbeat, read_file, turns, courier)
    runs = CronRuns(settings.zone, turns, beats.perform, courier)
    scheduler = Scheduler(
        hub.database,
        settings,
        runs.perform,
        reachable=reachable,
        report=runs.report if config.schedule.report_failures else None,
        alone=True,
        resume=True,
        settle_seconds=SETTLE_SECONDS,
    )
    return scheduler, CronBook(hub.database, scheduler, max_jobs=config.schedule.max_jobs)


def _zone(setting: str, name: str, default: ZoneInfo) -> ZoneInfo:
    try:
        return zone_named(name) if name else default
    except ToolError as error:
        raise ConfigError(f"{setting}: {error}") from None
