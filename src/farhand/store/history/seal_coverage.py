"""Compute what the journal's seals cover, and check the journal's end at start-up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand.store.journal.events import append_event
from farhand.store.journal.seal import boot_id, journal_end, kept_head, packed, seal_of
from farhand.store.ports import JournalRow, Seals, Tx
from farhand.store.tables import calls
from farhand.store.tables.sessions import ENTRY_COLUMNS

# Appended at start-up when the journal ends before the recorded head.
CUT: Final = "journal.cut"
# Appended at start-up when the recorded head is missing.
UNGUARDED: Final = "journal.head_missing"

# Appended when retention removes older events (`pruning.py`).
PRUNED: Final = "journal.pruned"
# Appended for a call that stays while its earlier events are removed.
CALL_KEPT: Final = "call.kept"

CALL_KINDS: Final = ("call.waiting", "call.started", "call.ended", CALL_KEPT)

PAGE: Final = 2_000
_ROWS: Final = "SELECT id, at, kind, subject, data, hash FROM events WHERE id > ? ORDER BY id LIMIT ?"
ENTRY: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq = ?"  # noqa: S608
ENTRIES: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq > ? AND seq <= ? ORDER BY seq"  # noqa: S608

# A row of the journal: id, at, kind, subject, data, hash.
Row = Sequence[Any]


class Pruned(msgspec.Struct, frozen=True):
    """The data of `journal.pruned`: where the journal begins now, and what a verification needs to begin there."""

    # The last removed event, its seal and its time.
    through: int = 0
    hash: str = ""
    until: int = 0
    # The total numbers of removed events, calls and events of messages.
    events: int = 0
    calls: int = 0
    messages: int = 0
    # The number of the last message whose event was removed, and a digest of all of them (see `chained_entries`).
    entries: int = 0
    digest: str = ""
    # Calls that were running, or waiting, at that point.
    open: list[str] = []
    waiting: list[str] = []
    # The first event that did not match its seal when it was removed.
    broken: int | None = None


class MessageAdded(msgspec.Struct, frozen=True):
    """The part of the data of `message.added` that identifies the message."""

    seq: int


def rows_after(tx: Tx, last: int) -> list[tuple[Any, ...]]:
    """Return the next rows of the journal; none at its end."""
    return tx.execute(_ROWS, (last, PAGE)).fetchall()


class Covers:
    """Compute what the seals of rows cover besides the rows themselves; call it for each row in order.

    A call that was stored after its end has a single row for its start and end, so this tracks which calls have begun.
    """

    def __init__(self, tx: Tx, open_calls: Iterable[str] = ()) -> None:
        self._store = tx
        self.open = set(open_calls)
        # Calls that wait: the rest of their columns is covered by their next event.
        self.waiting: set[str] = set()
        # What the last row refers to, if that is missing.
        self.missing: str | None = None

    def __call__(self, kind: str, subject: str, data: bytes) -> bytes:
        self.missing = None
        if kind in CALL_KINDS:
            return self._call(kind, subject)
        if kind == "message.added":
            with contextlib.suppress(msgspec.MsgspecError):  # a modified row does not match its seal anyway
                seq = msgspec.json.decode(data, type=MessageAdded).seq
                found = self._store.execute(ENTRY, (seq,)).fetchall()
                if found:
                    return packed(found[0])
                self.missing = f"message {seq} of {subject}"
        return b""

    def with_row(self, row: Row) -> JournalRow:
        """Return a row of the journal without its hash, and what its seal covers beside it."""
        number, at, kind, subject, data = row[:5]
        return (number, at, kind, subject, data), self(kind, subject, data)

    def _call(self, kind: str, subject: str) -> bytes:
        whole = kind == "call.ended" and subject not in self.open
        for calls_so, of_kind in ((self.open, "call.started"), (self.waiting, "call.waiting")):
            (calls_so.add if kind == of_kind else calls_so.discard)(subject)
        row = calls.covered_row(self._store, subject)
        if kind == CALL_KEPT and row is not None:
            return row.whole
        if row is None:
            self.missing = f"the record of call {subject}"
            return b""
        if kind == "call.waiting":
            return row.asked
        return row.begun if kind == "call.started" else row.whole if whole else row.ended


def chained_entries(tx: Tx, after: int, last: int, digest: bytes) -> bytes:
    """Continue the digest of the messages up to `after` with those up to `last`."""
    for row in tx.execute(ENTRIES, (after, last)):
        digest = blake3(digest + packed(row)).digest()
    return digest


def checkpoint(tx: Tx) -> Pruned | None:
    """Return the data of the newest `journal.pruned`, if any."""
    rows: list[Any] = tx.execute(
        "SELECT data FROM events WHERE kind = 'journal.pruned' ORDER BY id DESC LIMIT 1"
    ).fetchall()
    try:
        return msgspec.json.decode(rows[0][0], type=Pruned) if rows else None
    except msgspec.MsgspecError:
        return None


def check_head(tx: Tx, home: Path, now: int, *, fresh: bool) -> None:
    """Append an event if the journal ends before the recorded head; it continues after that.

    `fresh`: no head is expected.
    """
    chain = tx.journal
    kept = kept_head(home)
    if kept is None:
        if chain.id and not fresh:
            append_event(tx, now, UNGUARDED, "journal", {"last": chain.id})
        return
    if kept.head.id == 0 or seal_of(tx, kept.head.id) == kept.head.hash:
        return
    data = {
        "expected": str(kept.head),
        "found": str(journal_end(tx)),
        "crash": not kept.clean and kept.boot != boot_id(),
    }
    append_event(tx, now, CUT, "journal", data, skip=max(0, kept.head.id - chain.id) + 1)


def other_key(tx: Tx) -> bool:
    """Return whether the newest rows were sealed with another key."""
    end = journal_end(tx).id
    return end > 0 and not seal_matches(tx, tx.journal.sealer, end)


def seal_matches(tx: Tx, sealer: Seals, number: int) -> bool:
    """Return whether the rows that were committed with this one have a valid seal."""
    last, before = seal_before(tx, number, sealer)
    covers = Covers(tx, open_before(tx, last + 1))
    rows: list[JournalRow] = []
    for row in rows_after(tx, last):
        rows.append(covers.with_row(row))
        if row[5] is not None:
            return bool(sealer.hash(before, rows) == row[5])
    return False


def seal_before(tx: Tx, number: int, sealer: Seals) -> tuple[int, bytes]:
    """Return the last row before `number` that carries a seal, and the seal; without one, the beginning."""
    rows: list[Any] = tx.execute(
        "SELECT id, hash FROM events WHERE id < ? AND hash IS NOT NULL ORDER BY id DESC LIMIT 1", (number,)
    ).fetchall()
    if rows:
        return rows[0][0], rows[0][1]
    pruned = checkpoint(tx)
    return (pruned.through, bytes.fromhex(pruned.hash)) if pruned else (0, sealer.beginning)


def open_before(tx: Tx, number: int) -> set[str]:
    """Return the calls that were running before a row."""
    pruned = checkpoint(tx)
    found: set[str] = set(pruned.open) if pruned else set()
    rows: Any = tx.execute(
        "SELECT kind, subject FROM events WHERE id < ? AND kind IN ('call.started', 'call.ended') ORDER BY id",
        (number,),
    )
    for kind, subject in rows:
        (found.add if kind == "call.started" else found.discard)(subject)
    return found
