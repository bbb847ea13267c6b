"""Compute what the journal's seals cover, seal older journals, and check the journal's end at start-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand.store.journal.events import append_event
from farhand.store.journal.seal import boot_id, journal_end, kept_head, packed
from farhand.store.ports import Seals, Tx
from farhand.store.tables import calls
from farhand.store.tables.sessions import ENTRY_COLUMNS

# Appended when the rows of a version without seals were sealed.
SEALED: Final = "journal.sealed"
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
OLD_ENTRIES: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq <= ? ORDER BY seq"  # noqa: S608

# A row of the journal: id, at, kind, subject, data, hash.
Row = Sequence[Any]


class SealedRows(msgspec.Struct, frozen=True):
    """The data of `journal.sealed`."""

    rows: int
    # The number of the last message.
    entries: int


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


class ToldMessage(msgspec.Struct, frozen=True):
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
        try:
            if kind == "message.added":
                seq = msgspec.json.decode(data, type=ToldMessage).seq
                found = self._store.execute(ENTRY, (seq,)).fetchall()
                if found:
                    return packed(found[0])
                self.missing = f"message {seq} of {subject}"
            elif kind == SEALED:
                return entries_digest(self._store, msgspec.json.decode(data, type=SealedRows).entries)
        except msgspec.MsgspecError:
            pass  # a modified row does not match its seal anyway
        return b""

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


def entries_digest(tx: Tx, last: int) -> bytes:
    """Return a digest of the messages up to one, which have no events of their own."""
    digest = blake3()
    for row in tx.execute(OLD_ENTRIES, (last,)):
        digest.update(packed(row))
    return digest.digest()


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


def seal_old_rows(tx: Tx, now: int) -> None:
    """Seal the rows of a journal that has no seals yet, and append an event about it."""
    chain = tx.journal
    chain.id, chain.hash = 0, chain.sealer.beginning
    count = 0
    covers = Covers(tx)
    recorded: set[str] = set()
    while page := rows_after(tx, chain.id):
        for number, at, kind, subject, data, _ in page:
            row = (number, at, kind, subject, data)
            chain.id, chain.hash = number, chain.sealer.hash(chain.hash, [(row, covers(kind, subject, data))])
            tx.execute("UPDATE events SET hash = ? WHERE id = ?", (chain.hash, number))
            if kind in ("call.started", "call.ended"):
                recorded.add(subject)
        count += len(page)
    for (call_id,) in tx.execute("SELECT id FROM calls ORDER BY seq").fetchall():
        if call_id in covers.open or call_id not in recorded:
            calls.append_missing_events(tx, str(call_id), begun=call_id in covers.open, now=now)
    last: list[Any] = tx.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchall()
    entries: int = last[0][0]
    if count or entries:
        digest = entries_digest(tx, entries)
        append_event(tx, now, SEALED, "journal", {"rows": count, "entries": entries}, digest)


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
    found: list[Any] = tx.execute("SELECT hash FROM events WHERE id = ?", (kept.head.id,)).fetchall()
    if kept.head.id == 0 or (found and found[0][0] == kept.head.hash):
        return
    data = {
        "expected": str(kept.head),
        "found": str(journal_end(tx)),
        "crash": not kept.clean and kept.boot != boot_id(),
    }
    append_event(tx, now, CUT, "journal", data, skip=max(0, kept.head.id - chain.id) + 1)


def other_key(tx: Tx) -> bool:
    """Return whether the newest rows were sealed with another key."""
    chain = tx.journal
    end = journal_end(tx)
    start, before = seal_before(tx, end.id, chain.sealer)
    covers = Covers(tx, open_before(tx, start + 1))
    rows = [(tuple(row[:5]), covers(*row[2:5])) for row in rows_after(tx, start)]
    return bool(rows) and chain.sealer.hash(before, rows) != end.hash


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
