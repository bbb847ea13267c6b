"""Fan-outs: one request to many nodes. Each call has its own record; these tables group them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx

ADD: Final = "INSERT INTO fanouts (id, tool, credential, nodes, created_at) VALUES (?, ?, ?, ?, ?)"
ADD_CALL: Final = "INSERT INTO fanout_calls (fanout, call_id) VALUES (?, ?) ON CONFLICT DO NOTHING"


class FanOutRecord(msgspec.Struct, frozen=True):
    id: str
    tool: str
    credential: str
    # The nodes that were selected when it began, in order.
    nodes: list[str]
    created_at: int


def begin_fanout(tx: Tx, record: FanOutRecord, calls: Mapping[str, str]) -> None:
    """Store a fan-out with the ids of the calls it is about to make, by node."""
    nodes = msgspec.json.encode(record.nodes)
    tx.execute(ADD, (record.id, record.tool, record.credential, nodes, record.created_at))
    add_calls(tx, record.id, calls)
    data = {"tool": record.tool, "nodes": record.nodes}
    append_event(tx, record.created_at, "fanout.started", record.id, data)


def add_calls(tx: Tx, fanout: str, calls: Mapping[str, str]) -> None:
    tx.executemany(ADD_CALL, [(fanout, call_id) for call_id in calls.values()])


def fanout_nodes(tx: Tx, fanout: str) -> list[str]:
    rows: list[Any] = tx.execute("SELECT nodes FROM fanouts WHERE id = ?", (fanout,)).fetchall()
    return msgspec.json.decode(rows[0][0], type=list[str]) if rows else []


def fanout_calls(tx: Tx, fanout: str) -> set[str]:
    """Return the ids of a fan-out's calls; some of them may never have been made."""
    return {str(row[0]) for row in tx.execute("SELECT call_id FROM fanout_calls WHERE fanout = ?", (fanout,))}
