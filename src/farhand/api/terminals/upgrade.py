"""The upgrade to the WebSocket of a terminal: who may connect. The socket is loaded with the first connection."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from farhand.api.server.guard import Guard
from farhand.api.server.http import Problem, Scope, invalid
from farhand.gateway.access import credentials
from farhand.gateway.control.terminals import Terminals

if TYPE_CHECKING:
    from farhand.api.terminals.connection import TerminalConnection

TERMINALS = "/v1/terminals/"
PATH = re.compile(r"/v1/terminals/([^/]+)/ws")
MAX_OFFSET = 2**62
_OFFSET = re.compile(r"-?[0-9]{1,19}")


class TerminalSockets:
    """Opens the connections of viewers."""

    def __init__(self, terminals: Terminals, guard: Guard) -> None:
        self._terminals = terminals
        self._guard = guard

    def open(self, scope: Scope, ended: Callable[[], None]) -> tuple[TerminalConnection, str | None]:
        """Return the connection of a client, and the subprotocol to answer with. Raises Problem.

        `ended` is called when the connection has ended.
        """
        caller, subprotocol = self._guard.admit_client(scope, credentials.Scope.TOOLS_EXEC)

        def left() -> None:
            self._guard.client_left(scope)
            ended()

        try:
            found = PATH.fullmatch(scope["path"])
            if found is None:
                raise Problem(404, "not_found", f"there is no socket at {scope['path'][:200]}")
            offset = _offset(scope)
        except Problem:
            self._guard.client_left(scope)
            raise
        connection: TerminalConnection = importlib.import_module("farhand.api.terminals.connection").TerminalConnection(
            self._terminals,
            found[1],
            caller,
            offset,
            address=str(scope["client"][0]) if scope.get("client") else "",
            access_ended=lambda: asyncio.ensure_future(self._guard.access_ended(caller)),
            ended=left,
        )
        return connection, subprotocol


def _offset(scope: Scope) -> int | None:
    """Return the offset in the query: None if there is none; a negative one counts from the end. Raises Problem."""
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get("offset")
    if given is None:
        return None
    if not _OFFSET.fullmatch(given[-1]) or abs(int(given[-1])) > MAX_OFFSET:
        raise invalid(f"offset must be a number of bytes, not {given[-1][:50]!r}")
    return int(given[-1])
