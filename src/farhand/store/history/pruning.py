"""Removing the oldest part of the journal and of the record of calls, so that what remains can still be verified.

Events are removed from the front, up to one that carries a seal. The transaction that removes them appends the event
`journal.pruned`, which holds that seal and what else a verification needs to begin there: it is sealed itself, so
events that anything else removed are still missed. Calls go with their last event. One that has to stay (it can be
repeated by its idempotency key or undone, or its run goes on) is told of again by an event `call.kept`.
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
    Pruned,
    SealedRows,
    ToldMessage,
    chained_entries,
    checkpoint,
    rows_after,
)
from farhand.store.journal.events import append_event
from farhand.store.ports import JournalRow, Seals, Tx
from farhand.store.tables import calls
from farhand.store.tables.idempotency import IDEMPOTENCY_MS

# Events that are removed in one transaction, or a few more.
ROWS: Final = 256
# Bytes that are removed in one transaction, or one commit's more.
BYTES: Final = 4 * 1024 * 1024
# The newest events are never removed: readers and the look at the journal's end need them.
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


class Usage(msgspec.Struct, frozen=True):
    """What the history takes, in rows and in bytes of their content."""

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


def usage(connection: Tx) -> Usage:
    """Looks at every row; for a large store, on a connection of its own."""
    row: Any = connection.execute(USAGE).fetchall()[0]
    return Usage(*row)


def used_bytes(connection: Tx) -> int:
    """The part of the file that is in use, from its header alone."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchall()[0][0]) for name in names)
    return (pages - free) * size


def plan(
    connection: Tx,
    sealer: Seals,
    *,
    now: int,
    before: int,
    to_free: int,
    last: int,
    has_undo: Callable[[str], bool] = lambda _: False,
) -> Batch | None:
    """The next batch of what happened earlier than `before`, or later until `to_free` bytes are; None: nothing is left.

    Nothing behind the event `last` is removed. Only reads.
    """
    start = checkpoint(connection)
    covers = Covers(connection, () if start is None else start.open)
    covers.waiting = set() if start is None else set(start.waiting)
    position = start.through if start else 0
    digest = bytes.fromhex(start.hash) if start else sealer.beginning
    done = _Progress(start or Pruned(), freed=0)
    group: list[tuple[Any, ...]] = []
    while rows := rows_after(connection, int(group[-1][0]) if group else position):
        for row in rows:
            if row[0] > last:
                return done.batch(connection, now, has_undo)
            group.append(row)
            if row[5] is None:
                continue
            if row[1] >= before and done.freed >= to_free:
                return done.batch(connection, now, has_undo)
            if done.pruned.events - (start.events if start else 0) >= ROWS or done.freed >= BYTES:
                return done.batch(connection, now, has_undo)
            sealed: list[JournalRow] = [((one[0], one[1], one[2], one[3], one[4]), covers(*one[2:5])) for one in group]
            sound = sealer.hash(digest, sealed) == row[5]
            done.take(connection, group, covers, sound=sound)
            position, digest, group = int(row[0]), bytes(row[5]), []
    return done.batch(connection, now, has_undo)


class _Progress:
    """A batch as it grows, group by group."""

    def __init__(self, pruned: Pruned, freed: int) -> None:
        self.pruned = pruned
        self.freed = freed
        self._begun_with = pruned.through
        self._ended: dict[str, None] = {}
        self._last_entry = pruned.entries
        self._open: tuple[list[str], list[str]] = (pruned.open, pruned.waiting)

    def take(self, connection: Tx, group: list[tuple[Any, ...]], covers: Covers, *, sound: bool) -> None:
        messages = 0
        for _, _, kind, subject, data, _ in group:
            self.freed += len(data) + EVENT_BYTES
            if kind in ("call.ended", CALL_KEPT):
                self._ended[subject] = None
                found: list[Any] = connection.execute(SIZE, (subject,)).fetchall()
                self.freed += found[0][0] + CALL_BYTES if found else 0
            elif kind == "message.added":
                messages += 1
                self._told(data)
            elif kind == "journal.sealed":
                self._old(data)
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

    def _told(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):  # one that was changed does not fit its seal either
            self._last_entry = max(self._last_entry, msgspec.json.decode(data, type=ToldMessage).seq)

    def _old(self, data: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._last_entry = max(self._last_entry, msgspec.json.decode(data, type=SealedRows).entries)

    def batch(self, connection: Tx, now: int, has_undo: Callable[[str], bool]) -> Batch | None:
        if self.pruned.through == self._begun_with:
            return None
        gone: list[str] = []
        kept: list[str] = []
        for call_id in self._ended:
            found: list[Any] = connection.execute(SIZE, (call_id,)).fetchall()
            if not found:
                continue
            if _needed(connection, found[0][1], found[0][2], now) or has_undo(call_id):
                kept.append(call_id)
                self.freed -= found[0][0] + CALL_BYTES
            else:
                gone.append(call_id)
        digest = chained_entries(connection, self.pruned.entries, self._last_entry, bytes.fromhex(self.pruned.digest))
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


def _needed(connection: Tx, key: str | None, created_at: int, now: int) -> bool:
    """Whether a call that has ended may still be asked for: by its key, or by a run that goes on."""
    if key is None:
        return False
    if created_at >= now - IDEMPOTENCY_MS:
        return True
    return key.startswith(RUN_KEY) and bool(connection.execute(RUN_OPEN, (key.split(":", 2)[1],)).fetchall())


def apply(connection: Tx, batch: Batch, now: int) -> int:
    """Remove a batch, with the transaction under way; the bytes that this frees."""
    connection.execute("DELETE FROM events WHERE id <= ?", (batch.pruned.through,))
    ids = [(call_id,) for call_id in batch.calls]
    connection.executemany("DELETE FROM calls WHERE id = ?", ids)
    connection.executemany("DELETE FROM approvals WHERE call_id = ?", ids)
    for call_id in batch.kept:
        calls.tell_kept(connection, call_id, now)
    data: dict[str, Any] = msgspec.to_builtins(batch.pruned)
    append_event(connection, now, PRUNED, "journal", data)
    return batch.freed


def forget_fanouts(connection: Tx, before: int) -> None:
    """Remove the lists of calls of fan-outs that began before a moment."""
    connection.execute(
        "DELETE FROM fanout_calls WHERE fanout IN (SELECT id FROM fanouts WHERE created_at < ?)", (before,)
    )
    connection.execute("DELETE FROM fanouts WHERE created_at < ?", (before,))
