"""The journal: what happened, in order, never rewritten, and sealed (`chain.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import apsw
import msgspec

from farhand.store.journal.seal import Chain

AFTER: Final = "SELECT id, at, kind, subject, data FROM events WHERE id > ? ORDER BY id LIMIT ?"
LAST: Final = "SELECT coalesce(max(id), 0) FROM events"

_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True):
    id: int
    at: int
    kind: str
    subject: str
    data: msgspec.Raw


def append_event(
    connection: apsw.Connection,
    at: int,
    kind: str,
    subject: str,
    data: Mapping[str, Any] | msgspec.Raw,
    covered: bytes = b"",
    *,
    skip: int = 1,
) -> int:
    """Add to the journal with the transaction under way, on the connection of its `Database`; the event's id.

    `covered`: the record the event tells of, packed, so that a change there is found as well. `skip` leaves out ids.
    """
    chain: Chain = connection.chain  # type: ignore[attr-defined]
    chain.id = number = chain.id + skip
    chain.pending.append(((number, at, kind, subject, _encode(data)), covered))
    return number


def events_after(connection: apsw.Connection, last: int, limit: int) -> list[Event]:
    return [
        Event(id, at, kind, subject, msgspec.Raw(data))
        for id, at, kind, subject, data in connection.execute(AFTER, (last, limit))  # noqa: A001
    ]


def last_event(connection: apsw.Connection) -> int:
    row: tuple[int] = connection.execute(LAST).fetchall()[0]  # type: ignore[assignment]
    return row[0]
