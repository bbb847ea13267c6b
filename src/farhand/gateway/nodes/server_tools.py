"""The tools of MCP servers, under the names `{server}__{tool}`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

import msgspec

from farhand.protocol.errors import Failed, NotAllowed, NotFound
from farhand.protocol.names import MAX_COMPARED_LENGTH, MAX_COMPARED_NAMES, split_tool
from farhand.tools.tool import Tool

# The capability of every tool of an MCP server.
MCP = "mcp"


class Offered(msgspec.Struct, frozen=True):
    """What an MCP server offers now."""

    # By full name.
    tools: Mapping[str, Tool] = {}
    # By full name: why a tool is not offered.
    held: Mapping[str, str] = {}
    # Why there are no tools; empty while the server is connected.
    unavailable: str = ""


class ServerTools:
    def __init__(self) -> None:
        self._servers: dict[str, Offered] = {}

    def set(self, server: str, offered: Offered | None) -> None:
        """Replace what a server offers; None forgets the server."""
        if offered is None:
            self._servers.pop(server, None)
        else:
            self._servers[server] = offered

    def __iter__(self) -> Iterator[tuple[str, Tool]]:
        for offered in self._servers.values():
            yield from offered.tools.items()

    def get(self, name: str) -> Tool | None:
        named = split_tool(name)
        offered = self._servers.get(named[0]) if named else None
        return offered.tools.get(name) if offered else None

    def find(self, name: str) -> Tool | None:
        """Return the tool with this name; None if the name is not one of an MCP server.

        Raises Failed while the server is not connected, NotAllowed for a tool that is held back, NotFound.
        """
        named = split_tool(name)
        offered = self._servers.get(named[0]) if named else None
        if named is None or offered is None:
            return None
        found = offered.tools.get(name)
        if found is not None:
            return found
        if name in offered.held:
            raise NotAllowed(offered.held[name])
        if offered.unavailable:
            raise Failed(f"{offered.unavailable}; the call did not run")
        known = [one for one in offered.tools if len(one) <= MAX_COMPARED_LENGTH][:MAX_COMPARED_NAMES]
        near = difflib.get_close_matches(name[:MAX_COMPARED_LENGTH], known, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise NotFound(f"the MCP server {named[0]!r} has no tool {named[1]!r}{hint}")
