"""MCP servers that were added by a command, and the descriptions of tools that the owner accepted."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

SAVE_TOOL: Final = """
    INSERT INTO mcp_tools (server, tool, digest, description, accepted_at, accepted_by) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (server, tool) DO UPDATE
    SET digest = excluded.digest, description = excluded.description, accepted_at = excluded.accepted_at,
        accepted_by = excluded.accepted_by"""


class StoredServer(msgspec.Struct, frozen=True):
    """A server that was added; `settings` are those of `[mcp.NAME]` as JSON."""

    name: str
    settings: bytes
    created_at: int
    created_by: str


class AcceptedTool(msgspec.Struct, frozen=True):
    """The description of a tool as it was accepted: a digest of everything that its server said, and the text."""

    tool: str
    digest: str
    description: str
    accepted_at: int
    accepted_by: str


_SERVERS: Final = Table("mcp_servers", StoredServer)
_TOOLS: Final = Table("mcp_tools", AcceptedTool)


def stored_servers(tx: Tx) -> list[StoredServer]:
    return _SERVERS.all(tx, "ORDER BY name")


def save_server(tx: Tx, server: StoredServer) -> None:
    _SERVERS.add(tx, server)


def delete_server(tx: Tx, name: str) -> None:
    """Remove a server and what was accepted of its tools."""
    tx.execute("DELETE FROM mcp_servers WHERE name = ?", (name,))
    tx.execute("DELETE FROM mcp_tools WHERE server = ?", (name,))


def accepted_tools(tx: Tx, server: str) -> dict[str, AcceptedTool]:
    return {one.tool: one for one in _TOOLS.all(tx, "WHERE server = ?", server)}


def accept_tools(tx: Tx, server: str, tools: list[AcceptedTool]) -> None:
    for one in tools:
        tx.execute(SAVE_TOOL, (server, one.tool, one.digest, one.description, one.accepted_at, one.accepted_by))
