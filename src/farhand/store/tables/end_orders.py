"""Orders to a node to end the processes of calls, kept until the node confirms."""

from __future__ import annotations

from collections.abc import Iterable

from farhand.store.ports import Tx

KEPT_MS = 30 * 24 * 3600 * 1000


def add_end_orders(tx: Tx, node_id: str, call_ids: Iterable[str], reason: str, now: int) -> None:
    """Store orders for a node; orders that it has not carried out for a month are deleted."""
    tx.execute("DELETE FROM end_orders WHERE created_at < ?", (now - KEPT_MS,))
    tx.executemany(
        "INSERT INTO end_orders (node_id, call_id, reason, created_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (node_id, call_id) DO UPDATE SET reason = excluded.reason, created_at = excluded.created_at",
        [(node_id, call_id, reason, now) for call_id in call_ids],
    )


def end_orders_of(tx: Tx, node_id: str) -> dict[str, str]:
    """Return the orders of a node: the reason, by call."""
    rows = tx.execute("SELECT call_id, reason FROM end_orders WHERE node_id = ?", (node_id,))
    return {str(call_id): str(reason) for call_id, reason in rows}


def drop_end_order(tx: Tx, node_id: str, call_id: str) -> None:
    tx.execute("DELETE FROM end_orders WHERE node_id = ? AND call_id = ?", (node_id, call_id))
