"""Calls that belong together: one request, many nodes. Each call has its own record; this says which they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx

ADD: Final = "INSERT INTO fanouts (id, tool, credential, nodes, created_at) VALUES (?, ?, ?, ?, ?)"
ADD_CALL: Final = "INSERT OR IGNORE INTO fanout_calls (fanout, call_id) VALUES (?, ?)"
NODES: Final = "SELECT nodes FROM fanouts WHERE id = ?"
CALLS: Final = "SELECT call_id FROM fanout_calls WHERE fanout = ?"


class FanOutRecord(msgspec.Struct, frozen=True):
    id: str
    tool: str
    credential: str
    # Those that were meant when it began, in order.
    nodes: list[str]
    created_at: int


def begin_fanout(store: Tx, record: FanOutRecord, calls: Mapping[str, str]) -> None:
    """Write a fan-out down with the calls it is about to make, by node."""
    nodes = msgspec.json.encode(record.nodes)
    store.execute(ADD, (record.id, record.tool, record.credential, nodes, record.created_at))
    add_calls(store, record.id, calls)
    data = {"tool": record.tool, "nodes": record.nodes}
    append_event(store, record.created_at, "fanout.started", record.id, data)


def add_calls(store: Tx, fanout: str, calls: Mapping[str, str]) -> None:
    store.executemany(ADD_CALL, [(fanout, call_id) for call_id in calls.values()])


def fanout_nodes(store: Tx, fanout: str) -> list[str]:
    """The nodes that a fan-out meant."""
    rows: list[Any] = store.execute(NODES, (fanout,)).fetchall()
    return msgspec.json.decode(rows[0][0], type=list[str]) if rows else []


def fanout_calls(store: Tx, fanout: str) -> set[str]:
    """The ids of the calls of a fan-out; not all of them need have been made."""
    return {str(row[0]) for row in store.execute(CALLS, (fanout,))}
