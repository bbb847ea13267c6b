"""Idempotency keys, and the call or other request that each one belongs to."""

from __future__ import annotations

from typing import Any, Final

from farhand.store.ports import Tx

IDEMPOTENCY_MS = 24 * 60 * 60 * 1000

CLAIM: Final = """
    INSERT INTO idempotency (credential, key, body_hash, call_id, created_at) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (credential, key) DO UPDATE
    SET body_hash = excluded.body_hash, call_id = excluded.call_id, created_at = excluded.created_at
    WHERE idempotency.created_at < excluded.created_at - ?
    RETURNING call_id"""
CLAIMED: Final = "SELECT call_id, body_hash FROM idempotency WHERE credential = ? AND key = ? AND created_at >= ?"
CLAIMED_BELOW: Final = """
    SELECT calls.id, calls.tool FROM idempotency JOIN calls ON calls.id = idempotency.call_id
    WHERE idempotency.credential = ? AND key >= ? AND key < ?"""
RELEASE: Final = "DELETE FROM idempotency WHERE credential = ? AND key = ? AND call_id = ?"


def claim(tx: Tx, credential: str, key: str, body_hash: bytes, call_id: str, now: int) -> tuple[str, bytes]:
    """Return the call that owns a key, and the hash of its body: `call_id` if the key is new or older than a day."""
    won = tx.execute(CLAIM, (credential, key, body_hash, call_id, now, IDEMPOTENCY_MS)).fetchall()
    return (call_id, body_hash) if won else claimed(tx, credential, key, body_hash, call_id, now)


def claimed(tx: Tx, credential: str, key: str, body_hash: bytes, call_id: str, now: int) -> tuple[str, bytes]:
    """Return what `claim` would return, without claiming the key."""
    held: list[Any] = tx.execute(CLAIMED, (credential, key, now - IDEMPOTENCY_MS)).fetchall()
    return held[0] if held else (call_id, body_hash)


def claimed_below(tx: Tx, credential: str, beginning: str) -> dict[str, str]:
    """Return the tool of each call that a credential made under keys with this prefix, by call id."""
    rows: list[Any] = tx.execute(CLAIMED_BELOW, (credential, beginning, beginning + "\U0010ffff")).fetchall()
    return dict(rows)


def release(tx: Tx, credential: str, key: str, request_id: str) -> None:
    """Free the key of a request that was refused."""
    tx.execute(RELEASE, (credential, key, request_id))


def forget_keys(tx: Tx, now: int) -> None:
    """Remove the idempotency keys that are older than a day."""
    tx.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_MS,))
