"""Remove the oldest events and calls in such a way that the rest can still be verified.

Events are removed from the front, up to one that carries a seal. The same transaction appends the event
`journal.pruned` with that seal and what else a verification needs to begin there. It is sealed itself, so that events
removed by anything else are still detected. A call is removed with its last event. A call that must stay (it can be
repeated by its idempotency key or undone, or its run is open) is covered again by an event `call.kept`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from farhand.store.history.seal_coverage import (
    CALL_KEPT,
    PRUNED,
    Covers,
    MessageAdded,
    Pruned,
    chained_entries,
    checkpoint,
    rows_after,
)
from farhand.store.journal.events import append_event
from farhand.store.ports import Seals, Tx
from farhand.store.tables import calls
from farhand.store.tables.idempotency import IDEMPOTENCY_MS

# The approximate number of events that one transaction removes.
ROWS: Final = 256
# The approximate number of bytes that one transaction removes.
BYTES: Final = 4 * 1024 * 1024
# The newest events are never removed: readers and the check of the journal's end need them.
TAIL: Final = 256
EVENT_BYTES: Final = 128
CALL_BYTES: Final = 512
RUN_KEY: Final = "run:"

USAGE: Final = f"""
    SELECT (SELECT count(*) FROM events), (SELECT coalesce(sum(length(data) + {EVENT_BYTES}), 0) FROM events),
        (SELECT count(*) FROM calls),
        (SELECT coalesce(sum(length(args) + coalesce(length(result), 0) + {CALL_BYTES}), 0) FROM calls)"""  # noqa: S608
SIZE: Final = "SELECT length(args) + coalesce(length(result), 0), idempotency_key, created_at FROM calls WHERE id = ?"
RUN_OPEN: Final = "SELECT 1 FROM runs WHERE id = ? AND ended_at IS NULL"


class HistorySize(msgspec.Struct, frozen=True):
    """The size of the history, in rows and bytes of content."""

    events: int
    event_bytes: int
    calls: int
    call_bytes: int

    @property
    def total(self) -> int:
        return self.event_bytes + self.call_bytes


class Batch(msgspec.Struct, frozen=True):
    """What one transaction removes."""

    pruned: Pruned
    calls: list[str]
    kept: list[str]
    freed: int


def usage(tx: Tx) -> HistorySize:
    """Return the size of the history. Reads every row."""
    row: Any = tx.execute(USAGE).fetchall()[0]
    return HistorySize(*row)


def plan(
    tx: Tx,
    sealer: Seals,
    *,
    now: int,
    before: int,
    to_free: int,
    last: int,
    has_undo: Callable[[str], bool] = lambda _: False,
) -> Batch | None:
    """Return the next batch of events before the time `before`, or later ones until `to_free` bytes are freed.

    Returns None when nothing is left to remove. Events after `last` stay. Only reads.
    """
    start = checkpoint(tx)
    covers = Covers(tx, () if start is None else start.open)
    covers.waiting = set() if start is None else set(start.waiting)
    position = start.through if start else 0
    digest = bytes.fromhex(start.hash) if start else sealer.beginning
    done = _Progress(start or Pruned(), freed=0)
    group: list[tuple[Any, ...]] = []
    while rows := rows_after(tx, int(group[-1][0]) if group else position):
        for row in rows:
            if row[0] > last:
                return done.batch(tx, now, has_undo)
            group.append(row)
            if row[5] is None:
                continue
            if row[1] >= before and done.freed >= to_free:
                return done.batch(tx, now, has_undo)
            if done.pruned.events - (start.events if start else 0) >= ROWS or done.freed >= BYTES:
                return done.batch(tx, now, has_undo)
            sound = sealer.hash(digest, [covers.with_row(one) for one in group]) == row[5]
            done.take(tx, group, covers, sound=sound)
            position, digest, group = int(row[0]), bytes(row[5]), []
    return done.batch(tx, now, has_undo)


class _Progress:
    """A batch that is being collected, group by group."""

    def __init__(self, pruned: Pruned, freed: int) -> None:
        self.pruned = pruned
        self.freed = freed
        self._begun_with = pruned.through
        self._ended: dict[str, None] = {}
        self._last_entry = pruned.entries
        self._open: tuple[list[str], list[str]] = (pruned.open, pruned.waiting)

    def take(self, tx: Tx, group: list[tuple[Any, ...]], covers: Covers, *, sound: bool) -> None:
        messages = 0
        for _, _, kind, subject, data, _ in group:
            self.freed += len(data) + EVENT_BYTES
            if kind in ("call.ended", CALL_KEPT):
                self._ended[subject] = None
                found: list[Any] = tx.execute(SIZE, (subject,)).fetchall()
                self.freed += found[0][0] + CALL_BYTES if found else 0
            elif kind == "message.added":
                messages += 1
                with contextlib.suppress(msgspec.MsgspecError):  # a modified event does not match its seal either
                    self._last_entry = max(self._last_entry, msgspec.json.decode(data, type=MessageAdded).seq)
        last = group[-1]
        self._open = (sorted(covers.open), sorted(covers.waiting))
        self.pruned = msgspec.structs.replace(
            self.pruned,
            through=int(last[0]),
            hash=bytes(last[5]).hex(),
            until=int(last[1]),
            events=self.pruned.events + len(group),
            messages=self.pruned.messages + messages,
            broken=self.pruned.broken if sound or self.pruned.broken is not None else int(group[0][0]),
        )

    def batch(self, tx: Tx, now: int, has_undo: Callable[[str], bool]) -> Batch | None:
        if self.pruned.through == self._begun_with:
            return None
        gone: list[str] = []
        kept: list[str] = []
        for call_id in self._ended:
            found: list[Any] = tx.execute(SIZE, (call_id,)).fetchall()
            if not found:
                continue
            if _needed(tx, found[0][1], found[0][2], now) or has_undo(call_id):
                kept.append(call_id)
                self.freed -= found[0][0] + CALL_BYTES
            else:
                gone.append(call_id)
        digest = chained_entries(tx, self.pruned.entries, self._last_entry, bytes.fromhex(self.pruned.digest))
        opened, waiting = self._open
        pruned = msgspec.structs.replace(
            self.pruned,
            calls=self.pruned.calls + len(gone),
            entries=self._last_entry,
            digest=digest.hex(),
            open=opened,
            waiting=waiting,
        )
        return Batch(pruned, gone, kept, self.freed)


def _needed(tx: Tx, key: str | None, created_at: int, now: int) -> bool:
    """Return whether a call that has ended may still be needed: by its key, or by an open run."""
    if key is None:
        return False
    if created_at >= now - IDEMPOTENCY_MS:
        return True
    return key.startswith(RUN_KEY) and bool(tx.execute(RUN_OPEN, (key.split(":", 2)[1],)).fetchall())


def apply(tx: Tx, batch: Batch, now: int) -> int:
    """Remove a batch and return the number of bytes freed: none if another gateway removed it meanwhile."""
    done = checkpoint(tx)
    if done is not None and done.through >= batch.pruned.through:
        return 0
    tx.execute("DELETE FROM events WHERE id <= ?", (batch.pruned.through,))
    ids = [(call_id,) for call_id in batch.calls]
    tx.executemany("DELETE FROM calls WHERE id = ?", ids)
    tx.executemany("DELETE FROM approvals WHERE call_id = ?", ids)
    tx.executemany("DELETE FROM receipts WHERE call_id = ?", ids)
    for call_id in batch.kept:
        calls.append_kept(tx, call_id, now)
    data: dict[str, Any] = msgspec.to_builtins(batch.pruned)
    append_event(tx, now, PRUNED, "journal", data)
    return batch.freed


def forget_fanouts(tx: Tx, now: int) -> None:
    """Delete fan-outs whose events were removed, unless they can still be repeated by their idempotency keys."""
    done = checkpoint(tx)
    before = 0 if done is None else min(done.until, now - IDEMPOTENCY_MS)
    tx.execute("DELETE FROM fanout_calls WHERE fanout IN (SELECT id FROM fanouts WHERE created_at < ?)", (before,))
    tx.execute("DELETE FROM fanouts WHERE created_at < ?", (before,))
