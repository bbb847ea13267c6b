"""What nodes signed about the calls they ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from farhand.store.ports import Tx

ADD: Final = """
    INSERT INTO receipts (call_id, node_key, statement, signature) VALUES (?, ?, ?, ?)
    ON CONFLICT (call_id) DO NOTHING"""


class SignedAnswer(msgspec.Struct, frozen=True):
    node_key: str
    statement: str
    signature: str


def add_receipts(tx: Tx, answers: Iterable[tuple[str, SignedAnswer]]) -> None:
    """Keep signed answers by the ids of their calls; the first of a call counts."""
    tx.executemany(ADD, [(call_id, one.node_key, one.statement, one.signature) for call_id, one in answers])


def find_receipt(tx: Tx, call_id: str) -> SignedAnswer | None:
    rows = tx.execute("SELECT node_key, statement, signature FROM receipts WHERE call_id = ?", (call_id,)).fetchall()
    return SignedAnswer(*map(str, rows[0])) if rows else None
