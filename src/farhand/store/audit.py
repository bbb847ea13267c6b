"""Is the journal what was written, all of it and in its order? Looked at without writing, also while it grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from farhand.protocol.errors import FarhandError
from farhand.store.calls import ENDED
from farhand.store.chain import Head, KeptHead, Sealer, boot_id, journal_end, kept_head, load_key
from farhand.store.sealing import CUT, SEALED, UNGUARDED, Row, SealedRows, covered, fits, rows_after

MOST_FAULTS: Final = 100
RESTORED: Final = ("store.restored", "store.recovered")


class Fault(msgspec.Struct, frozen=True):
    """Something that is not as it was written. `id` is that of the event where it shows, if there is one."""

    id: int | None
    message: str


class Note(msgspec.Struct, frozen=True):
    """Something an owner should know, and that the journal itself tells or explains."""

    id: int | None
    at: int | None
    message: str


class Report(msgspec.Struct, frozen=True):
    ok: bool
    checked: int
    """Rows of the journal."""
    calls: int
    """Records of calls that go with them."""
    first: int | None
    head: str
    """The newest row, as `ID:HASH`."""
    fault: Fault | None
    """The first."""
    faults: list[Fault]
    notes: list[Note]


class RestoredJournal(msgspec.Struct, frozen=True):
    """What `store.restored` and `store.recovered` tell of the journal."""

    head: str
    head_before: str | None = None
    other_key: bool = False


class _Restored(msgspec.Struct, frozen=True):
    journal: RestoredJournal | None = None


class _CutData(msgspec.Struct, frozen=True):
    expected: str
    found: str
    crash: bool = False


def verify(home: Path, store: Path, *, start: int | None = None, noted: Head | None = None) -> Report:
    """Check the whole journal, or from the event `start` on; with `noted`, that this event is in it as well.

    Raises FarhandError when it cannot be checked.
    """
    sealer = Sealer(load_key(home))
    kept = kept_head(home)  # before the rows are read: what is noted there is in them
    with _reading(store) as connection:
        return _Verification(connection, sealer, kept, start, noted).report()


def read_head(store: Path) -> Head:
    """The newest row of a journal. Raises FarhandError."""
    with _reading(store) as connection:
        return journal_end(connection)


def quick_look(home: Path, store: Path) -> tuple[Head, str | None]:
    """The head, and what is wrong at the journal's end, if anything is: the kept head, and the last row's own seal."""
    sealer = Sealer(load_key(home))
    kept = kept_head(home)
    with _reading(store) as connection:
        end = journal_end(connection)
        found = _Verification(connection, sealer, kept, max(1, end.id - 20), None).report()
    return end, found.fault.message if found.fault else None


@contextlib.contextmanager
def _reading(store: Path) -> Iterator[apsw.Connection]:
    if not store.exists():
        raise FarhandError(f"there is no journal: {store} does not exist")
    try:
        connection = apsw.Connection(str(store), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(2000)
            connection.execute("BEGIN")  # one moment, whatever is written meanwhile
            columns = {row[1] for row in connection.execute("PRAGMA table_info(events)")}
            if "hash" not in columns:
                raise FarhandError(f"{store} was written by a version without seals; start this gateway on it once")
            yield connection
        finally:
            connection.close()
    except apsw.Error as error:
        raise FarhandError(f"{store} cannot be read: {error}") from None


class _Verification:
    def __init__(
        self,
        connection: apsw.Connection,
        sealer: Sealer,
        kept: KeptHead | None,
        start: int | None,
        noted: Head | None,
    ) -> None:
        self._store = connection
        self._sealer = sealer
        self._kept = kept
        self._start = start
        self._noted = noted
        self._faults: list[Fault] = []
        self._notes: list[Note] = []
        self._open: set[str] = set()
        self._begun = 0
        self._messages = 0
        self._old_entries = 0
        self._losses: list[tuple[int, Head, Head]] = []
        """Restores: the event, how far the copy went, how far the journal had gone."""
        self._foreign = False

    def report(self) -> Report:
        last, before = self._beginning()
        checked, first = 0, None
        while page := rows_after(self._store, last):
            for row in page:
                self._row(row, last, before)
                last, before = int(row[0]), row[5] if isinstance(row[5], bytes) else b""
                first = last if first is None else first
                checked += 1
        end = journal_end(self._store)
        self._end()
        if self._start is None and not self._foreign:
            self._records()
        if self._noted is not None:
            self._find(self._noted)
        faults = self._faults[:MOST_FAULTS]
        return Report(
            not faults, checked, self._begun, first, str(end), faults[0] if faults else None, faults, self._notes
        )

    # -- where to begin ---------------------------------------------------------------------------------

    def _beginning(self) -> tuple[int, bytes]:
        """The id and hash behind which the check begins."""
        if self._start is not None:
            return self._behind(self._start)
        rows: list[Any] = self._store.execute(
            "SELECT id, at, kind, subject, data, hash FROM events WHERE kind IN (?, ?) ORDER BY id DESC", RESTORED
        ).fetchall()
        for row in rows:
            number, before = self._behind(int(row[0]))
            told = _restored(row[4])
            if told is not None and told.other_key and fits(self._sealer, before, row, [b""]):
                self._foreign = True
                message = f"the events up to {told.head.partition(':')[0]} are of a home with another key: not checked"
                self._notes.append(Note(int(row[0]), int(row[1]), message))
                return number, before
        return 0, self._sealer.beginning

    def _behind(self, number: int) -> tuple[int, bytes]:
        rows: list[Any] = self._store.execute(
            "SELECT id, hash FROM events WHERE id < ? ORDER BY id DESC LIMIT 1", (number,)
        ).fetchall()
        return (rows[0][0], rows[0][1] or b"") if rows else (0, self._sealer.beginning)

    # -- rows -------------------------------------------------------------------------------------------

    def _row(self, row: Row, last: int, before: bytes) -> None:
        number, at, kind, subject, data, digest = row
        candidates, missing = covered(self._store, kind, subject, data)
        if not isinstance(digest, bytes):
            self._fault(number, f"event {number} ({kind}) has no seal: the gateway did not write it")
        elif not fits(self._sealer, before, row, candidates):
            self._fault(number, _what(row, last, missing))
        if kind == "call.started":
            self._begun += 1
            self._open.add(subject)
        elif kind == "call.ended":
            if subject in self._open:
                self._open.discard(subject)
            else:
                self._begun += 1
        elif kind == "message.added":
            self._messages += 1
        elif kind in (SEALED, CUT, UNGUARDED, *RESTORED):
            self._told(number, at, kind, data)

    def _told(self, number: int, at: int, kind: str, data: bytes) -> None:
        """What the journal says of itself."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            if kind == SEALED:
                sealed = msgspec.json.decode(data, type=SealedRows)
                self._old_entries = sealed.entries
                message = f"{sealed.rows} events before were written by a version without seals, and sealed then"
                self._notes.append(Note(number, at, message))
            elif kind == UNGUARDED:
                message = "the gateway started without knowing how far the journal had gone: its last rows may be gone"
                self._notes.append(Note(number, at, message))
            elif kind == CUT:
                cut = msgspec.json.decode(data, type=_CutData)
                what = f"the journal had gone to {cut.expected[:40]}… and ended at {cut.found[:40]}…"
                if cut.crash:
                    message = f"after the machine went down {what}: what the disk had not yet taken is gone"
                    self._notes.append(Note(number, at, message))
                else:
                    self._fault(number, f"when the gateway started, {what}: rows at its end were removed or changed")
            elif (told := _restored(data)) is not None:
                copy, gone = Head.parse(told.head) if told.head[0] != "0" else Head(0, b""), None
                if told.head_before is not None:
                    gone = Head.parse(told.head_before)
                    self._losses.append((number, copy, gone))
                how = "an earlier copy of the store took its place" if copy.id else "the store began anew"
                far = f"; the journal had gone to event {gone.id}" if gone and gone.id > copy.id else ""
                self._notes.append(Note(number, at, f"{how}, with events up to {copy.id}{far}"))

    # -- the end, and what goes with it -----------------------------------------------------------------

    def _end(self) -> None:
        if self._kept is None:
            message = "journal.head is missing: rows cut off at the journal's end would not be missed"
            self._notes.append(Note(None, None, message))
            return
        kept = self._kept.head
        found: list[Any] = self._store.execute("SELECT hash FROM events WHERE id = ?", (kept.id,)).fetchall()
        if kept.id == 0 or (found and found[0][0] == kept.hash):
            return
        end = journal_end(self._store).id
        what = f"the journal went to event {kept.id}" if end < kept.id else f"event {kept.id} is not what it was"
        if not self._kept.clean and self._kept.boot != boot_id():
            message = f"{what} and ends at {end}: the machine went down before the disk had all of it"
            self._notes.append(Note(end, None, message))
        else:
            self._fault(end, f"{what}, and ends at {end} now: rows at its end were removed or changed")

    def _records(self) -> None:
        """Calls and messages that no event tells of, and calls that say more than the journal."""
        ((rows,),) = self._store.execute("SELECT count(*) FROM calls").fetchall()
        if rows != self._begun:
            told = "SELECT subject FROM events WHERE kind IN ('call.started', 'call.ended')"
            for (call_id,) in self._store.execute(f"SELECT id FROM calls WHERE id NOT IN ({told}) LIMIT 1"):  # noqa: S608
                self._fault(None, f"no event tells of call {call_id}: the gateway did not write its record")
        for call_id in sorted(self._open):
            found = self._store.execute(f"SELECT {', '.join(ENDED)} FROM calls WHERE id = ?", (call_id,)).fetchall()  # noqa: S608
            if found and found[0] != ("running", *[None] * (len(ENDED) - 1)):
                message = f"call {call_id} is said to have ended ({found[0][0]}), and no event tells of it"
                self._fault(None, message)
        ((rows,),) = self._store.execute("SELECT count(*) FROM entries WHERE seq > ?", (self._old_entries,)).fetchall()
        if rows != self._messages:
            self._fault(None, f"there are {rows} messages in the transcripts, and events tell of {self._messages}")

    def _find(self, noted: Head) -> None:
        found: list[Any] = self._store.execute("SELECT hash FROM events WHERE id = ?", (noted.id,)).fetchall()
        if found and found[0][0] == noted.hash:
            return
        if found:
            self._fault(noted.id, f"event {noted.id} is not the one that was noted: its hash is another")
            return
        for number, copy, gone in self._losses:
            if copy.id < noted.id <= gone.id:
                how = f"when an earlier copy took the store's place (event {number})"
                self._fault(None, f"event {noted.id}, which was noted, was lost {how}")
                return
        self._fault(None, f"event {noted.id}, which was noted, is not in the journal: rows were removed")

    def _fault(self, number: int | None, message: str) -> None:
        self._faults.append(Fault(number, message))


def _what(row: Row, last: int, missing: str | None) -> str:
    number, _, kind, subject = row[:4]
    if missing is not None:
        return f"{missing}, of which event {number} ({kind}) tells, is gone, or the event was changed"
    if number > last + 1 and kind not in ("store.gap", CUT):
        gone = f"event {last + 1} is" if number == last + 2 else f"events {last + 1} to {number - 1} are"
        return f"{gone} missing before event {number} ({kind}), or its id was changed"
    record = {
        "call.started": f", or the record of call {subject}",
        "call.ended": f", or the record of call {subject}",
        "message.added": f", or the message in {subject} it tells of",
        SEALED: ", or one of the messages older than it",
    }.get(kind, "")
    return f"event {number} ({kind}){record} was changed, or stands in another's place"


def _restored(data: Any) -> RestoredJournal | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(data, type=_Restored).journal
    return None
