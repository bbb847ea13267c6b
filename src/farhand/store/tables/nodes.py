"""Every node that has ever connected, with what it reported about itself."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.calls import ToolSpec
from farhand.store.ports import Tx

SAVE: Final = """
    INSERT INTO nodes (node_id, info, connected_at, last_seen) VALUES (?, ?, ?, ?)
    ON CONFLICT (node_id) DO UPDATE
    SET info = excluded.info, connected_at = excluded.connected_at, last_seen = excluded.last_seen"""
ALL: Final = "SELECT info, connected_at, last_seen FROM nodes ORDER BY node_id"


class NodeCard(msgspec.Struct, frozen=True):
    """What a node reported about itself, validated."""

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
    # For a node that lists no tools: the names below its capabilities that were called successfully.
    learned: list[str] = []
    # Set by the owner: the name to show, and tags that replace the node's own.
    label: str = ""
    owner_tags: list[str] | None = None


def save_node(tx: Tx, card: NodeCard, connected_at: int, last_seen: int) -> None:
    tx.execute(SAVE, (card.node_id, msgspec.json.encode(card), connected_at, last_seen))


def node_seen(tx: Tx, node_id: str, last_seen: int) -> None:
    tx.execute("UPDATE nodes SET last_seen = ? WHERE node_id = ?", (last_seen, node_id))


def forget_node(tx: Tx, node_id: str) -> None:
    tx.execute("DELETE FROM nodes WHERE node_id = ?", (node_id,))
    tx.execute("DELETE FROM end_orders WHERE node_id = ?", (node_id,))


def find_node(tx: Tx, node_id: str) -> NodeCard | None:
    rows = tx.execute("SELECT info FROM nodes WHERE node_id = ?", (node_id,)).fetchall()
    return msgspec.json.decode(rows[0][0], type=NodeCard) if rows else None


def describe_node(tx: Tx, node_id: str, label: str, owner_tags: list[str] | None) -> None:
    card = find_node(tx, node_id)
    if card is not None:
        card = msgspec.structs.replace(card, label=label, owner_tags=owner_tags)
        tx.execute("UPDATE nodes SET info = ? WHERE node_id = ?", (msgspec.json.encode(card), node_id))


def all_nodes(tx: Tx) -> list[tuple[NodeCard, int, int]]:
    return [
        (msgspec.json.decode(info, type=NodeCard), connected_at, last_seen)
        for info, connected_at, last_seen in tx.execute(ALL)
    ]
