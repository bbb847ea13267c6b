"""The journal: what happened, in order, never rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import apsw
import msgspec

APPEND: Final = "INSERT INTO events (at, kind, subject, data) VALUES (?, ?, ?, ?)"
AFTER: Final = "SELECT id, at, kind, subject, data FROM events WHERE id > ? ORDER BY id LIMIT ?"
LAST: Final = "SELECT coalesce(max(id), 0) FROM events"


class Event(msgspec.Struct, frozen=True):
    id: int
    at: int
    kind: str
    subject: str
    data: msgspec.Raw


def append_event(connection: apsw.Connection, at: int, kind: str, subject: str, data: Mapping[str, Any]) -> None:
    connection.execute(APPEND, (at, kind, subject, msgspec.json.encode(data)))


def events_after(connection: apsw.Connection, last: int, limit: int) -> list[Event]:
    return [
        Event(id, at, kind, subject, msgspec.Raw(data))
        for id, at, kind, subject, data in connection.execute(AFTER, (last, limit))  # noqa: A001
    ]


def last_event(connection: apsw.Connection) -> int:
    row: tuple[int] = connection.execute(LAST).fetchall()[0]  # type: ignore[assignment]
    return row[0]
