"""Record every slot of every job as a row, and run each at most once.

The row is the claim: (job, slot) is the primary key, so if several schedulers share a store, only one of them records a
slot. Its states:

    waiting   due; starts when no other slot of the job is running and the job's node is connected
    running   a holder is working on it and renews its lease
    ok | error | timeout            how the run ended
    missed | skipped                did not run; the row has the reason
    unknown                         the holder died during the run; it is not run again

The wall clock may jump. If it jumps forward, slots are late, and the job's policy decides what happens to them. If it
jumps back, some rows are in the future: those that ran stay, because a slot runs once; the others are dropped and
recorded again when they are due.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import msgspec

from farhand.gateway.leases import LeaseWatch
from farhand.gateway.repeating import Repeating
from farhand.gateway.schedule.slot_ledger import JUMP_MS, JobChecks, account, close_one_shot, take
from farhand.gateway.schedule.time_parsing import next_slot
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import cron
from farhand.store.tables.cron import CronJob, Slot, SlotStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

# How often to check the clock and other schedulers' rows if nothing is due earlier.
POLL_SECONDS = 5.0
# A holder that has not renewed its lease for this long is considered dead.
LEASE_SECONDS = 20.0
WRITE_AGAIN_SECONDS = 2.0
# After a failed look for due slots.
LOOK_AGAIN_SECONDS = 1.0


class SlotOutcome(msgspec.Struct, frozen=True):
    """Describe how an attempt at a slot ended."""

    status: SlotStatus
    error: str | None = None
    summary: str | None = None
    session_key: str | None = None


class SlotRun(msgspec.Struct, frozen=True):
    """Hold a slot that has started. The task ends with the slot and never raises."""

    job: CronJob
    slot: Slot
    task: asyncio.Task[SlotOutcome]


class ScheduleSettings(msgspec.Struct, frozen=True):
    zone: ZoneInfo
    enabled: bool = True
    max_concurrent: int = 4
    keep_runs: int = 200
    timeout_seconds: float = 3600.0
    max_jobs: int = 200
    report_failures: bool = True


# Runs a job. Cancellation stops everything it started, and returns only after that.
Perform = Callable[[CronJob, Slot], Awaitable[SlotOutcome]]


class Scheduler:
    """Run jobs inside `async with`; at its end, running slots are stopped and recorded as such."""

    def __init__(
        self,
        database: Store,
        settings: ScheduleSettings,
        perform: Perform,
        *,
        current: Callable[[], ScheduleSettings] | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
        reachable: Callable[[CronJob], bool] = lambda _: True,
        paused: Callable[[CronJob], str | None] = lambda _: None,
        held: Callable[[], bool] = lambda: False,
        report: Callable[[CronJob, Slot, SlotOutcome], Awaitable[None]] | None = None,
        alone: bool = False,
        resume: bool = False,
        lease_seconds: float = LEASE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        settle_seconds: float = 0.0,
    ) -> None:
        """Create a scheduler.

        `current` returns the current settings. `prepare` is called before each check for due slots. `reachable` returns
        whether the node that a job is pinned to is connected, `paused` why a job may not start. `report` is called with
        a job's first failure. While `held` returns True nothing starts, and slots that pass are missed.

        `alone`: no other scheduler uses this store, so slots that were running before the start have lost their holder.
        `resume`: repeating an attempt finds the work it started before, so such slots are resumed instead of abandoned,
        and slots that are running at the end are left for the next start. New slots are started from `settle_seconds`
        after the start.
        """
        self._database = database
        self._current = current or (lambda: settings)
        self._prepare = prepare
        self._planned_for: ZoneInfo | None = None
        self._perform = perform
        self._reachable = reachable
        self._paused = paused
        self._held = held
        self._report = report
        self._alone = alone
        self._resume = resume
        self._lease = lease_seconds
        self._poll = poll_seconds
        self._holder = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._runs: dict[tuple[str, int], asyncio.Task[SlotOutcome]] = {}
        self._claims: set[asyncio.Task[Any]] = set()
        self._timer = Repeating(
            self._keep_time, "scheduler", first_delay=settle_seconds, retry_seconds=LOOK_AGAIN_SECONDS
        )
        self._started = clock()
        self._clocks = (clock(), time.monotonic())
        self._leases = LeaseWatch[tuple[str, int]](lease_seconds)
        self._stopping = False
        self._claiming = asyncio.Lock()

    async def __aenter__(self) -> Scheduler:
        self._started = clock()
        await self._follow_settings()
        if self._alone:
            for slot in await self._database.read(cron.open_slots):
                if slot.status is SlotStatus.RUNNING and not await self._take_up(slot):
                    await self._end(slot, _vanished())
        self._timer.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold()
        # Every claimed slot has a run before the runs are stopped.
        await self._timer.stop(cancel=False)
        if self._claims:
            await asyncio.wait(self._claims)
        await asyncio.sleep(0)
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        if runs:
            await asyncio.wait(runs)

    async def _follow_settings(self) -> None:
        """Apply changed settings to the slots that are due next."""
        if self._prepare is not None:
            await self._prepare()
        if self._planned_for != self.zone:
            self._planned_for = self.zone
            await self._database.write(functools.partial(_replan, zone=self.zone))

    def wake(self) -> None:
        self._timer.wake()

    @property
    def settings(self) -> ScheduleSettings:
        return self._current()

    @property
    def zone(self) -> ZoneInfo:
        return self.settings.zone

    # -- main loop --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Start nothing more: the gateway is about to stop. Running slots continue until the end of `async with`."""
        self._stopping = True
        self.wake()

    async def _keep_time(self) -> float | None:
        """Start what is due; return the seconds until the next look, None at the end."""
        if self._stopping:
            return None
        pause = self._poll
        await self._look_at_the_clock()
        await self._follow_settings()
        if self.settings.enabled and not self._held():
            await self.advance()
            pause = await self._pause()
        await self._look_after_runs()
        return pause

    async def _pause(self) -> float:
        """Return the time until the next slot, limited by how often the clock is checked."""
        next_at = await self._database.read(cron.next_at)
        pause = self._poll if next_at is None else min(self._poll, (next_at - clock()) / 1000)
        if self._runs:
            pause = min(pause, self._lease / 4)
        return max(0.0, pause)

    async def _look_at_the_clock(self) -> None:
        wall, steady = clock(), time.monotonic()
        jumped = wall - self._clocks[0] - round((steady - self._clocks[1]) * 1000)
        before, self._clocks = self._clocks[0], (wall, steady)
        if abs(jumped) > JUMP_MS:
            log.warning("the wall clock jumped by %.1f s", jumped / 1000)
            data = {"from": before, "to": wall, "by_ms": jumped}
            await self._database.write(lambda store: append_event(store, wall, "cron.clock", "clock", data))

    async def advance(self, only: str | None = None) -> list[SlotRun]:
        """Record every due slot, start those that can start, and return their runs.

        `only`: start only slots of this job.
        """
        return await self._undivided(self._advance(only))

    async def record(self) -> None:
        """Record every due slot without starting any."""
        if self.settings.enabled:
            await self._undivided(self._advance(""))

    async def _undivided(self, claiming: Coroutine[Any, Any, T]) -> T:
        """Finish claiming and starting a slot even if the caller is cancelled meanwhile."""
        task = asyncio.ensure_future(claiming)
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)
        return await asyncio.shield(task)

    async def _advance(self, only: str | None) -> list[SlotRun]:
        await self._follow_settings()
        if self._held():
            return []
        async with self._claiming:
            candidates = await self._database.read(_candidates)
            if candidates is None:
                return []
            checks = JobChecks(
                frozenset(job.id for job in candidates),
                frozenset(job.id for job in candidates if not self._reachable(job)),
                {job.id: reason for job in candidates if (reason := self._paused(job)) is not None},
            )
            zone, keep, stopping = self.zone, self.settings.keep_runs, self._stopping
            room, holder, since = self.settings.max_concurrent - len(self._runs), self._holder, self._started

            def record(store: Tx) -> list[tuple[CronJob, Slot]]:
                now = clock()  # inside the transaction: no other scheduler's cursor is later
                for job in cron.due_jobs(store, now, now + JUMP_MS):
                    account(store, job, now, zone, keep)
                if stopping:
                    return []
                return take(store, now, checks, holder=holder, room=room, since=since, only=only)

            begun = await self._database.write(record)
            return [self._begin(job, slot) for job, slot in begun]

    async def _take_up(self, slot: Slot) -> bool:
        """Resume a slot whose holder is dead."""

        holder = self._holder

        def adopt(store: Tx) -> CronJob | None:
            job = cron.find_job(store, slot.job)
            return job if job is not None and cron.adopt_slot(store, slot, holder) else None

        job = await self._database.write(adopt) if self._resume else None
        if job is None:
            return False
        self._begin(job, msgspec.structs.replace(slot, holder=self._holder))
        return True

    # -- running ----------------------------------------------------------------------------------------

    async def run_now(self, job_id: str) -> SlotRun | None:
        """Run a job now, outside its schedule; return None while it is already running."""
        return await self._undivided(self._run_now(job_id))

    async def _run_now(self, job_id: str) -> SlotRun | None:
        now, holder = clock(), self._holder

        def claim(store: Tx) -> tuple[CronJob, Slot] | None:
            job = cron.find_job(store, job_id)
            opened = [slot for slot in cron.open_slots(store) if slot.job == job_id]
            if job is None or any(slot.status is SlotStatus.RUNNING for slot in opened):
                return None
            row = Slot(
                job=job.id,
                slot=now,
                name=job.name,
                agent_id=job.agent_id,
                status=SlotStatus.RUNNING,
                recorded_at=now,
                cause="manual",
                holder=holder,
                attempts=1,
                started_at=now,
            )
            while not cron.add_slot(store, row):
                row = msgspec.structs.replace(row, slot=row.slot + 1)
            append_event(store, now, "cron.started", job.id, {"name": job.name, "slot": row.slot, "manual": True})
            return job, row

        begun = await self._database.write(claim)
        return None if begun is None else self._begin(*begun)

    def stop_runs(self, job_id: str) -> None:
        """Stop the runs of a job that was removed."""
        for (job, _), run in self._runs.items():
            if job == job_id:
                run.cancel()

    def _begin(self, job: CronJob, slot: Slot) -> SlotRun:
        task = asyncio.create_task(self._run(job, slot), name=f"cron {job.id} {slot.slot}")
        self._runs[slot.job, slot.slot] = task
        task.add_done_callback(lambda _: self._over(slot))
        self.wake()  # renew the lease in time
        return SlotRun(job, slot, task)

    def _over(self, slot: Slot) -> None:
        self._runs.pop((slot.job, slot.slot), None)
        self.wake()

    async def _run(self, job: CronJob, slot: Slot) -> SlotOutcome:
        try:
            ended = await self._attempts(job, slot)
        except asyncio.CancelledError:
            if self._stopping and self._resume:
                return SlotOutcome(SlotStatus.UNKNOWN, "the gateway stopped; the run continues after the next start")
            why = "the gateway stopped before the run ended" if self._stopping else "the job was removed"
            ended = SlotOutcome(SlotStatus.ERROR, f"stopped: {why}")
        await self._end(slot, ended)
        return ended

    async def _attempts(self, job: CronJob, slot: Slot) -> SlotOutcome:
        while True:
            ended = await self._attempt(job, slot)
            if ended.status is SlotStatus.OK or ended.status is SlotStatus.SKIPPED or slot.attempts > job.retries:
                return ended
            log.warning("job %s (%s) failed; retrying: %s", job.id, job.name, ended.error)
            await asyncio.sleep(job.retry_delay_seconds)
            error = f"attempt {slot.attempts}: {ended.error or ended.status.value}"
            slot = msgspec.structs.replace(slot, attempts=slot.attempts + 1)
            await self._database.write(functools.partial(cron.note_attempt, slot=slot, error=error))

    async def _attempt(self, job: CronJob, slot: Slot) -> SlotOutcome:
        """Make one attempt; when this returns, it has ended, and an attempt that exceeded its timeout was stopped."""
        limit = getattr(job.spec, "timeout_seconds", None) or self.settings.timeout_seconds
        try:
            async with asyncio.timeout(limit) as scope:
                return await self._perform(job, slot)
        except TimeoutError:
            if not scope.expired():
                return SlotOutcome(SlotStatus.ERROR, "the run failed: TimeoutError")
            return SlotOutcome(SlotStatus.TIMEOUT, f"the run did not end within {limit:g} s and was stopped")
        except Exception as error:
            log.exception("job %s (%s) failed", job.id, job.name)
            return SlotOutcome(SlotStatus.ERROR, f"the run failed: {type(error).__name__}: {error}")

    async def _end(self, slot: Slot, ended: SlotOutcome) -> None:
        """Record the outcome. A failure is reported if it is the first, or the first after a success."""
        now = clock()
        keep = self.settings.keep_runs

        def write(store: Tx) -> CronJob | None:
            known = cron.end_slot(
                store,
                slot,
                ended.status,
                now,
                error=ended.error,
                summary=ended.summary,
                session_key=ended.session_key,
            )
            if not known:
                return None
            job = cron.find_job(store, slot.job)
            data: dict[str, Any] = {"name": slot.name, "slot": slot.slot, "status": ended.status.value}
            if ended.error:
                data["error"] = ended.error
            append_event(store, now, "cron.ended", slot.job, data)
            failed = ended.status in (SlotStatus.ERROR, SlotStatus.TIMEOUT, SlotStatus.UNKNOWN)
            before = cron.latest_run(store, slot.job, other_than=slot.slot)
            failing = before is not None and before.status is not SlotStatus.OK
            if failed and not failing:
                append_event(store, now, "cron.failing", slot.job, data)
            elif failing and ended.status is SlotStatus.OK:
                append_event(store, now, "cron.recovered", slot.job, data)
            close_one_shot(store, slot, ended.status)
            cron.prune_history(store, slot.job, keep)
            return job if failed and not failing else None

        while True:
            try:
                failing_now = await self._database.write(write)
                break
            except StoreError as error:
                if self._stopping:
                    return
                log.error("failed to record the end of %s at %d; retrying: %s", slot.job, slot.slot, error)
                await asyncio.sleep(WRITE_AGAIN_SECONDS)
        wanted = self.settings.report_failures and not self._stopping
        if failing_now is not None and self._report is not None and wanted:
            try:
                await self._report(failing_now, slot, ended)
            except Exception:
                log.exception("failed to report the failure of job %s", slot.job)

    # -- leases -----------------------------------------------------------------------------------------

    async def _look_after_runs(self) -> None:
        """Renew this scheduler's lease, and check those of others."""
        if self._runs:
            await self._database.write(functools.partial(cron.beat, holder=self._holder), durable=False)
        opened = await self._database.read(cron.open_slots)
        others = {
            (slot.job, slot.slot): slot
            for slot in opened
            if slot.status is SlotStatus.RUNNING and slot.holder != self._holder
        }
        for key in self._leases.expired({key: slot.beat for key, slot in others.items()}):
            await self._end(others[key], _vanished())
            self.wake()


def _replan(store: Tx, zone: ZoneInfo) -> None:
    """Recompute the next slots after a change of the time zone or of the time zone data."""
    for job in cron.enabled_jobs(store):
        next_at = next_slot(job.schedule, job.cursor, zone)
        if next_at != job.next_at:
            cron.move_cursor(store, job.id, job.cursor, next_at)


def _candidates(store: Tx) -> list[CronJob] | None:
    """Return the jobs that may have a slot to start; None if there is no slot to record or start."""
    now = clock()
    if not cron.pressing(store, now, now + JUMP_MS):
        return None
    waiting = {slot.job for slot in cron.open_slots(store)}
    jobs = {job.id: job for job in cron.due_jobs(store, now, now + JUMP_MS)}
    for job_id in waiting - jobs.keys():
        if (job := cron.find_job(store, job_id)) is not None:
            jobs[job_id] = job
    return list(jobs.values())


def clock() -> int:
    """Return the wall clock time in milliseconds."""
    return time.time_ns() // 1_000_000


def _vanished() -> SlotOutcome:
    return SlotOutcome(SlotStatus.UNKNOWN, "outcome unknown: the scheduler that ran it vanished; it is not run again")
