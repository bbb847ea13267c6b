"""What the journal's seals cover, how older rows get theirs, and the look at the journal's end at a start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec
from blake3 import blake3

from farhand.store import calls
from farhand.store.chain import Chain, Sealer, boot_id, journal_end, kept_head, packed
from farhand.store.events import append_event
from farhand.store.sessions import ENTRY_COLUMNS

SEALED: Final = "journal.sealed"
"""Rows written by a version without seals were sealed then and there."""
CUT: Final = "journal.cut"
"""At a start the journal did not go as far as it had gone."""
UNGUARDED: Final = "journal.head_missing"
"""At a start nothing told how far the journal had gone."""

PAGE: Final = 2_000
_ROWS: Final = "SELECT id, at, kind, subject, data, hash FROM events WHERE id > ? ORDER BY id LIMIT ?"
ENTRY: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq = ?"  # noqa: S608
OLD_ENTRIES: Final = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries WHERE seq <= ? ORDER BY seq"  # noqa: S608

Row = Sequence[Any]
"""Of the journal: id, at, kind, subject, data, hash."""


class SealedRows(msgspec.Struct, frozen=True):
    """What `journal.sealed` says."""

    rows: int
    entries: int
    """The number of the last message that was there."""


class ToldMessage(msgspec.Struct, frozen=True):
    """What `message.added` says, as far as it is needed to find the message."""

    seq: int


def rows_after(connection: apsw.Connection, last: int) -> list[tuple[Any, ...]]:
    """The next rows of the journal; none at its end."""
    return connection.execute(_ROWS, (last, PAGE)).fetchall()


def covered(connection: apsw.Connection, kind: str, subject: str, data: bytes) -> tuple[list[bytes], str | None]:
    """What a row's seal may cover beside the row, and what is missing of it, if something is.

    A call that was written down whole has one row for its beginning and its end.
    """
    if kind in ("call.started", "call.ended"):
        found: list[Any] = connection.execute(calls.WHOLE, (subject,)).fetchall()
        if not found:
            return [b""], f"the record of call {subject}"
        begun, ended = packed(found[0][: len(calls.BEGUN)]), packed(found[0][len(calls.BEGUN) :])
        return [begun] if kind == "call.started" else [ended, begun + ended], None
    try:
        if kind == "message.added":
            seq = msgspec.json.decode(data, type=ToldMessage).seq
            found = connection.execute(ENTRY, (seq,)).fetchall()
            return ([packed(found[0])], None) if found else ([b""], f"message {seq} of {subject}")
        if kind == SEALED:
            return [entries_digest(connection, msgspec.json.decode(data, type=SealedRows).entries)], None
    except msgspec.MsgspecError:
        pass
    return [b""], None


def entries_digest(connection: apsw.Connection, last: int) -> bytes:
    """Of the transcripts up to a message, which no row of the journal tells of one by one."""
    digest = blake3()
    for row in connection.execute(OLD_ENTRIES, (last,)):
        digest.update(packed(row))
    return digest.digest()


def fits(sealer: Sealer, before: bytes, row: Row, candidates: Sequence[bytes]) -> bool:
    return any(sealer.hash(before, tuple(row[:5]), candidate) == row[5] for candidate in candidates)


def seal_old_rows(connection: apsw.Connection, now: int) -> None:
    """Seal a journal that has no seals yet, as it is now; the journal says so."""
    chain: Chain = connection.chain  # type: ignore[attr-defined]
    chain.id, chain.hash = 0, chain.sealer.beginning
    count = 0
    open_calls: set[str] = set()
    told: set[str] = set()
    while page := rows_after(connection, chain.id):
        for row in page:
            number, at, kind, subject, data, _ = row
            candidates, _ = covered(connection, kind, subject, data)
            covers = candidates[-1] if kind == "call.ended" and subject not in open_calls else candidates[0]
            if kind == "call.started":
                open_calls.add(subject)
                told.add(subject)
            elif kind == "call.ended":
                open_calls.discard(subject)
                told.add(subject)
            chain.id = number
            chain.hash = chain.sealer.hash(chain.hash, (number, at, kind, subject, data), covers)
            connection.execute("UPDATE events SET hash = ? WHERE id = ?", (chain.hash, number))
            count += 1
    for (call_id,) in connection.execute("SELECT id FROM calls ORDER BY seq").fetchall():
        if call_id in open_calls or call_id not in told:
            calls.tell(connection, str(call_id), begun=call_id in open_calls, now=now)
    last: list[Any] = connection.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchall()
    entries: int = last[0][0]
    if count or entries:
        digest = entries_digest(connection, entries)
        append_event(connection, now, SEALED, "journal", {"rows": count, "entries": entries}, digest)


def mind_head(connection: apsw.Connection, home: Path, now: int, *, fresh: bool) -> None:
    """Write down if the journal does not go as far as it is known to have gone; it goes on behind that place.

    `fresh`: nothing is known, and that is in order.
    """
    chain: Chain = connection.chain  # type: ignore[attr-defined]
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


def other_key(connection: apsw.Connection) -> bool:
    """Whether the newest row was sealed with another key than ours."""
    chain: Chain = connection.chain  # type: ignore[attr-defined]
    rows: list[Any] = connection.execute(
        "SELECT id, at, kind, subject, data, hash FROM events ORDER BY id DESC LIMIT 2"
    ).fetchall()
    if not rows:
        return False
    before = rows[1][5] if len(rows) > 1 else chain.sealer.beginning
    candidates, _ = covered(connection, rows[0][2], rows[0][3], rows[0][4])
    return not fits(chain.sealer, before or b"", rows[0], candidates)
