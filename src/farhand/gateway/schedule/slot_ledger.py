"""Record a row for every slot that is due, and claim waiting rows.

Everything runs inside one store transaction; see `scheduler.py` for the states of a slot.
"""

from __future__ import annotations

from zoneinfo import ZoneInfo

import msgspec

from farhand.gateway.schedule.time_parsing import DAY_MS, next_slot, slots_between
from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables import cron
from farhand.store.tables.cron import At, CronJob, Slot, SlotStatus

# How late a job may start even if its policy skips late slots, so that a restart does not lose one.
GRACE_MS = 60_000
LATE_MS = 10_000
# Smaller differences between the wall clock and elapsed time are corrections, not jumps.
JUMP_MS = 5_000
# How many passed slots get their own row, newest first; one row stands for all earlier ones.
MOST_ROWS = 100

_PASSED = "its time passed while nothing could run it"


def account(store: Tx, job: CronJob, now: int, zone: ZoneInfo, keep: int) -> None:
    """Record each slot between the job's cursor and now; keep at most `keep` finished rows."""
    # If the clock was days ahead, ignore the floor: repeating a slot is better than running nothing for days.
    earliest = max(now, job.floor) if job.floor - now < DAY_MS else now
    cursor = job.cursor
    if cursor > earliest + JUMP_MS:
        dropped = cron.forget_unrun(store, job.id, now)
        append_event(store, now, "cron.rewound", job.id, {"from": cursor, "to": earliest, "dropped": dropped})
        cursor = earliest
    slots, more = slots_between(job.schedule, cursor, now, zone, MOST_ROWS)
    slots = [slot for slot in slots if cron.find_slot(store, job.id, slot) is None]
    open_slots = [slot for slot in cron.open_slots(store) if slot.job == job.id]
    statuses = _fates(job, slots, now, open_slots)
    if more and slots:
        # The row before the first individual one stands for all earlier slots.
        older = _row(job, slots[0] - 1, now, SlotStatus.MISSED, _PASSED)
        cron.add_slot(store, msgspec.structs.replace(older, since=cursor))
    for slot, (status, error) in zip(slots, statuses, strict=True):
        cron.add_slot(store, _row(job, slot, now, status, error))
    wanted = [slot for slot, (status, _) in zip(slots, statuses, strict=True) if status is SlotStatus.WAITING]
    if wanted and job.missed in ("once", "window"):
        for earlier in open_slots:
            if earlier.status is SlotStatus.WAITING:
                cron.end_slot(store, earlier, SlotStatus.MISSED, now, error="a later slot took its place")
    cron.prune_history(store, job.id, keep)
    cron.move_cursor(store, job.id, max(now, cursor), next_slot(job.schedule, max(now, cursor), zone))
    lost = len(slots) - len(wanted)
    if lost or more:
        data = {"name": job.name, "slots": lost, "more": more, "policy": job.missed}
        append_event(store, now, "cron.missed", job.id, data)
    if isinstance(job.schedule, At) and not wanted and not open_slots:
        cron.disable_job(store, job.id)


def _fates(job: CronJob, slots: list[int], now: int, open_slots: list[Slot]) -> list[tuple[SlotStatus, str | None]]:
    """Return what to do with each due slot by the job's policy; oldest first."""
    wait: tuple[SlotStatus, str | None] = (SlotStatus.WAITING, None)
    missed = (SlotStatus.MISSED, _PASSED)
    if not slots:
        return []
    if job.missed == "all":
        surplus = min(len(slots), max(0, len(slots) + len(open_slots) - MOST_ROWS))
        return [wait] * (len(slots) - surplus) + [(SlotStatus.MISSED, "too many slots wait already")] * surplus
    newest = wait
    if job.missed == "skip":
        if open_slots:
            newest = (SlotStatus.SKIPPED, "the run before it had not ended")
        elif now - slots[-1] > GRACE_MS:
            newest = missed
    elif job.missed == "window" and now - slots[-1] > _window(job):
        newest = (SlotStatus.MISSED, f"it is older than the job's window of {job.window_seconds:g} s")
    return [missed] * (len(slots) - 1) + [newest]


class JobChecks(msgspec.Struct, frozen=True):
    """List which jobs may start, as checked before the transaction."""

    checked: frozenset[str]
    # Jobs whose pinned node is not connected.
    away: frozenset[str]
    # The reason for each paused job.
    paused: dict[str, str]


def take(
    store: Tx, now: int, checks: JobChecks, *, holder: str, room: int, since: int, only: str | None
) -> list[tuple[CronJob, Slot]]:
    """Claim for `holder` at most `room` slots that can start now.

    Any slot from before `since`, the holder's start, counts as late. `only`: only slots of this job. Slots of a job
    that was not checked, is away or is paused stay waiting.
    """
    opened = cron.open_slots(store)
    busy = {slot.job for slot in opened if slot.status is SlotStatus.RUNNING}
    begun: list[tuple[CronJob, Slot]] = []
    for slot in opened:
        if slot.status is not SlotStatus.WAITING or slot.job in busy or only not in (None, slot.job):
            continue
        job = cron.find_job(store, slot.job)
        if job is not None and job.id not in checks.checked:
            continue
        if job is None or not job.enabled:
            _skip(store, slot, now, "job disabled")
            continue
        pause = checks.paused.get(job.id)
        away = job.id in checks.away
        limit = {"skip": GRACE_MS, "window": _window(job)}.get(job.missed)
        if limit is not None and now - slot.slot > limit:
            full = "the run before it, or too many others, had not ended"
            _skip(store, slot, now, pause or (f"{_pinned(job)} was not connected" if away else full))
            continue
        if pause or away or room <= 0:
            continue
        late = slot.slot < since or now - slot.slot > LATE_MS
        if cron.take_slot(store, job.id, slot.slot, holder, now, late):
            taken = cron.find_slot(store, job.id, slot.slot)
            assert taken is not None
            append_event(store, now, "cron.started", job.id, {"name": job.name, "slot": slot.slot, "late": late})
            begun.append((job, taken))
            busy.add(job.id)
            room -= 1
    return begun


def _row(job: CronJob, slot: int, now: int, status: SlotStatus, error: str | None) -> Slot:
    over = status is not SlotStatus.WAITING
    return Slot(
        job=job.id,
        slot=slot,
        name=job.name,
        agent_id=job.agent_id,
        status=status,
        recorded_at=now,
        late=status is SlotStatus.MISSED,
        ended_at=now if over else None,
        error=error,
    )


def _skip(store: Tx, slot: Slot, now: int, why: str) -> None:
    cron.end_slot(store, slot, SlotStatus.SKIPPED, now, error=why)
    append_event(store, now, "cron.missed", slot.job, {"name": slot.name, "slots": 1, "reason": why})
    close_one_shot(store, slot, SlotStatus.SKIPPED)


def close_one_shot(store: Tx, slot: Slot, status: SlotStatus) -> None:
    job = cron.find_job(store, slot.job)
    if job is None or not isinstance(job.schedule, At):
        return
    if status is SlotStatus.OK and job.delete_after_run:
        cron.remove_job(store, job.id, history=False)
    elif slot.cause == "schedule" and job.next_at is None:
        cron.disable_job(store, job.id)


def _window(job: CronJob) -> float:
    return (job.window_seconds or 0) * 1000


def _pinned(job: CronJob) -> str:
    return f"node {job.node!r}" if job.node else f"a node with the tag {job.tag!r}"
