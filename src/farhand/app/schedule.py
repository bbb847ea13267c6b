"""Builds the schedule from the settings: scheduler, jobs, heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from zoneinfo import ZoneInfo

import msgspec

from farhand.config import Config, SettingsError
from farhand.gateway.access.credentials import Credentials
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.pinning import Pin
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.schedule.heartbeat import (
    PROMPT,
    Heartbeats,
    HeartbeatSettings,
    read_clock,
    read_interval,
    settle_jobs,
)
from farhand.gateway.schedule.job_calls import JobCalls
from farhand.gateway.schedule.job_runs import CronRuns, ReplyDelivery
from farhand.gateway.schedule.job_turns import AgentTurns, maker_of
from farhand.gateway.schedule.jobs import CronJobs
from farhand.gateway.schedule.scheduler import Scheduler, ScheduleSettings
from farhand.gateway.schedule.time_parsing import zone_named
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.sessions import Sessions
from farhand.machine.time_zone import machine_zone
from farhand.protocol.errors import NotFound, ToolError
from farhand.protocol.redaction import KnownSecrets
from farhand.store.objects.base import Objects
from farhand.store.ports import Store
from farhand.store.tables.cron import CronJob

# How long nodes may take to reconnect before the first slot is taken.
SETTLE_SECONDS = 1.5


def schedule_settings(config: Config, environ: Mapping[str, str]) -> tuple[ScheduleSettings, HeartbeatSettings]:
    """Raises SettingsError naming the key at fault."""
    section, beat = config.schedule, config.heartbeat
    zone = _zone("[schedule] timezone", section.timezone, machine_zone(environ))
    for name, value in (("max_jobs", section.max_jobs), ("keep_runs", section.keep_runs)):
        if value < 1:
            raise SettingsError(f"[schedule] {name} must be at least 1, not {value}")
    if section.max_concurrent < 1 or section.timeout_seconds <= 0:
        raise SettingsError("[schedule] max_concurrent and timeout_seconds must be above 0")
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
        raise SettingsError(f"[heartbeat] {error}") from None
    if 0 < heartbeat.every_ms < 1000:
        raise SettingsError(f"[heartbeat] every must be at least one second, not {beat.every!r}")
    same = {name: value for name, value in msgspec.structs.asdict(section).items() if name != "timezone"}
    return ScheduleSettings(zone=zone, **same), heartbeat


async def open_schedule(
    current: Callable[[], tuple[ScheduleSettings, HeartbeatSettings]],
    database: Store,
    node_registry: NodeRegistry,
    credentials: Credentials,
    secrets: KnownSecrets,
    objects: Objects,
    sessions: Sessions,
    gate: Gate,
    catalog: Catalog,
    *,
    held: Callable[[], bool],
    delivery: ReplyDelivery | None = None,
    alone: bool = True,
) -> tuple[Scheduler, CronJobs]:
    """Return a scheduler that has yet to be entered, and its jobs. `current` returns the settings in force, `held`
    whether nothing may start. `alone`: no other gateway uses this store."""
    settled: HeartbeatSettings | None = None

    async def settle_heartbeats() -> None:
        nonlocal settled
        wanted = current()[1]
        if wanted != settled:
            await database.write(lambda store: settle_jobs(store, wanted))
            settled = wanted

    async def read_file(agent_id: str, name: str) -> str | None:
        try:
            _, data = await objects.get(f"agents/{agent_id}/{name}")
        except NotFound:
            return None
        return data.decode("utf-8", "replace")

    def reachable(job: CronJob) -> bool:
        pin = Pin.of(job.node, job.tag)
        return pin is None or any(node.online and pin.fits(node) for node in node_registry.nodes.values())

    def paused(job: CronJob) -> str | None:
        return credentials.ended(Principal(maker_of(job)).ids)

    turns = AgentTurns(sessions, secrets.redact_text, credentials.reduced)
    beats = Heartbeats(lambda: current()[1], read_file, turns, delivery)
    calls = JobCalls(gate, catalog, node_registry, credentials.reduced)
    runs = CronRuns(lambda: current()[0].zone, turns, beats.perform, calls.perform, delivery)
    scheduler = Scheduler(
        database,
        current()[0],
        runs.perform,
        current=lambda: current()[0],
        prepare=settle_heartbeats,
        reachable=reachable,
        paused=paused,
        held=held,
        report=runs.report,
        alone=alone,
        resume=True,
        settle_seconds=SETTLE_SECONDS,
    )
    return scheduler, CronJobs(database, scheduler, paused)


def _zone(setting: str, name: str, default: ZoneInfo) -> ZoneInfo:
    try:
        return zone_named(name) if name else default
    except ToolError as error:
        raise SettingsError(f"{setting}: {error}") from None
