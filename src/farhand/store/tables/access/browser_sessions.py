"""Console sessions. Their secrets are stored as hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

USED: Final = "UPDATE browser_sessions SET last_used_at = ?1 WHERE id = ?2 AND last_used_at < ?1"


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


_SESSIONS: Final = Table("browser_sessions", BrowserSession)


def add_session(tx: Tx, session: BrowserSession) -> None:
    _SESSIONS.add(tx, session)


def all_sessions(tx: Tx) -> list[BrowserSession]:
    return _SESSIONS.all(tx, "ORDER BY created_at, id")


def sessions_used(tx: Tx, used: Mapping[str, int]) -> None:
    """Set when sessions were last used, by their ids."""
    tx.executemany(USED, [(at, session_id) for session_id, at in used.items()])


def remove_sessions(tx: Tx, session_ids: Iterable[str]) -> None:
    tx.executemany("DELETE FROM browser_sessions WHERE id = ?", [(session_id,) for session_id in session_ids])
