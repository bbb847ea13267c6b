"""Jobs, and one row for each slot: the time at which a job was due, and the outcome."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

# -- types ------------------------------------------------------------------------------------------------


class At(msgspec.Struct, frozen=True, tag_field="kind", tag="at", rename="camel"):
    """Once."""

    at_ms: int


class Every(msgspec.Struct, frozen=True, tag_field="kind", tag="every", rename="camel"):
    """At the anchor and each interval after it, independent of how long the runs take."""

    every_ms: int
    anchor_ms: int


class Cron(msgspec.Struct, frozen=True, tag_field="kind", tag="cron", rename="camel", omit_defaults=True):
    """Five fields in a time zone; without one, in the user's."""

    expr: str
    tz: str | None = None


Schedule = At | Every | Cron


class SystemEvent(msgspec.Struct, frozen=True, tag_field="mode", tag="systemEvent", rename="camel"):
    """A message to the agent's main session."""

    text: str


class Task(msgspec.Struct, frozen=True, tag_field="mode", tag="task", rename="camel", omit_defaults=True):
    """A turn of the agent in a new session for each run."""

    message: str
    deliver: bool | None = None
    channel: str | None = None
    to: str | None = None
    model: str | None = None
    thinking: str | None = None
    timeout_seconds: float | None = None
    best_effort_deliver: bool = False


class CallSpec(msgspec.Struct, frozen=True, tag_field="mode", tag="call", rename="camel", omit_defaults=True):
    """A call of a tool, without a model."""

    tool: str
    args: dict[str, Any] = {}
    timeout_seconds: float | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag_field="mode", tag="heartbeat"):
    """The agent reads its HEARTBEAT.md. These jobs come from the settings and cannot be changed otherwise."""


Spec = SystemEvent | Task | CallSpec | Heartbeat
Missed = Literal["skip", "once", "all", "window"]


class CronJob(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    agent_id: str
    name: str
    schedule: Schedule
    spec: Spec
    description: str | None = None
    enabled: bool = True
    delete_after_run: bool = False
    # What happens to slots that passed while nothing could run.
    missed: Missed = "once"
    window_seconds: float | None = None
    retries: int = 0
    retry_delay_seconds: float = 60.0
    node: str | None = None
    tag: str | None = None
    created_at: int
    updated_at: int
    # Every slot up to this time has its row.
    cursor: int
    # Slots up to this time may have run and been pruned: they do not run again when the clock is set back.
    floor: int = 0
    # The first slot after the cursor, if any.
    next_at: int | None = None
    # The credential on whose behalf the job runs; empty: the owner, as in jobs of earlier versions.
    made_by: dict[str, Any] = {}
    # The origins of the call that made it, as `RunOptions.origins`.
    origins: tuple[str, ...] = ()
    # The agent that made it on behalf of `made_by`; empty if that did so itself.
    by_agent: str = ""

    @property
    def hidden(self) -> bool:
        return isinstance(self.spec, Heartbeat)


class SlotStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MISSED = "missed"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One time at which a job was due."""

    job: str
    slot: int
    # The name of the job, which may have been removed.
    name: str
    agent_id: str
    status: SlotStatus
    recorded_at: int
    cause: Literal["schedule", "manual"] = "schedule"
    # The scheduler that runs the slot.
    holder: str | None = None
    # Increases while the holder is alive.
    beat: int = 0
    attempts: int = 0
    late: bool = False
    # The row also stands for all slots after this time.
    since: int | None = None
    started_at: int | None = None
    ended_at: int | None = None
    error: str | None = None
    summary: str | None = None
    session_key: str | None = None


# -- jobs -------------------------------------------------------------------------------------------------

ADD_JOB: Final = """
    INSERT INTO cron_jobs (id, agent_id, hidden, enabled, created_at, cursor, floor, next_at, job)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET agent_id = excluded.agent_id, enabled = excluded.enabled,
        cursor = excluded.cursor, floor = excluded.floor, next_at = excluded.next_at, job = excluded.job"""
JOB: Final = "SELECT enabled, cursor, floor, next_at, job FROM cron_jobs"
JOBS: Final = f"""{JOB} WHERE hidden = 0 AND (cast(?1 AS TEXT) IS NULL OR agent_id = ?1) AND (enabled = 1 OR ?2 = 1)
    ORDER BY next_at IS NULL, next_at, created_at, id LIMIT ?3 OFFSET ?4"""
COUNT_JOBS: Final = """
    SELECT count(*), count(*) FILTER (WHERE enabled = 1 AND next_at <= ?3),
        min(next_at) FILTER (WHERE enabled = 1)
    FROM cron_jobs WHERE hidden = 0 AND (cast(?1 AS TEXT) IS NULL OR agent_id = ?1) AND (enabled = 1 OR ?2 = 1)"""
DUE: Final = f"{JOB} WHERE enabled = 1 AND (next_at <= ?1 OR cursor > ?2) ORDER BY next_at, id"
PRESSING: Final = """
    SELECT 1 FROM cron_jobs WHERE enabled = 1 AND (next_at <= ?1 OR cursor > ?2)
    UNION ALL SELECT 1 FROM cron_slots WHERE status = 'waiting' LIMIT 1"""
ENABLED: Final = f"{JOB} WHERE enabled = 1"
HIDDEN: Final = f"{JOB} WHERE hidden = 1"


def save_job(tx: Tx, job: CronJob) -> None:
    tx.execute(
        ADD_JOB,
        (
            job.id,
            job.agent_id,
            job.hidden,
            job.enabled,
            job.created_at,
            job.cursor,
            job.floor,
            job.next_at,
            msgspec.json.encode(job),
        ),
    )


def find_job(tx: Tx, job_id: str) -> CronJob | None:
    return next((_job(*row) for row in tx.execute(f"{JOB} WHERE id = ?", (job_id,))), None)


def list_jobs(tx: Tx, agent_id: str | None, include_disabled: bool, limit: int, offset: int) -> list[CronJob]:
    """Return jobs by their next slot, those without one last."""
    return [_job(*row) for row in tx.execute(JOBS, (agent_id, include_disabled, limit, offset))]


def count_jobs(tx: Tx, agent_id: str | None, include_disabled: bool, now: int) -> tuple[int, int, int | None]:
    """Return the number of jobs, the number that is due, and the next slot of any."""
    row: Any = tx.execute(COUNT_JOBS, (agent_id, include_disabled, now)).fetchall()[0]
    return int(row[0]), int(row[1]), row[2]


def enabled_jobs(tx: Tx) -> list[CronJob]:
    return [_job(*row) for row in tx.execute(ENABLED)]


def hidden_jobs(tx: Tx) -> list[CronJob]:
    return [_job(*row) for row in tx.execute(HIDDEN)]


def due_jobs(tx: Tx, now: int, ahead: int) -> list[CronJob]:
    """Return jobs with a slot that has no row, and those with a cursor after `ahead`: the clock was set back."""
    return [_job(*row) for row in tx.execute(DUE, (now, ahead))]


def pressing(tx: Tx, now: int, ahead: int) -> bool:
    """Return whether there is a slot to record or to start."""
    return bool(tx.execute(PRESSING, (now, ahead)).fetchall())


def next_at(tx: Tx) -> int | None:
    row: Any = tx.execute("SELECT min(next_at) FROM cron_jobs WHERE enabled = 1").fetchall()[0]
    return None if row[0] is None else int(row[0])


def move_cursor(tx: Tx, job_id: str, cursor: int, next_at: int | None) -> None:
    tx.execute("UPDATE cron_jobs SET cursor = ?, next_at = ? WHERE id = ?", (cursor, next_at, job_id))


def disable_job(tx: Tx, job_id: str) -> None:
    tx.execute("UPDATE cron_jobs SET enabled = 0, next_at = NULL WHERE id = ?", (job_id,))


def remove_job(tx: Tx, job_id: str, *, history: bool) -> bool:
    tx.execute("DELETE FROM cron_jobs WHERE id = ?", (job_id,))
    known = tx.changes() > 0
    if history:
        tx.execute("DELETE FROM cron_slots WHERE job = ?", (job_id,))
    return known


def _job(enabled: int, cursor: int, floor: int, next_at: int | None, job: bytes) -> CronJob:
    kept = msgspec.json.decode(job, type=CronJob)
    return msgspec.structs.replace(kept, enabled=bool(enabled), cursor=cursor, floor=floor, next_at=next_at)


# -- slots ------------------------------------------------------------------------------------------------

_SLOTS: Final = Table("cron_slots", Slot)
TAKE: Final = """
    UPDATE cron_slots SET status = 'running', holder = ?, started_at = ?, late = ?, attempts = 1, beat = 0
    WHERE job = ? AND slot = ? AND status = 'waiting'"""
ADOPT: Final = """
    UPDATE cron_slots SET holder = ?, beat = 0
    WHERE job = ? AND slot = ? AND holder IS NOT DISTINCT FROM ? AND status = 'running'"""
END: Final = """
    UPDATE cron_slots SET status = ?1, ended_at = ?2, error = ?3, summary = ?4, session_key = ?5
    WHERE job = ?6 AND slot = ?7 AND holder IS NOT DISTINCT FROM ?8
    AND (status IN ('waiting', 'running') OR (status = 'unknown' AND ?1 != 'unknown'))"""
ATTEMPT: Final = "UPDATE cron_slots SET attempts = ?, error = ? WHERE job = ? AND slot = ? AND holder = ?"
# Of a job, or of all that are not hidden.
RUNS: Final = """
    WHERE ended_at IS NOT NULL AND (cast(?1 AS TEXT) IS NULL OR job = ?1)
        AND (cast(?1 AS TEXT) IS NOT NULL OR job NOT IN (SELECT id FROM cron_jobs WHERE hidden = 1))"""
NEWEST: Final = "ORDER BY ended_at DESC, slot DESC"
LATEST_RUN: Final = """job = ? AND status IN ('ok', 'error', 'timeout', 'unknown') AND slot != ?
    ORDER BY started_at DESC LIMIT 1"""
UNRUN_AFTER: Final = """
    DELETE FROM cron_slots WHERE job = ? AND slot > ? AND status IN ('missed', 'skipped', 'waiting')
    AND cause = 'schedule'"""
SURPLUS: Final = """
    SELECT max(slot) FILTER (WHERE status IN ('ok', 'error', 'timeout', 'unknown')), count(*) FROM (
        SELECT slot, status FROM cron_slots WHERE job = ?1 AND ended_at IS NOT NULL
        ORDER BY ended_at DESC, slot DESC LIMIT 1000000000 OFFSET ?2) AS older"""
PRUNE: Final = """
    DELETE FROM cron_slots WHERE job = ?1 AND ended_at IS NOT NULL AND slot NOT IN (
        SELECT slot FROM cron_slots WHERE job = ?1 AND ended_at IS NOT NULL
        ORDER BY ended_at DESC, slot DESC LIMIT ?2)"""
FORGET_ORPHANS: Final = """
    DELETE FROM cron_slots WHERE (job, slot) IN (
        SELECT job, slot FROM cron_slots WHERE ended_at < ? AND job NOT IN (SELECT id FROM cron_jobs) LIMIT ?)"""


def add_slot(tx: Tx, slot: Slot) -> bool:
    """Add a slot; return False if it has a row already, so that it must not run again."""
    _SLOTS.add(tx, slot, "ON CONFLICT DO NOTHING")
    return tx.changes() > 0


def find_slot(tx: Tx, job_id: str, slot: int) -> Slot | None:
    return _SLOTS.find(tx, "job = ? AND slot = ?", job_id, slot)


def open_slots(tx: Tx) -> list[Slot]:
    """Return the slots that wait or run, oldest first."""
    return _SLOTS.all(tx, "WHERE status IN ('waiting', 'running') ORDER BY slot, job")


def take_slot(tx: Tx, job_id: str, slot: int, holder: str, now: int, late: bool) -> bool:
    tx.execute(TAKE, (holder, now, late, job_id, slot))
    return tx.changes() > 0


def adopt_slot(tx: Tx, slot: Slot, holder: str) -> bool:
    """Take over a running slot from a holder that is gone; return False if it was taken over already."""
    tx.execute(ADOPT, (holder, slot.job, slot.slot, slot.holder))
    return tx.changes() > 0


def end_slot(
    tx: Tx,
    slot: Slot,
    status: SlotStatus,
    now: int,
    *,
    error: str | None = None,
    summary: str | None = None,
    session_key: str | None = None,
) -> bool:
    """Store the end of a slot; return False if it has ended. The holder's own end replaces an assumed one."""
    tx.execute(END, (status, now, error, summary, session_key, slot.job, slot.slot, slot.holder))
    return tx.changes() > 0


def note_attempt(tx: Tx, slot: Slot, error: str) -> None:
    """Count a further attempt, and store the error of the one before."""
    tx.execute(ATTEMPT, (slot.attempts, error, slot.job, slot.slot, slot.holder))


def beat(tx: Tx, holder: str) -> None:
    tx.execute("UPDATE cron_slots SET beat = beat + 1 WHERE holder = ? AND status = 'running'", (holder,))


def list_runs(tx: Tx, job_id: str | None, limit: int, offset: int) -> list[Slot]:
    """Return slots that have ended, newest first."""
    return _SLOTS.all(tx, f"{RUNS} {NEWEST} LIMIT ?2 OFFSET ?3", job_id, limit, offset)


def count_runs(tx: Tx, job_id: str | None) -> int:
    row: Any = tx.execute(f"SELECT count(*) FROM cron_slots {RUNS}", (job_id,)).fetchone()  # noqa: S608
    return int(row[0])


def latest_slots(tx: Tx, job_id: str, limit: int) -> list[Slot]:
    return _SLOTS.all(tx, f"WHERE job = ? AND ended_at IS NOT NULL {NEWEST} LIMIT ?", job_id, limit)


def latest_run(tx: Tx, job_id: str, *, other_than: int = -1) -> Slot | None:
    """Return the last slot that ran, with any outcome."""
    return _SLOTS.find(tx, LATEST_RUN, job_id, other_than)


def forget_unrun(tx: Tx, job_id: str, after: int) -> int:
    """Delete the slots after a time that never ran, since they are still to come; return how many."""
    tx.execute(UNRUN_AFTER, (job_id, after))
    return tx.changes()


def prune_history(tx: Tx, job_id: str, keep: int) -> None:
    row: Any = tx.execute(SURPLUS, (job_id, keep)).fetchall()[0]
    newest, surplus = row
    if surplus:
        tx.execute(PRUNE, (job_id, keep))
    if newest is not None:
        tx.execute("UPDATE cron_jobs SET floor = ?1 WHERE id = ?2 AND floor < ?1", (newest, job_id))


def forget_orphans(tx: Tx, before: int, most: int) -> int:
    """Delete runs of removed jobs that ended before a time; `prune_history` limits those of other jobs."""
    tx.execute(FORGET_ORPHANS, (before, most))
    return tx.changes()
