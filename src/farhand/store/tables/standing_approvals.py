"""Approvals that hold for every later call which is exactly the same."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.protocol.names import MAIN_AGENT
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class StandingApproval(msgspec.Struct, frozen=True, kw_only=True):
    """The answer "always" to a request for approval."""

    id: str
    # In lower case, as the caller named it.
    tool: str
    node_id: str | None
    # Canonical JSON.
    args: msgspec.Raw
    credential: str
    on_behalf_of: str | None
    # A later call must not have any other origin.
    origins: tuple[str, ...]
    # The rule that asked, for people; it holds for other rules that ask, too.
    rule: str
    approval_id: str
    made_by: str
    created_at: int
    # The agent in whose workspace the call works; empty where it was not stored, see `agent_of`.
    agent_id: str = ""
    # For a message: the session whose place it goes to.
    session_key: str | None = None


_STANDING: Final = Table("standing_approvals", StandingApproval, separator="\n")


def agent_of(agent_id: str | None, credential: str) -> str:
    """Return the agent in whose workspace a call works: the one it names, that of its run, or the main one."""
    kind, _, name = credential.partition(":")
    return agent_id or (name if kind == "agent" else MAIN_AGENT)


def add_standing(tx: Tx, standing: StandingApproval) -> None:
    _STANDING.add(tx, standing)


def all_standing(tx: Tx) -> list[StandingApproval]:
    return _STANDING.all(tx, "ORDER BY created_at, id")


def remove_standing(tx: Tx, standing_id: str) -> None:
    tx.execute("DELETE FROM standing_approvals WHERE id = ?", (standing_id,))
