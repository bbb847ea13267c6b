"""Responses of the OpenAI Responses API: which run each one shows, and for whom."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

FORGET: Final = """
    DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE created_at < ? ORDER BY created_at LIMIT ?)"""


class ResponseRecord(msgspec.Struct, frozen=True):
    id: str
    run_id: str
    # The credential that made it; no other may use it.
    credential: str
    created_at: int
    # The parameters of the request that the response repeats, as JSON.
    facts: bytes


_RESPONSES: Final = Table("responses", ResponseRecord)


def add_response(tx: Tx, record: ResponseRecord) -> None:
    _RESPONSES.add(tx, record, "ON CONFLICT (id) DO NOTHING")


def find_response(tx: Tx, response_id: str, credential: str) -> ResponseRecord | None:
    return _RESPONSES.find(tx, "id = ? AND credential = ?", response_id, credential)


def remove_response(tx: Tx, response_id: str) -> None:
    tx.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def forget(tx: Tx, before: int, limit: int) -> int:
    """Remove at most `limit` responses made before a moment; return how many."""
    tx.execute(FORGET, (before, limit))
    return tx.changes()
