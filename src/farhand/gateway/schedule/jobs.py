"""Implement every operation on jobs for the tools, routes and commands."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import covers
from farhand.gateway.schedule.job_input import patch_job, read_job, read_schedule, read_schedule_text
from farhand.gateway.schedule.job_turns import maker_of
from farhand.gateway.schedule.scheduler import Scheduler, clock
from farhand.gateway.schedule.time_parsing import in_words, schedule_in_words, slots_after, zone_named
from farhand.gateway.sessions import keys as session_keys
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, Tx
from farhand.store.tables import cron
from farhand.store.tables.cron import At, Cron, CronJob, Schedule, Slot, SlotStatus, SystemEvent

MAX_LISTED: Final = 500
MAX_RUNS: Final = 2000
DEFAULT_PAGE: Final = 200
MAX_PREVIEW: Final = 100
WAIT_SECONDS: Final = 60.0
MAX_WAIT_SECONDS: Final = 240.0
# More than the maximum number of jobs.
EVERY: Final = 100_000
RESUME: Final = "enable it with another credential to take it over, or remove it"


class JobFacts(msgspec.Struct, frozen=True):
    """Hold a job with the slots that are shown: the newest, the newest that ran, and the running one."""

    job: CronJob
    latest: Slot | None
    ran: Slot | None
    running: Slot | None


class CronJobs:
    def __init__(
        self, database: Store, scheduler: Scheduler, paused: Callable[[CronJob], str | None] = lambda _: None
    ) -> None:
        """Create the service; `paused` returns why a job does not run, such as a credential that is no longer valid."""
        self._paused = paused
        self._database = database
        self._scheduler = scheduler

    # -- reading ----------------------------------------------------------------------------------------

    async def status(self, agent_id: str | None = None) -> dict[str, Any]:
        now = clock()
        agent = _agent(agent_id)

        def read(store: Tx) -> tuple[dict[str, Any], int | None]:
            count, due, next_at = cron.count_jobs(store, agent, True, now)
            running = [
                slot
                for slot in cron.open_slots(store)
                if slot.status is SlotStatus.RUNNING and agent in (None, slot.agent_id)
            ]
            return {"count": count, "dueCount": due, "runningCount": len(running)}, next_at

        settings = self._scheduler.settings
        counts, next_at = await self._database.read(read)
        return {
            "enabled": settings.enabled,
            **counts,
            **self._at("nextRun", next_at),
            "maxJobs": settings.max_jobs,
            "maxConcurrentRuns": settings.max_concurrent,
            **self._time(now),
        }

    async def list(
        self,
        agent_id: str | None = None,
        *,
        include_disabled: bool = False,
        limit: int | None = None,
        offset: int = 0,
        own_to: str | None = None,
    ) -> dict[str, Any]:
        """List jobs by their next slot; `count` is the total, however many are returned.

        `own_to`: only jobs that run on behalf of this credential.
        """
        now = clock()
        agent = _agent(agent_id)
        most = _page(limit, MAX_LISTED)
        start = max(0, offset)

        def read(store: Tx) -> tuple[list[JobFacts], int]:
            if own_to is not None:
                every = cron.list_jobs(store, agent, include_disabled, EVERY, 0)
                own = [job for job in every if maker_of(job).id == own_to]
                return [_facts(store, job) for job in own[start : start + most]], len(own)
            jobs = cron.list_jobs(store, agent, include_disabled, most, start)
            return [_facts(store, job) for job in jobs], cron.count_jobs(store, agent, include_disabled, now)[0]

        found, count = await self._database.read(read)
        jobs = [self._job_view(facts) for facts in found]
        return {"jobs": jobs, "count": count, "offset": start, "limit": most, **self._time(now)}

    async def get(self, job_id: str) -> dict[str, Any]:
        """Return a job. Raises NotFound."""
        return self._job_view(await self._database.read(lambda store: _facts(store, _known(store, job_id))))

    async def runs(
        self, job_id: str | None = None, *, limit: int | None = None, offset: int = 0, own_to: str | None = None
    ) -> dict[str, Any]:
        """List the outcomes of slots, newest first; with `own_to`, of jobs that run on behalf of this credential.

        Raises NotFound for a job that never existed.
        """
        most = _page(limit, MAX_RUNS)
        start = max(0, offset)

        def read(store: Tx) -> tuple[list[Slot], int]:
            if own_to is not None:
                own = [slot for slot in cron.list_runs(store, job_id, EVERY, 0) if _is_own(store, slot.job, own_to)]
                return own[start : start + most], len(own)
            count = cron.count_runs(store, job_id)
            if job_id is not None and not count:
                _known(store, job_id)
            return cron.list_runs(store, job_id, most, start), count

        slots, count = await self._database.read(read)
        runs = [self._run_view(slot) for slot in slots]
        return {"runs": runs, "count": count, "offset": start, "limit": most, **self._time(clock())}

    async def preview(self, of: str | Mapping[str, Any], count: int = 5) -> dict[str, Any]:
        """Return the next slots of a job, given by its id, or of a new schedule. Raises NotFound, InvalidArgs."""
        now = clock()
        if isinstance(of, str):
            job = await self._database.read(lambda store: _known(store, of))
            schedule: Schedule = job.schedule
        else:
            schedule = self.read_schedule(of)
        after = min(now, schedule.at_ms - 1) if isinstance(schedule, At) and schedule.at_ms > now - 1000 else now
        slots = itertools.islice(slots_after(schedule, after, self._zone), max(1, min(count, MAX_PREVIEW)))
        return {
            "schedule": schedule,
            "scheduleHuman": schedule_in_words(schedule, self._zone),
            "slots": [{"atMs": slot, "human": in_words(slot, self._zone_of(schedule))} for slot in slots],
            **self._time(now),
        }

    def read_schedule(self, value: Any) -> Schedule:
        """Parse a schedule object, a line of text, or an object with `text` and `tz`. Raises InvalidArgs."""
        if isinstance(value, str):
            return read_schedule_text(value, clock(), self._zone)
        if isinstance(value, Mapping) and isinstance(value.get("text"), str):
            return read_schedule_text(value["text"], clock(), self._zone, value.get("tz"))
        return read_schedule(value, clock(), self._zone)

    # -- changing ---------------------------------------------------------------------------------------

    def planned(self, payload: Mapping[str, Any], now: int, agent_id: str | None = None) -> CronJob:
        """Return the job that `add` would make. Raises InvalidArgs."""
        given = dict(payload)
        if isinstance(given.get("schedule"), str):
            given["schedule"] = msgspec.to_builtins(self.read_schedule(given["schedule"]))
        return read_job(given, now, self._zone, agent_id or "main")

    async def add(
        self,
        payload: Mapping[str, Any],
        maker: Credential,
        agent_id: str | None = None,
        *,
        origins: tuple[str, ...] = (),
        by_agent: str = "",
    ) -> dict[str, Any]:
        """Add a job that runs on behalf of `maker`; `origins` is where it comes from, as in `RunOptions.origins`.

        `by_agent`: the agent that adds it on behalf of `maker`.

        Raises InvalidArgs, or Failed if there are too many jobs.
        """
        now = clock()
        job = _made_by(self.planned(payload, now, agent_id), maker, origins, by_agent)
        most = self._scheduler.settings.max_jobs

        def write(store: Tx) -> JobFacts:
            if cron.count_jobs(store, None, True, now)[0] >= most:
                raise Failed(f"Cron job limit reached ({most})")
            cron.save_job(store, job)
            facts = {"name": job.name, "agent_id": job.agent_id, "made_by": maker.id}
            append_event(store, now, "cron.added", job.id, facts)
            return _facts(store, job)

        view = self._job_view(await self._database.write(write))
        self._scheduler.wake()
        return {"ok": True, "job": view}

    async def update(
        self,
        job_id: str,
        patch: Mapping[str, Any],
        by: Credential,
        *,
        origins: tuple[str, ...] = (),
        by_agent: str = "",
    ) -> dict[str, Any]:
        """Change a job.

        If `by` is not its maker, it has to cover the maker's rights. The job runs on behalf of `by` from then on if the
        agent's instructions change or a paused job is enabled. Raises NotFound, InvalidArgs, NotAllowed.
        """
        await self._scheduler.record()  # slots due under the old schedule stay due
        now, zone = clock(), self._zone
        seen = await self._database.read(lambda store: _own(store, job_id))
        invalid = maker_of(seen).id if self._paused(seen) is not None else None

        def write(store: Tx) -> JobFacts:
            before = _own(store, job_id)
            _check(before, by)
            job = patch_job(before, patch, now, zone)
            resumed = patch.get("enabled") is True and maker_of(before).id == invalid
            # What the same instructions do depends on the machines that they reach.
            moved = (job.node, job.tag) != (before.node, before.tag)
            if job.spec != before.spec or job.agent_id != before.agent_id or resumed or moved:
                job = _made_by(job, by, origins, by_agent)
            cron.save_job(store, job)
            facts = {"name": job.name, "fields": sorted(patch), "made_by": maker_of(job).id}
            append_event(store, now, "cron.updated", job.id, facts)
            return _facts(store, job)

        view = self._job_view(await self._database.write(write))
        self._scheduler.wake()
        return {"ok": True, "job": view}

    async def remove(self, job_id: str, by: Credential) -> dict[str, Any]:
        """Remove a job and its history, and stop its run. Raises NotFound, NotAllowed."""
        now = clock()

        def write(store: Tx) -> None:
            job = _own(store, job_id)
            _check(job, by)
            cron.remove_job(store, job_id, history=True)
            append_event(store, now, "cron.removed", job_id, {"name": job.name})

        await self._database.write(write)
        self._scheduler.stop_runs(job_id)
        self._scheduler.wake()
        return {"ok": True, "removed": True, "id": job_id}

    async def run(
        self,
        job_id: str | None = None,
        mode: str | None = None,
        *,
        by: Credential,
        wait: float | None = None,
        session: str | None = None,
        own_to: str | None = None,
    ) -> dict[str, Any]:
        """Start the due jobs, or one job regardless of its schedule, and wait a while for the results.

        `own_to`: return only results of jobs that run on behalf of this credential.

        `session`: the caller's session. A message into it runs after the caller's turn, so it is not waited for. Raises
        NotFound, InvalidArgs, NotAllowed.
        """
        mode = mode or "due"
        if mode not in ("due", "force"):
            raise InvalidArgs(f"mode must be due or force, not {mode!r}")
        if mode == "force" and job_id is None:
            raise InvalidArgs("cron.run with mode=force requires id")
        job = None if job_id is None else await self._database.read(lambda store: _known(store, job_id))
        if mode == "force" and job is not None:
            _check(job, by)
            if (reason := self._paused(job)) is not None:
                raise NotAllowed(f"job {job.id} is paused: {reason}; {RESUME}")
            begun = await self._scheduler.run_now(job.id)
            if begun is None:
                skipped = {"jobId": job.id, "status": "skipped", "error": "a run of it is under way", "durationMs": 0}
                return {"ok": True, "ran": 0, "results": [skipped]}
            runs = [begun]
        else:
            runs = await self._scheduler.advance(job_id)
        patience = WAIT_SECONDS if wait is None else max(0.0, min(wait, MAX_WAIT_SECONDS))
        if any(
            isinstance(run.job.spec, SystemEvent) and session == session_keys.main_key(run.job.agent_id) for run in runs
        ):
            patience = 0.0
        if runs:
            await asyncio.wait([run.task for run in runs], timeout=patience)
        visible = [run for run in runs if own_to is None or maker_of(run.job).id == own_to]
        results = [await self._result(run.slot) for run in visible]
        return {"ok": True, "ran": len(results), "results": results}

    async def _result(self, begun: Slot) -> dict[str, Any]:
        def read(store: Tx) -> tuple[Slot | None, CronJob | None]:
            return cron.find_slot(store, begun.job, begun.slot), cron.find_job(store, begun.job)

        found, job = await self._database.read(read)
        slot = found or begun
        return {"durationMs": 0, **self._run_view(slot), **self._at("nextRun", job.next_at if job else None)}

    # -- views ------------------------------------------------------------------------------------------

    def _job_view(self, facts: JobFacts) -> dict[str, Any]:
        job, latest, ran, running = facts.job, facts.latest, facts.ran, facts.running
        zone = self._zone_of(job.schedule)
        pause = self._paused(job)
        view: dict[str, Any] = {
            "id": job.id,
            "agentId": job.agent_id,
            "name": job.name,
            "description": job.description,
            "enabled": job.enabled,
            "deleteAfterRun": job.delete_after_run,
            "schedule": job.schedule,
            "scheduleHuman": schedule_in_words(job.schedule, self._zone),
            "spec": job.spec,
            "missed": job.missed,
            "windowSeconds": job.window_seconds,
            "retries": job.retries,
            "retryDelaySeconds": job.retry_delay_seconds if job.retries else None,
            "node": job.node,
            "tag": job.tag,
            "madeBy": maker_of(job).id,
            "pausedReason": pause,
            "createdAtMs": job.created_at,
            "updatedAtMs": job.updated_at,
        }
        state: dict[str, Any] = {
            "nextRunAtMs": job.next_at if pause is None else None,
            "runningAtMs": running.started_at if running else None,
            "lastRunAtMs": ran.started_at if ran else None,
            "lastStatus": latest.status.value if latest else None,
            "lastError": latest.error if latest else None,
            "lastDurationMs": _took(ran) if ran else None,
        }
        view["state"] = _without_none(state)
        if job.next_at is not None and pause is None:
            view["nextRunHuman"] = in_words(job.next_at, zone)
        if ran is not None and ran.started_at is not None:
            view["lastRunHuman"] = in_words(ran.started_at, zone)
        return _without_none(view)

    def _run_view(self, slot: Slot) -> dict[str, Any]:
        ts = slot.ended_at or slot.started_at or slot.recorded_at
        return _without_none(
            {
                "id": f"{slot.job}:{slot.slot}",
                "jobId": slot.job,
                "jobName": slot.name,
                "agentId": slot.agent_id,
                "ts": ts,
                "tsHuman": in_words(ts, self._zone),
                "status": slot.status.value,
                "error": slot.error,
                "summary": slot.summary,
                "durationMs": _took(slot),
                "slotAtMs": slot.slot,
                "slotHuman": in_words(slot.slot, self._zone),
                "sinceMs": slot.since,
                "startedAtMs": slot.started_at,
                "endedAtMs": slot.ended_at,
                "late": slot.late,
                "attempts": slot.attempts,
                "trigger": slot.cause,
                "sessionKey": slot.session_key,
            }
        )

    @property
    def _zone(self) -> ZoneInfo:
        return self._scheduler.zone

    def _zone_of(self, schedule: Schedule) -> ZoneInfo:
        return zone_named(schedule.tz) if isinstance(schedule, Cron) and schedule.tz else self._zone

    def _time(self, now: int) -> dict[str, Any]:
        return {"timezone": self._zone.key, "currentTime": in_words(now, self._zone), "currentTimeMs": now}

    def _at(self, name: str, moment: int | None) -> dict[str, Any]:
        if moment is None:
            return {}
        return {f"{name}AtMs": moment, f"{name}Human": in_words(moment, self._zone)}


def _agent(agent_id: str | None) -> str | None:
    return session_keys.agent_id(agent_id) if agent_id else None


def _page(limit: int | None, most: int) -> int:
    return max(1, min(DEFAULT_PAGE if limit is None else limit, most))


def _known(store: Tx, job_id: str) -> CronJob:
    job = cron.find_job(store, job_id)
    if job is None:
        raise NotFound(f"Unknown cron job id: {job_id[:100]}")
    return job


def _facts(store: Tx, job: CronJob) -> JobFacts:
    running = next((s for s in cron.open_slots(store) if s.job == job.id and s.status is SlotStatus.RUNNING), None)
    latest = next(iter(cron.latest_slots(store, job.id, 1)), None)
    return JobFacts(job, latest, cron.latest_run(store, job.id), running)


def _own(store: Tx, job_id: str) -> CronJob:
    job = _known(store, job_id)
    if job.hidden:
        raise NotAllowed(f"job {job_id!r} comes from the settings; change [heartbeat] in farhand.toml")
    return job


def _made_by(job: CronJob, maker: Credential, origins: tuple[str, ...], by_agent: str) -> CronJob:
    stored = {} if maker == OWNER else msgspec.to_builtins(maker)
    return msgspec.structs.replace(job, made_by=stored, origins=origins, by_agent=by_agent)


def _is_own(store: Tx, job_id: str, credential: str) -> bool:
    job = cron.find_job(store, job_id)
    return job is not None and maker_of(job).id == credential


def _check(job: CronJob, by: Credential) -> None:
    """Check that a credential could have made the job. Raises NotAllowed."""
    maker = maker_of(job)
    if not covers(by, maker):
        raise NotAllowed(
            f"job {job.id} belongs to {maker.id}; changing or running it needs that credential or its rights"
        )


def _took(slot: Slot) -> int | None:
    if slot.started_at is None or slot.ended_at is None:
        return None
    return max(0, slot.ended_at - slot.started_at)


def _without_none(view: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in view.items() if value is not None}
