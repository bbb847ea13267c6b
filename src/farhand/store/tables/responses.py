"""Responses of the OpenAI Responses API: which run each one shows, and for whom."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx

ADD: Final = """
    INSERT INTO responses (id, run_id, credential, created_at, facts) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING"""
ONE: Final = "SELECT id, run_id, credential, created_at, facts FROM responses WHERE id = ? AND credential = ?"
REMOVE: Final = "DELETE FROM responses WHERE id = ?"
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


def add_response(tx: Tx, record: ResponseRecord) -> None:
    tx.execute(ADD, msgspec.structs.astuple(record))


def find_response(tx: Tx, response_id: str, credential: str) -> ResponseRecord | None:
    rows = tx.execute(ONE, (response_id, credential)).fetchall()
    return ResponseRecord(*rows[0]) if rows else None


def remove_response(tx: Tx, response_id: str) -> None:
    tx.execute(REMOVE, (response_id,))


def forget(tx: Tx, before: int, limit: int) -> int:
    """Remove at most `limit` responses made before a moment; return how many."""
    tx.execute(FORGET, (before, limit))
    return tx.changes()
