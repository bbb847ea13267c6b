"""Calls whose processes a node has to end, kept until it has done so."""

from __future__ import annotations

from collections.abc import Iterable

from farhand.store.ports import Tx

KEPT_MS = 30 * 24 * 3600 * 1000


def add_end_orders(store: Tx, node_id: str, call_ids: Iterable[str], reason: str, now: int) -> None:
    """Keep orders for a node; those it has not carried out for a month are dropped."""
    store.execute("DELETE FROM end_orders WHERE created_at < ?", (now - KEPT_MS,))
    store.executemany(
        "INSERT OR REPLACE INTO end_orders (node_id, call_id, reason, created_at) VALUES (?, ?, ?, ?)",
        [(node_id, call_id, reason, now) for call_id in call_ids],
    )


def end_orders_of(store: Tx, node_id: str) -> dict[str, str]:
    """Return the orders of a node: the reason, by call."""
    rows = store.execute("SELECT call_id, reason FROM end_orders WHERE node_id = ?", (node_id,))
    return {str(call_id): str(reason) for call_id, reason in rows}


def drop_end_order(store: Tx, node_id: str, call_id: str) -> None:
    store.execute("DELETE FROM end_orders WHERE node_id = ? AND call_id = ?", (node_id, call_id))
