"""The scheduler: every slot of every job gets its row, and runs at most once.

A slot's row is its claim: (job, slot) is the primary key, so of any number of schedulers on one store one records it.
Its life:

    waiting   its time has come; it starts when nothing of its job runs and the job's node is there
    running   a holder works on it, and shows that it lives
    ok | error | timeout            how the run ended
    missed | skipped                it never ran, and says why
    unknown                         its holder vanished in the middle; it is not run again

The wall clock may jump. Ahead, it makes slots late, and the job's own policy decides about them. Back, it makes rows
of slots that are still to come: those that ran stay (a slot runs once), the others are dropped and come again.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from farhand.gateway.schedule.slot_ledger import JUMP_MS, JobChecks, account, close_one_shot, take
from farhand.gateway.schedule.time_parsing import next_slot
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import cron
from farhand.store.tables.cron import Job, Slot, SlotStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

# How often the clock and what other schedulers wrote is looked at, when nothing is due before.
POLL_SECONDS = 5.0
# A holder that showed no life for so long is taken for dead.
LEASE_SECONDS = 20.0
WRITE_AGAIN_SECONDS = 2.0


class Ended(msgspec.Struct, frozen=True):
    """How an attempt at a slot ended."""

    status: SlotStatus
    error: str | None = None
    summary: str | None = None
    session_key: str | None = None


class Run(msgspec.Struct, frozen=True):
    """A slot that has begun; the task ends with it and never raises."""

    job: Job
    slot: Slot
    task: asyncio.Task[Ended]


class ScheduleSettings(msgspec.Struct, frozen=True):
    zone: ZoneInfo
    enabled: bool = True
    max_concurrent: int = 4
    keep_runs: int = 200
    timeout_seconds: float = 3600.0
    max_jobs: int = 200
    report_failures: bool = True


# Does what a job is there for. Cancelling it stops whatever it began, and it returns only after that.
Perform = Callable[[Job, Slot], Awaitable[Ended]]


class Scheduler:
    """Runs from `async with` to its end; then what still ran is stopped and says so."""

    def __init__(
        self,
        database: Store,
        settings: ScheduleSettings,
        perform: Perform,
        *,
        current: Callable[[], ScheduleSettings] | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
        reachable: Callable[[Job], bool] = lambda _: True,
        paused: Callable[[Job], str | None] = lambda _: None,
        held: Callable[[], bool] = lambda: False,
        report: Callable[[Job, Slot, Ended], Awaitable[None]] | None = None,
        alone: bool = False,
        resume: bool = False,
        lease_seconds: float = LEASE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        settle_seconds: float = 0.0,
    ) -> None:
        """`current`: the settings as they are now, where they may change. `prepare` is called before each look at what
        is due. `reachable`: whether the node a job is pinned to is there. `paused`: why a job may not start, if so.
        `report` is told of a job's first failure.
        `held`: whether nothing may start now; what passes meanwhile is missed, as if nobody had been there.

        `alone`: no other scheduler works on this store, so what ran before this one's start has lost its holder.
        `resume`: performing the same attempt again finds the work of the first time, so such slots are taken up instead
        of given up, and what runs at the end is left for the next start. The first new slots are taken
        `settle_seconds` after the start.
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
        self._settle = settle_seconds
        self._holder = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._wakes = asyncio.Event()
        self._runs: dict[tuple[str, int], asyncio.Task[Ended]] = {}
        self._claims: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._started = clock()
        self._clocks = (clock(), time.monotonic())
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}
        self._stopping = False
        self._claiming = asyncio.Lock()

    async def __aenter__(self) -> Scheduler:
        self._started = clock()
        await self._follow_settings()
        if self._alone:
            for slot in await self._database.read(cron.open_slots):
                if slot.status is SlotStatus.RUNNING and not await self._take_up(slot):
                    await self._end(slot, _vanished())
        self._keeper = asyncio.create_task(self._keep_time(), name="scheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold()
        claiming = {task for task in (self._keeper, *self._claims) if task is not None}
        if claiming:
            await asyncio.wait(claiming)  # what was claimed has its run before the runs are ended
        await asyncio.sleep(0)
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        if runs:
            await asyncio.wait(runs)

    async def _follow_settings(self) -> None:
        """What the settings file says now holds for what is due next."""
        if self._prepare is not None:
            await self._prepare()
        if self._planned_for != self.zone:
            self._planned_for = self.zone
            await self._database.write(functools.partial(_replan, zone=self.zone))

    def wake(self) -> None:
        """Look now: something changed."""
        self._wakes.set()

    @property
    def settings(self) -> ScheduleSettings:
        return self._current()

    @property
    def zone(self) -> ZoneInfo:
        return self.settings.zone

    # -- keeping time -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Start nothing any more: the gateway is about to stop. What runs goes on until the end of `async with`."""
        self._stopping = True
        self.wake()

    async def _keep_time(self) -> None:
        await self._rest(self._settle)
        while not self._stopping:
            pause = self._poll
            try:
                await self._look_at_the_clock()
                await self._follow_settings()
                if self.settings.enabled and not self._held():
                    await self.advance()
                    pause = await self._pause()
                await self._look_after_runs()
            except StoreError as error:
                log.error("slots could not be recorded, trying again: %s", error)
                pause = 1.0
            except Exception:
                log.exception("the scheduler stumbled; it goes on")
            await self._rest(pause)

    async def _rest(self, seconds: float) -> None:
        """Until it is woken, or some time has passed."""
        if self._stopping:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wakes.wait()
        self._wakes.clear()

    async def _pause(self) -> float:
        """Until the next slot, but no longer than the clock may be left out of sight."""
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
            log.warning("the clock moved by %.1f s against the time that passed", jumped / 1000)
            data = {"from": before, "to": wall, "by_ms": jumped}
            await self._database.write(lambda store: append_event(store, wall, "cron.clock", "clock", data))

    async def advance(self, only: str | None = None) -> list[Run]:
        """Record every slot whose time has come, and start what can start; the runs that did.

        `only`: start nothing but slots of this job.
        """
        return await self._undivided(self._advance(only))

    async def record(self) -> None:
        """Record every slot whose time has come, and start nothing."""
        if self.settings.enabled:
            await self._undivided(self._advance(""))

    async def _undivided(self, claiming: Coroutine[Any, Any, T]) -> T:
        """What claims a slot begins its run, even if whoever asked for it has left in between."""
        task = asyncio.ensure_future(claiming)
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)
        return await asyncio.shield(task)

    async def _advance(self, only: str | None) -> list[Run]:
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

            def record(store: Tx) -> list[tuple[Job, Slot]]:
                now = clock()  # within the transaction: the cursor of another scheduler is never ahead of it
                for job in cron.due_jobs(store, now, now + JUMP_MS):
                    account(store, job, now, zone, keep)
                if stopping:
                    return []
                return take(store, now, checks, holder=holder, room=room, since=since, only=only)

            begun = await self._database.write(record)
            return [self._begin(job, slot) for job, slot in begun]

    async def _take_up(self, slot: Slot) -> bool:
        """Go on with a slot whose holder is gone."""

        holder = self._holder

        def adopt(store: Tx) -> Job | None:
            job = cron.find_job(store, slot.job)
            return job if job is not None and cron.adopt_slot(store, slot, holder) else None

        job = await self._database.write(adopt) if self._resume else None
        if job is None:
            return False
        self._begin(job, msgspec.structs.replace(slot, holder=self._holder))
        return True

    # -- running ----------------------------------------------------------------------------------------

    async def run_now(self, job_id: str) -> Run | None:
        """Run a job at once, beside its schedule. None while a run of it is under way."""
        return await self._undivided(self._run_now(job_id))

    async def _run_now(self, job_id: str) -> Run | None:
        now, holder = clock(), self._holder

        def claim(store: Tx) -> tuple[Job, Slot] | None:
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
        """Stop what runs of a job that was removed."""
        for (job, _), run in self._runs.items():
            if job == job_id:
                run.cancel()

    def _begin(self, job: Job, slot: Slot) -> Run:
        task = asyncio.create_task(self._run(job, slot), name=f"cron {job.id} {slot.slot}")
        self._runs[slot.job, slot.slot] = task
        task.add_done_callback(lambda _: self._over(slot))
        self.wake()  # to show life in time
        return Run(job, slot, task)

    def _over(self, slot: Slot) -> None:
        self._runs.pop((slot.job, slot.slot), None)
        self.wake()

    async def _run(self, job: Job, slot: Slot) -> Ended:
        try:
            ended = await self._attempts(job, slot)
        except asyncio.CancelledError:
            if self._stopping and self._resume:
                return Ended(SlotStatus.UNKNOWN, "the gateway stopped; the run goes on after its next start")
            why = "the gateway stopped before the run ended" if self._stopping else "the job was removed"
            ended = Ended(SlotStatus.ERROR, f"stopped: {why}")
        await self._end(slot, ended)
        return ended

    async def _attempts(self, job: Job, slot: Slot) -> Ended:
        while True:
            ended = await self._attempt(job, slot)
            if ended.status is SlotStatus.OK or ended.status is SlotStatus.SKIPPED or slot.attempts > job.retries:
                return ended
            log.warning("job %s (%s) failed and is tried again: %s", job.id, job.name, ended.error)
            await asyncio.sleep(job.retry_delay_seconds)
            error = f"attempt {slot.attempts}: {ended.error or ended.status.value}"
            slot = msgspec.structs.replace(slot, attempts=slot.attempts + 1)
            await self._database.write(functools.partial(cron.note_attempt, slot=slot, error=error))

    async def _attempt(self, job: Job, slot: Slot) -> Ended:
        """One attempt, ended for certain when this returns: what ran too long was stopped."""
        limit = getattr(job.spec, "timeout_seconds", None) or self.settings.timeout_seconds
        try:
            async with asyncio.timeout(limit) as scope:
                return await self._perform(job, slot)
        except TimeoutError:
            if not scope.expired():
                return Ended(SlotStatus.ERROR, "the run failed: TimeoutError")
            return Ended(SlotStatus.TIMEOUT, f"the run did not end within {limit:g} s and was stopped")
        except Exception as error:
            log.exception("job %s (%s) failed", job.id, job.name)
            return Ended(SlotStatus.ERROR, f"the run failed: {type(error).__name__}: {error}")

    async def _end(self, slot: Slot, ended: Ended) -> None:
        """Write the end down. The first failure after a success, or ever, is reported."""
        now = clock()
        keep = self.settings.keep_runs

        def write(store: Tx) -> Job | None:
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
                log.error("the end of %s at %d could not be written, trying again: %s", slot.job, slot.slot, error)
                await asyncio.sleep(WRITE_AGAIN_SECONDS)
        wanted = self.settings.report_failures and not self._stopping
        if failing_now is not None and self._report is not None and wanted:
            try:
                await self._report(failing_now, slot, ended)
            except Exception:
                log.exception("the failure of job %s could not be reported", slot.job)

    # -- signs of life ----------------------------------------------------------------------------------

    async def _look_after_runs(self) -> None:
        """Show that this one lives, and find out whether others still do."""
        if self._runs:
            await self._database.write(functools.partial(cron.beat, holder=self._holder), durable=False)
        opened = await self._database.read(cron.open_slots)
        others = {
            (slot.job, slot.slot): slot
            for slot in opened
            if slot.status is SlotStatus.RUNNING and slot.holder != self._holder
        }
        # The steady clock of this process, not the wall's: a clock that jumps kills nobody.
        steady = time.monotonic()
        beats: dict[tuple[str, int], tuple[int, float]] = {}
        for key, slot in others.items():
            seen, since = self._beats.get(key, (slot.beat, steady))
            beats[key] = (slot.beat, steady if slot.beat != seen else since)
            if steady - beats[key][1] > self._lease:
                await self._end(slot, _vanished())
                self.wake()
        self._beats = beats


def _replan(store: Tx, zone: ZoneInfo) -> None:
    """Plan again in another time zone, or after a change of the time zone data."""
    for job in cron.enabled_jobs(store):
        next_at = next_slot(job.schedule, job.cursor, zone)
        if next_at != job.next_at:
            cron.move_cursor(store, job.id, job.cursor, next_at)


def _candidates(store: Tx) -> list[Job] | None:
    """Return the jobs that may have a slot to start; None when there is no slot to record or to start."""
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
    """The wall clock, in milliseconds."""
    return time.time_ns() // 1_000_000


def _vanished() -> Ended:
    return Ended(SlotStatus.UNKNOWN, "outcome unknown: the scheduler that ran it vanished; it is not run again")
