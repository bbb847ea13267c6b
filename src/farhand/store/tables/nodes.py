"""The inventory: every node that ever joined, with what it said of itself."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.calls import ToolSpec
from farhand.store.ports import Tx

SAVE: Final = """
    INSERT INTO nodes (node_id, info, connected_at, last_seen) VALUES (?, ?, ?, ?)
    ON CONFLICT (node_id) DO UPDATE
    SET info = excluded.info, connected_at = excluded.connected_at, last_seen = excluded.last_seen"""
SEEN: Final = "UPDATE nodes SET last_seen = ? WHERE node_id = ?"
ALL: Final = "SELECT info, connected_at, last_seen FROM nodes ORDER BY node_id"
FORGET: Final = "DELETE FROM nodes WHERE node_id = ?"


class NodeCard(msgspec.Struct, frozen=True):
    """What a node said of itself, checked."""

    node_id: str
    name: str
    node_type: str
    version: str
    tags: list[str] = []
    capabilities: list[str] = []
    tools: list[ToolSpec] = []
    runtime: dict[str, Any] = {}
    role: str = "specialized"
    # Capabilities that are bound to this node, and those it announced that are bound to another.
    owned: list[str] = []
    refused: list[str] = []
    # Names below its capabilities that were called with success, of a node that lists no tools.
    learned: list[str] = []


def save_node(connection: Tx, card: NodeCard, connected_at: int, last_seen: int) -> None:
    connection.execute(SAVE, (card.node_id, msgspec.json.encode(card), connected_at, last_seen))


def node_seen(connection: Tx, node_id: str, last_seen: int) -> None:
    connection.execute(SEEN, (last_seen, node_id))


def forget_node(connection: Tx, node_id: str) -> None:
    connection.execute(FORGET, (node_id,))
    connection.execute("DELETE FROM end_orders WHERE node_id = ?", (node_id,))


def all_nodes(connection: Tx) -> list[tuple[NodeCard, int, int]]:
    return [
        (msgspec.json.decode(info, type=NodeCard), connected_at, last_seen)
        for info, connected_at, last_seen in connection.execute(ALL)
    ]
