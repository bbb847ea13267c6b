"""Budgets: limits, what is used of them, and what running work has reserved.

Amounts are integers: money in billionths of a US dollar, wall time in milliseconds. What is reserved counts as used
until the work ends; `settle` then replaces it with what was really used. A reservation whose work was lost in a crash
stays counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import StoreError, Tx

Period = Literal["day", "total"]
TOTAL: Final = "total"


class Unit(StrEnum):
    MONEY = "money"
    TOKENS = "tokens"
    CALLS = "calls"
    BYTES = "bytes"
    MACHINES = "machines"
    WALL_SECONDS = "wall_seconds"


# How many of the stored integers make one.
SCALE: Final[Mapping[Unit, int]] = {Unit.MONEY: 1_000_000_000, Unit.WALL_SECONDS: 1000}
LARGEST: Final = 2**62


class Limit(msgspec.Struct, frozen=True):
    """What a subject (`all`, `token:ID`, `agent:ID`, `session:KEY`) may use in a period."""

    subject: str
    unit: Unit
    period: Period
    amount: int

    def span(self, now: int) -> str:
        """Return the present period as it is stored: the day in UTC, or `total`."""
        return TOTAL if self.period == TOTAL else _day(now).strftime("%Y-%m-%d")

    def renews_at(self, now: int) -> int | None:
        """Return when the period ends; None: never."""
        if self.period == TOTAL:
            return None
        return int((_day(now) + timedelta(days=1)).timestamp() * 1000)


class Want(msgspec.Struct, frozen=True):
    """What a piece of work reserves of a unit, and how much must be left for it to start."""

    amount: int
    least: int


class Use(msgspec.Struct, frozen=True):
    """What is used of a limit, including what is reserved."""

    limit: Limit
    used: int
    reserved: int

    @property
    def left(self) -> int:
        return max(0, self.limit.amount - self.used)


class BudgetExceeded(StoreError):
    """Less is left of a limit than the work needs; nothing was recorded."""

    def __init__(self, use: Use, least: int) -> None:
        super().__init__(f"the {use.limit.unit} of {use.limit.subject} are used up")
        self.use = use
        self.least = least


_RESERVED: Final = "SELECT coalesce(sum(amount), 0) FROM budget_holds WHERE subject = ? AND unit = ? AND period = ?"
_ADD: Final = """
    INSERT INTO budget_use (subject, unit, period, used, updated_at) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (subject, unit, period)
    DO UPDATE SET used = budget_use.used + excluded.used, updated_at = excluded.updated_at"""
_HOLD: Final = "INSERT INTO budget_holds (id, subject, unit, period, amount, created_at) VALUES (?, ?, ?, ?, ?, ?)"
_HELD: Final = "SELECT subject, unit, period, amount FROM budget_holds WHERE id = ?"
_MACHINES: Final = "SELECT node_id FROM budget_machines WHERE subject = ? AND period = ?"
_MACHINE: Final = """
    INSERT INTO budget_machines (subject, period, node_id, used_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (subject, period, node_id) DO NOTHING"""

_SUBJECTS: Final = """
    SELECT subject FROM budget_use WHERE period IN (?, ?)
    UNION SELECT subject FROM budget_machines WHERE period IN (?, ?)"""


# -- using --------------------------------------------------------------------------------------------------


def take(
    tx: Tx, hold: str, limits: Iterable[Limit], wants: Mapping[Unit, Want], nodes: Collection[str], now: int
) -> dict[Unit, int]:
    """Reserve what a piece of work wants of every limit; return the least that is reserved of each unit.

    `hold` identifies the reservation for `settle`; a second `take` of the same one changes nothing. Raises
    BudgetExceeded, without a change.
    """
    if tx.execute(_HELD, (hold,)).fetchall():
        return {}
    taken: list[tuple[Limit, int]] = []
    machines: list[tuple[Any, ...]] = []
    for limit in limits:
        if limit.unit is Unit.MACHINES:
            check_machines(tx, limit, nodes, now)
            machines += [(limit.subject, limit.span(now), node, now) for node in nodes]
        elif (want := wants.get(limit.unit)) is not None:
            use = use_of(tx, limit, now)
            if use.left < want.least:
                raise BudgetExceeded(use, want.least)
            taken.append((limit, min(want.amount, use.left)))
    tx.executemany(_ADD, [(one.subject, str(one.unit), one.span(now), amount, now) for one, amount in taken])
    tx.executemany(_HOLD, [(hold, one.subject, str(one.unit), one.span(now), amount, now) for one, amount in taken])
    tx.executemany(_MACHINE, machines)
    granted: dict[Unit, int] = {}
    for limit, amount in taken:
        granted[limit.unit] = min(amount, granted.get(limit.unit, amount))
    return granted


def check_machines(tx: Tx, limit: Limit, nodes: Collection[str], now: int) -> None:
    """Raise BudgetExceeded if `nodes` include more new machines than the limit allows."""
    known = {str(row[0]) for row in tx.execute(_MACHINES, (limit.subject, limit.span(now)))}
    if (new := set(nodes) - known) and len(known | new) > limit.amount:
        raise BudgetExceeded(Use(limit, len(known), 0), len(new))


def settle(tx: Tx, hold: str, actual: Mapping[Unit, int], now: int) -> None:
    """Replace a reservation with what was used; units that are not in `actual` were used as reserved."""
    held = tx.execute(_HELD, (hold,)).fetchall()
    rows = [(str(subject), Unit(unit), str(span), int(amount)) for subject, unit, span, amount in held]
    if rows:
        changes = [
            (subject, str(unit), span, actual.get(unit, amount) - amount, now) for subject, unit, span, amount in rows
        ]
        tx.executemany(_ADD, [change for change in changes if change[3]])
        tx.execute("DELETE FROM budget_holds WHERE id = ?", (hold,))


def add(tx: Tx, limits: Sequence[Limit], amounts: Mapping[Unit, int], now: int) -> BudgetExceeded | None:
    """Count what was used without a reservation; return the limit that is reached, if one is."""
    counted = [limit for limit in limits if limit.unit in amounts]
    tx.executemany(
        _ADD,
        [(one.subject, str(one.unit), one.span(now), amounts[one.unit], now) for one in counted if amounts[one.unit]],
    )
    for limit in counted:
        if not (use := use_of(tx, limit, now)).left:
            return BudgetExceeded(use, 1)
    return None


def use_of(tx: Tx, limit: Limit, now: int) -> Use:
    span = limit.span(now)
    if limit.unit is Unit.MACHINES:
        return Use(limit, len(tx.execute(_MACHINES, (limit.subject, span)).fetchall()), 0)
    key = (limit.subject, str(limit.unit), span)
    rows = tx.execute("SELECT used FROM budget_use WHERE subject = ? AND unit = ? AND period = ?", key).fetchall()
    [(reserved,)] = tx.execute(_RESERVED, key).fetchall()
    return Use(limit, int(rows[0][0]) if rows else 0, int(reserved))


def subjects_in_use(tx: Tx, now: int) -> set[str]:
    """Return the subjects that have used something in the present periods."""
    spans = (TOTAL, _day(now).strftime("%Y-%m-%d"))
    return {str(row[0]) for row in tx.execute(_SUBJECTS, (*spans, *spans))}


def _day(now: int) -> datetime:
    return datetime.fromtimestamp(now / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)


# -- limits -------------------------------------------------------------------------------------------------


def all_limits(tx: Tx) -> list[Limit]:
    rows = tx.execute("SELECT subject, unit, period, amount FROM budget_limits ORDER BY subject, unit")
    return [Limit(str(subject), Unit(unit), period, int(amount)) for subject, unit, period, amount in rows]


def set_limits(tx: Tx, subject: str, limits: Sequence[Limit], by: str, now: int) -> None:
    """Replace the limits of a subject; none: the defaults of the settings apply again."""
    tx.execute("DELETE FROM budget_limits WHERE subject = ?", (subject,))
    tx.executemany(
        "INSERT INTO budget_limits (subject, unit, period, amount, made_by, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        [(subject, str(limit.unit), limit.period, limit.amount, by, now) for limit in limits],
    )
    data = {"by": by, "limits": {str(limit.unit): [limit.amount, limit.period] for limit in limits}}
    append_event(tx, now, "budget.set", subject, data)


def parent_of_session(tx: Tx, key: str) -> str | None:
    rows = tx.execute("SELECT parent_key FROM sessions WHERE key = ?", (key,)).fetchall()
    return None if not rows or rows[0][0] is None else str(rows[0][0])


def forget(tx: Tx, before: int, limit: int) -> int:
    """Remove up to `limit` rows of days and of sessions that were last used before a moment."""
    removed = 0
    for table, column in (("budget_use", "updated_at"), ("budget_holds", "created_at"), ("budget_machines", "used_at")):
        keys = {"budget_use": "unit", "budget_holds": "id", "budget_machines": "node_id"}[table]
        rows = tx.execute(
            f"SELECT subject, period, {keys} FROM {table} "  # noqa: S608
            f"WHERE {column} < ? AND (period <> 'total' OR subject LIKE 'session:%') LIMIT ?",
            (before, limit - removed),
        ).fetchall()
        tx.executemany(
            f"DELETE FROM {table} WHERE subject = ? AND period = ? AND {keys} = ?",  # noqa: S608
            rows,
        )
        removed += len(rows)
        if removed >= limit:
            break
    return removed
