"""Tokens, stored as hashes, so that a copy of the store grants no access."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

USED: Final = "UPDATE tokens SET last_used_at = ?1 WHERE id = ?2 AND coalesce(last_used_at, 0) < ?1"
REVOKE_DESCENDANTS: Final = """
    WITH RECURSIVE ended(id, at) AS (
        SELECT id, revoked_at FROM tokens WHERE revoked_at IS NOT NULL
        UNION
        SELECT tokens.id, ended.at FROM tokens JOIN ended ON tokens.made_by = ended.id WHERE tokens.revoked_at IS NULL
    )
    UPDATE tokens SET revoked_at = (SELECT max(at) FROM ended WHERE ended.id = tokens.id)
    WHERE revoked_at IS NULL AND id IN (SELECT id FROM ended)"""
SET_META: Final = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Token(msgspec.Struct, frozen=True):
    id: str
    hash: bytes
    # Separated by spaces.
    scopes: str
    node_id: str | None
    label: str
    created_at: int
    revoked_at: int | None = None
    # Patterns of allowed tools, separated by spaces; empty: all.
    tools: str = ""
    # Allowed nodes, separated by spaces; empty: all.
    nodes: str = ""
    expires_at: int | None = None
    # The public key of a node that authenticates by its key; there is no shared secret then.
    public_key: bytes | None = None
    last_used_at: int | None = None
    # The credential that made it.
    made_by: str = "owner"
    # Which tools MCP clients see: `compact` or `full`.
    profile: str = "full"


_TOKENS: Final = Table("tokens", Token)


def token_hash(secret: str) -> bytes:
    # A secret of 256 random bits cannot be guessed, so that a fast hash is enough.
    return hashlib.sha256(secret.encode()).digest()


def add_token(tx: Tx, token: Token) -> None:
    _TOKENS.add(tx, token)


def revoke_tokens(tx: Tx, token_ids: Iterable[str], at: int = 0) -> None:
    """Revoke these tokens and those that a revoked token made. Without `at`, the time of the revocation is unknown."""
    revoke = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
    tx.executemany(revoke, [(at, token_id) for token_id in token_ids])
    tx.execute(REVOKE_DESCENDANTS)


def tokens_used(tx: Tx, used: Mapping[str, int]) -> None:
    """Store the last use of tokens, by id."""
    tx.executemany(USED, [(at, token_id) for token_id, at in used.items()])


def all_tokens(tx: Tx) -> list[Token]:
    return _TOKENS.all(tx, "ORDER BY created_at, id")


def get_meta(tx: Tx, key: str) -> str | None:
    rows = tx.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchall()
    return str(rows[0][0]) if rows else None


def set_meta(tx: Tx, key: str, value: str) -> None:
    tx.execute(SET_META, (key, value))
