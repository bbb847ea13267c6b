"""The journal: events in order, append-only and sealed (`seal.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.store.ports import Tx

AFTER: Final = "SELECT id, at, kind, subject, data FROM events WHERE id > ? ORDER BY id LIMIT ?"

_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True):
    id: int
    at: int
    kind: str
    subject: str
    data: msgspec.Raw


def append_event(
    tx: Tx,
    at: int,
    kind: str,
    subject: str,
    data: Mapping[str, Any] | msgspec.Raw,
    covered: bytes = b"",
    *,
    skip: int = 1,
) -> int:
    """Append an event with the current transaction and return its id.

    `covered`: the packed record that the event describes, so that the seal also protects that record. `skip`: the
    distance to the previous id, more than 1 to leave ids unused.
    """
    return tx.journal.append(at, kind, subject, _encode(data), covered, skip)


def events_after(tx: Tx, last: int, limit: int) -> list[Event]:
    return [
        Event(id, at, kind, subject, msgspec.Raw(data))
        for id, at, kind, subject, data in tx.execute(AFTER, (last, limit))  # noqa: A001
    ]


def last_event(tx: Tx) -> int:
    return int(tx.execute("SELECT coalesce(max(id), 0) FROM events").fetchall()[0][0])
