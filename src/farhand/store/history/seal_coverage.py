"""What the journal's seals cover, how older rows get theirs, and the look at the journal's end at a start."""

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

# Rows written by a version without seals were sealed then and there.
SEALED: Final = "journal.sealed"
# At a start the journal did not go as far as it had gone.
CUT: Final = "journal.cut"
# At a start nothing told how far the journal had gone.
UNGUARDED: Final = "journal.head_missing"

# Older events were removed by retention (`pruning.py`).
PRUNED: Final = "journal.pruned"
# A call whose earlier events were removed, and which stays.
CALL_KEPT: Final = "call.kept"

CALL_KINDS: Final = ("call.waiting", "call.started", "call.ended", CALL_KEPT)

PAGE: Final = 2_000
_ROWS: Final = "SELECT id, at, kind, subject, data, hash FROM events WHERE id > ? ORDER BY id LIMIT ?"
ENTRY: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq = ?"  # noqa: S608
ENTRIES: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq > ? AND seq <= ? ORDER BY seq"  # noqa: S608
OLD_ENTRIES: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq <= ? ORDER BY seq"  # noqa: S608

# Of the journal: id, at, kind, subject, data, hash.
Row = Sequence[Any]


class SealedRows(msgspec.Struct, frozen=True):
    """What `journal.sealed` says."""

    rows: int
    # The number of the last message that was there.
    entries: int


class Pruned(msgspec.Struct, frozen=True):
    """What `journal.pruned` says: where the journal begins now, and what that leaves to check."""

    # The last event that was removed, its seal and its time.
    through: int = 0
    hash: str = ""
    until: int = 0
    # How many events, calls and events of messages were removed in all.
    events: int = 0
    calls: int = 0
    messages: int = 0
    # The messages whose events were removed, up to this number, and a digest of them (see `chained_entries`).
    entries: int = 0
    digest: str = ""
    # Calls that had begun, or waited, and not ended by then.
    open: list[str] = []
    waiting: list[str] = []
    # The first event that did not fit its seal when it was removed.
    broken: int | None = None


class ToldMessage(msgspec.Struct, frozen=True):
    """What `message.added` says, as far as it is needed to find the message."""

    seq: int


def rows_after(connection: Tx, last: int) -> list[tuple[Any, ...]]:
    """The next rows of the journal; none at its end."""
    return connection.execute(_ROWS, (last, PAGE)).fetchall()


class Covers:
    """Tells what the seals of rows cover beside the rows, which are asked for in their order.

    A call that was written down whole has one row for its beginning and its end, so it matters which calls have begun.
    """

    def __init__(self, connection: Tx, open_calls: Iterable[str] = ()) -> None:
        self._store = connection
        self.open = set(open_calls)
        # Calls that are held back: the rest of their record goes with what comes of them.
        self.waiting: set[str] = set()
        # What the last row told of, if that is not there.
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
            pass  # a row that was changed: whatever it covers, it does not fit
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


def entries_digest(connection: Tx, last: int) -> bytes:
    """Of the transcripts up to a message, which no row of the journal tells of one by one."""
    digest = blake3()
    for row in connection.execute(OLD_ENTRIES, (last,)):
        digest.update(packed(row))
    return digest.digest()


def chained_entries(connection: Tx, after: int, last: int, digest: bytes) -> bytes:
    """A digest of the messages up to `last` that goes on from that of the messages up to `after`."""
    for row in connection.execute(ENTRIES, (after, last)):
        digest = blake3(digest + packed(row)).digest()
    return digest


def checkpoint(connection: Tx) -> Pruned | None:
    """Where retention cut the journal off last, as the journal says it."""
    rows: list[Any] = connection.execute(
        "SELECT data FROM events WHERE kind = 'journal.pruned' ORDER BY id DESC LIMIT 1"
    ).fetchall()
    try:
        return msgspec.json.decode(rows[0][0], type=Pruned) if rows else None
    except msgspec.MsgspecError:
        return None


def seal_old_rows(connection: Tx, now: int) -> None:
    """Seal a journal that has no seals yet, as it is now; the journal says so."""
    chain = connection.journal
    chain.id, chain.hash = 0, chain.sealer.beginning
    count = 0
    covers = Covers(connection)
    told: set[str] = set()
    while page := rows_after(connection, chain.id):
        for number, at, kind, subject, data, _ in page:
            row = (number, at, kind, subject, data)
            chain.id, chain.hash = number, chain.sealer.hash(chain.hash, [(row, covers(kind, subject, data))])
            connection.execute("UPDATE events SET hash = ? WHERE id = ?", (chain.hash, number))
            if kind in ("call.started", "call.ended"):
                told.add(subject)
        count += len(page)
    for (call_id,) in connection.execute("SELECT id FROM calls ORDER BY seq").fetchall():
        if call_id in covers.open or call_id not in told:
            calls.tell(connection, str(call_id), begun=call_id in covers.open, now=now)
    last: list[Any] = connection.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchall()
    entries: int = last[0][0]
    if count or entries:
        digest = entries_digest(connection, entries)
        append_event(connection, now, SEALED, "journal", {"rows": count, "entries": entries}, digest)


def check_head(connection: Tx, home: Path, now: int, *, fresh: bool) -> None:
    """Write down if the journal does not go as far as it is known to have gone; it goes on behind that place.

    `fresh`: nothing is known, and that is in order.
    """
    chain = connection.journal
    kept = kept_head(home)
    if kept is None:
        if chain.id and not fresh:
            append_event(connection, now, UNGUARDED, "journal", {"last": chain.id})
        return
    found: list[Any] = connection.execute("SELECT hash FROM events WHERE id = ?", (kept.head.id,)).fetchall()
    if kept.head.id == 0 or (found and found[0][0] == kept.head.hash):
        return
    data = {
        "expected": str(kept.head),
        "found": str(journal_end(connection)),
        "crash": not kept.clean and kept.boot != boot_id(),
    }
    append_event(connection, now, CUT, "journal", data, skip=max(0, kept.head.id - chain.id) + 1)


def other_key(connection: Tx) -> bool:
    """Whether the newest rows were sealed with another key than ours."""
    chain = connection.journal
    end = journal_end(connection)
    start, before = seal_before(connection, end.id, chain.sealer)
    covers = Covers(connection, open_before(connection, start + 1))
    rows = [(tuple(row[:5]), covers(*row[2:5])) for row in rows_after(connection, start)]
    return bool(rows) and chain.sealer.hash(before, rows) != end.hash


def seal_before(connection: Tx, number: int, sealer: Seals) -> tuple[int, bytes]:
    """The last row before `number` that carries a seal, and that seal; what stands before all rows if there is none."""
    rows: list[Any] = connection.execute(
        "SELECT id, hash FROM events WHERE id < ? AND hash IS NOT NULL ORDER BY id DESC LIMIT 1", (number,)
    ).fetchall()
    if rows:
        return rows[0][0], rows[0][1]
    pruned = checkpoint(connection)
    return (pruned.through, bytes.fromhex(pruned.hash)) if pruned else (0, sealer.beginning)


def open_before(connection: Tx, number: int) -> set[str]:
    """The calls that had begun and not ended before a row."""
    pruned = checkpoint(connection)
    found: set[str] = set(pruned.open) if pruned else set()
    rows: Any = connection.execute(
        "SELECT kind, subject FROM events WHERE id < ? AND kind IN ('call.started', 'call.ended') ORDER BY id",
        (number,),
    )
    for kind, subject in rows:
        (found.add if kind == "call.started" else found.discard)(subject)
    return found
