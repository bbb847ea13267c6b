"""Console sessions. Their secrets are stored as hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from farhand.store.ports import Tx

ADD: Final = """
    INSERT INTO browser_sessions
    (id, cookie_hash, page_hash, owner_hash, created_at, last_used_at, address, user_agent, made_by)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
ALL: Final = """
    SELECT id, cookie_hash, page_hash, owner_hash, created_at, last_used_at, address, user_agent, made_by
    FROM browser_sessions ORDER BY created_at, id"""
USED: Final = "UPDATE browser_sessions SET last_used_at = ?1 WHERE id = ?2 AND last_used_at < ?1"
REMOVE: Final = "DELETE FROM browser_sessions WHERE id = ?"


class BrowserSession(msgspec.Struct, frozen=True):
    """A signed-in browser. A request needs both secrets: the cookie, and the one that only the page holds."""

    id: str
    cookie_hash: bytes
    page_hash: bytes
    # The hash of the owner's token when the session began; the session ends when that token is replaced.
    owner_hash: bytes
    created_at: int
    last_used_at: int
    address: str
    user_agent: str
    # The credential that made the sign-in link: the session acts as it, and ends with it.
    made_by: str


def add_session(tx: Tx, session: BrowserSession) -> None:
    tx.execute(ADD, msgspec.structs.astuple(session))


def all_sessions(tx: Tx) -> list[BrowserSession]:
    return [BrowserSession(*row) for row in tx.execute(ALL)]


def sessions_used(tx: Tx, used: Mapping[str, int]) -> None:
    """Set when sessions were last used, by their ids."""
    tx.executemany(USED, [(at, session_id) for session_id, at in used.items()])


def remove_sessions(tx: Tx, session_ids: Iterable[str]) -> None:
    tx.executemany(REMOVE, [(session_id,) for session_id in session_ids])
