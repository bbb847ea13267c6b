"""Verify that the journal is complete, unchanged and in order. Only reads; the journal may be in use."""

from __future__ import annotations

import contextlib
import itertools
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from farhand.store.history.seal_coverage import (
    CALL_KINDS,
    CUT,
    UNGUARDED,
    Covers,
    Pruned,
    Row,
    chained_entries,
    checkpoint,
    open_before,
    rows_after,
    seal_before,
    seal_matches,
)
from farhand.store.journal.seal import Head, KeptHead, boot_id, journal_end, seal_of
from farhand.store.ports import JournalRow, Seals, Tx
from farhand.store.tables.calls import ENDED, NOT_ENDED, CallState

MOST_FAULTS: Final = 100
UNTOLD: Final = """
    SELECT id FROM calls
    WHERE id NOT IN (
            SELECT subject FROM events WHERE kind IN ('call.waiting', 'call.started', 'call.ended', 'call.kept')
        )
"""
RESTORED: Final = ("store.restored", "store.recovered")


class Fault(msgspec.Struct, frozen=True):
    """A deviation from what was written. `id`: the event where it shows, if any.

    Events that were committed together share one seal: if it is not clear which of them is concerned, `last` is the
    last of them.
    """

    id: int | None
    message: str
    last: int | None = None


class AuditNote(msgspec.Struct, frozen=True):
    """Information for the owner that is not a fault."""

    id: int | None
    at: int | None
    message: str


class Report(msgspec.Struct, frozen=True):
    ok: bool
    # The number of rows of the journal.
    checked: int
    # The number of calls they cover.
    calls: int
    first: int | None
    # The newest row, as `ID:HASH`.
    head: str
    # The first fault.
    fault: Fault | None
    faults: list[Fault]
    notes: list[AuditNote]


class RestoredJournal(msgspec.Struct, frozen=True):
    """What `store.restored` and `store.recovered` record about the journal."""

    head: str
    head_before: str | None = None
    other_key: bool = False


class _Restored(msgspec.Struct, frozen=True):
    journal: RestoredJournal | None = None


class _CutData(msgspec.Struct, frozen=True):
    expected: str
    found: str
    crash: bool = False


def verify_journal(
    tx: Tx, sealer: Seals, kept: KeptHead | None, *, start: int | None = None, noted: Head | None = None
) -> Report:
    """Check the whole journal, or from the event `start` on; with `noted`, also that this event is in it.

    Read `kept` before the transaction begins, so that the rows include what it records.
    """
    return _Verification(tx, sealer, kept, start, noted).report()


def check_end(tx: Tx, sealer: Seals, kept: KeptHead | None) -> tuple[Head, str | None]:
    """Return the newest row, and what is wrong with the end of the journal, if anything."""
    return journal_end(tx), _Verification(tx, sealer, kept, None, None).end_fault()


class _Verification:
    def __init__(
        self,
        tx: Tx,
        sealer: Seals,
        kept: KeptHead | None,
        start: int | None,
        noted: Head | None,
    ) -> None:
        self._store = tx
        self._sealer = sealer
        self._kept = kept
        self._start = start
        self._noted = noted
        self._faults: list[Fault] = []
        self._notes: list[AuditNote] = []
        self._covers = Covers(tx)
        self._begun = 0
        self._messages = 0
        self._old_entries = 0
        # Restores: the event, the head of the copy, the head before.
        self._losses: list[tuple[int, Head, Head]] = []
        self._foreign = False
        self._pruned = checkpoint(tx)
        if self._pruned is not None and (start is None or start <= self._pruned.through + 1):
            self._note_pruning(self._pruned)

    def _note_pruning(self, pruned: Pruned) -> None:
        when = datetime.fromtimestamp(pruned.until / 1000, UTC).isoformat(timespec="seconds")
        self._note(
            f"history before {when} was pruned by retention: {pruned.events} events up to {pruned.through}, and "
            f"{pruned.calls} calls; they cannot be checked any more"
        )
        if pruned.broken is not None:
            self._fault(None, f"events from {pruned.broken} on did not match their seals when retention removed them")

    def report(self) -> Report:
        last, before = self._beginning()
        checked, first = 0, None
        group: list[Row] = []
        while page := rows_after(self._store, group[-1][0] if group else last):
            for row in page:
                group.append(row)
                first = int(row[0]) if first is None else first
                checked += 1
                if row[5] is not None:
                    self._group(group, last, before)
                    last, before = int(row[0]), bytes(row[5])
                    group = []
        if group:
            self._fault(group[0][0], f"{_named(group)} without a seal: the gateway did not write this")
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

    # -- starting point ---------------------------------------------------------------------------------

    def _beginning(self) -> tuple[int, bytes]:
        """Return the id and seal after which the check begins."""
        if self._start is not None:
            return self._behind(self._start)
        rows: list[Any] = self._store.execute(
            "SELECT id, at, data FROM events WHERE kind IN (?, ?) ORDER BY id DESC", RESTORED
        ).fetchall()
        for number, at, data in rows:
            restored = _restored(data)
            if restored is not None and restored.other_key and seal_matches(self._store, self._sealer, number):
                self._foreign = True
                last = restored.head.partition(":")[0]
                self._note(f"the events up to {last} were sealed in a home with another key: not checked", number, at)
                return self._behind(number)
        if self._pruned is not None:
            return self._after_pruning(self._pruned)
        return 0, self._sealer.beginning

    def _after_pruning(self, pruned: Pruned) -> tuple[int, bytes]:
        """Begin after the removed events. The event `journal.pruned` proves later that the gateway removed them."""
        self._covers.open, self._covers.waiting = set(pruned.open), set(pruned.waiting)
        self._begun = len(self._covers.open | self._covers.waiting)
        self._old_entries = pruned.entries
        for (number,) in self._store.execute("SELECT id FROM events WHERE id <= ? LIMIT 1", (pruned.through,)):
            self._fault(number, f"event {number} was added: retention removed all up to {pruned.through}")
        if chained_entries(self._store, 0, pruned.entries, b"").hex() != pruned.digest:
            self._fault(
                None, f"a message up to {pruned.entries} was changed, removed or added: the digest does not match"
            )
        return pruned.through, bytes.fromhex(pruned.hash)

    def _behind(self, number: int) -> tuple[int, bytes]:
        last, before = seal_before(self._store, number, self._sealer)
        self._covers.open = open_before(self._store, last + 1)
        return last, before

    # -- rows -------------------------------------------------------------------------------------------

    def _group(self, group: list[Row], last: int, before: bytes) -> None:
        """Check rows that were committed together, after `last`."""
        rows: list[JournalRow] = []
        missing: str | None = None
        for row in group:
            number, at, kind, subject, data, _ = row
            if kind in CALL_KINDS and subject not in self._covers.open and subject not in self._covers.waiting:
                self._begun += 1
            rows.append(self._covers.with_row(row))
            if self._covers.missing is not None and missing is None:
                missing = f"{self._covers.missing}, which event {number} ({kind}) refers to, is missing"
            if kind == "message.added":
                self._messages += 1
            elif kind in (CUT, UNGUARDED, *RESTORED):
                self._note_event(number, at, kind, data)
        if self._sealer.hash(before, rows) != group[-1][5]:
            number, what = _what(group, last)
            self._faults.append(Fault(number, missing or what, group[-1][0]))

    def _note_event(self, number: int, at: int, kind: str, data: bytes) -> None:
        """Read what an event records about the journal itself."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            if kind == UNGUARDED:
                message = "the gateway started without knowing how far the journal had gone: its last rows may be gone"
                self._note(message, number, at)
            elif kind == CUT:
                cut = msgspec.json.decode(data, type=_CutData)
                what = f"the journal ended at {cut.found[:40]}… instead of {cut.expected[:40]}…"
                if cut.crash:
                    message = f"after a crash of the machine {what}: commits that were not on disk are lost"
                    self._note(message, number, at)
                else:
                    self._fault(number, f"when the gateway started, {what}: rows at its end were removed or changed")
            elif (restored := _restored(data)) is not None:
                copy, gone = Head.parse(restored.head) if restored.head[0] != "0" else Head(0, b""), None
                if restored.head_before is not None:
                    gone = Head.parse(restored.head_before)
                    self._losses.append((number, copy, gone))
                how = "an earlier copy of the store took its place" if copy.id else "an empty store took its place"
                far = f"; the journal had reached event {gone.id}" if gone and gone.id > copy.id else ""
                self._note(f"{how}, with events up to {copy.id}{far}", number, at)

    # -- end and related records ------------------------------------------------------------------------

    def end_fault(self) -> str | None:
        self._end()
        return self._faults[0].message if self._faults else None

    def _end(self) -> None:
        if self._kept is None:
            self._note("journal.head is missing: rows cut off at the journal's end would not be missed")
            return
        kept = self._kept.head
        if kept.id == 0 or seal_of(self._store, kept.id) == kept.hash:
            return
        end = journal_end(self._store).id
        what = f"the journal had reached event {kept.id}" if end < kept.id else f"event {kept.id} was changed"
        if not self._kept.clean and self._kept.boot != boot_id():
            self._note(f"{what} and ends at {end}: the machine crashed before everything was on disk", end)
        else:
            self._fault(end, f"{what}, and ends at {end} now: rows at its end were removed or changed")

    def _records(self) -> None:
        """Check for calls and messages without events, and for calls that ended without an event."""
        ((rows,),) = self._store.execute("SELECT count(*) FROM calls").fetchall()
        if rows != self._begun:
            known = set() if self._pruned is None else {*self._pruned.open, *self._pruned.waiting}
            untold = (str(call_id) for (call_id,) in self._store.execute(UNTOLD))
            for call_id in itertools.islice((one for one in untold if one not in known), 1):
                self._fault(None, f"call {call_id} has no event: the gateway did not write its record")
        for call_id in sorted(self._covers.open | self._covers.waiting):
            found = self._store.execute(f"SELECT {', '.join(ENDED)} FROM calls WHERE id = ?", (call_id,)).fetchall()  # noqa: S608
            state = CallState.WAITING if call_id in self._covers.waiting else CallState.RUNNING
            if found and found[0] != (state.value, *NOT_ENDED[1:]):
                self._fault(None, f"call {call_id} has the state {found[0][0]} without an event for it")
        ((rows,),) = self._store.execute("SELECT count(*) FROM entries WHERE seq > ?", (self._old_entries,)).fetchall()
        if rows != self._messages:
            self._fault(None, f"the transcripts have {rows} messages, but {self._messages} have an event")

    def _find(self, noted: Head) -> None:
        found: list[Any] = self._store.execute("SELECT hash FROM events WHERE id = ?", (noted.id,)).fetchall()
        if found and found[0][0] == noted.hash:
            return
        if found:
            self._fault(noted.id, f"event {noted.id} is not the noted one: the hash differs")
            return
        if self._pruned is not None and noted.id <= self._pruned.through:
            self._note(f"event {noted.id}, which was noted, was pruned by retention and can no longer be compared")
            return
        for number, copy, gone in self._losses:
            if copy.id < noted.id <= gone.id:
                how = f"when an earlier copy replaced the store (event {number})"
                self._fault(None, f"event {noted.id}, which was noted, was lost {how}")
                return
        self._fault(None, f"event {noted.id}, which was noted, is not in the journal: rows were removed")

    def _note(self, message: str, number: int | None = None, at: int | None = None) -> None:
        self._notes.append(AuditNote(number, at, message))

    def _fault(self, number: int | None, message: str) -> None:
        self._faults.append(Fault(number, message))


def _named(group: list[Row]) -> str:
    first, last = group[0], group[-1]
    if first is last:
        return f"event {first[0]} ({first[2]})"
    return f"events {first[0]} to {last[0]} ({first[2]} … {last[2]})"


def _what(group: list[Row], last: int) -> tuple[int, str]:
    """Return the event where a mismatch shows, and its likely cause."""
    for row in group:
        number, kind = row[0], row[2]
        if number > last + 1 and kind not in ("store.gap", CUT):
            gone = f"event {last + 1} is" if number == last + 2 else f"events {last + 1} to {number - 1} are"
            return number, f"{gone} missing before event {number} ({kind}), or its id was changed"
        last = number
    covered = [f"the record of call {row[3]}" for row in group if row[2] in CALL_KINDS]
    covered += [f"a message in {row[3]}" for row in group if row[2] == "message.added"]
    others = " or another covered record" if len(covered) > 5 else ""
    shown = f", or {' or '.join(covered[:5])}{others}," if covered else ""
    moved = "it was moved" if len(group) == 1 else "they stand in another order"
    return group[0][0], f"{_named(group)}{shown} was changed, or {moved}"


def _restored(data: Any) -> RestoredJournal | None:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(data, type=_Restored).journal
    return None
