"""Terminals on nodes. Their output and input are on a WebSocket, see `connection`."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from farhand.api.routes.nodes import NODE_STATUSES
from farhand.api.server.http import Problem, Request
from farhand.api.server.router import Query, route
from farhand.api.server.streams import end_of_call
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, result_of
from farhand.gateway.control.terminals import COLS, ROWS, Terminals, TerminalView
from farhand.protocol.errors import ToolError
from farhand.store.tables.calls import CallRecord


class TerminalRequest(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    cols: int = COLS
    rows: int = ROWS
    # A shell line; the login shell by default.
    command: str | None = None
    cwd: str | None = None


class TerminalOpened(msgspec.Struct):
    terminal_id: str
    node: str
    pid: int


class TerminalsAnswer(msgspec.Struct):
    terminals: list[TerminalView]
    count: int
    # Nodes that did not answer.
    unanswered: list[str]


class TerminalEnded(msgspec.Struct):
    terminal_id: str
    message: str


class TerminalRoutes:
    def __init__(self, terminals: Terminals, gate: Gate) -> None:
        self._terminals = terminals
        self._gate = gate

    @route(
        "POST /v1/terminals",
        Scope.TOOLS_EXEC,
        "Open a terminal on a node; the answer comes when it is open, if necessary after an approval.",
        errors=(404, 409, 502, 503),
        statuses=NODE_STATUSES,
        idempotent=True,
        narrow=True,
    )
    async def open(self, request: Request, wanted: TerminalRequest) -> TerminalOpened:
        opened = await self._terminals.open(
            request.principal,
            wanted.node,
            command=wanted.command,
            cwd=wanted.cwd,
            cols=wanted.cols,
            rows=wanted.rows,
            idempotency_key=request.idempotency_key,
        )
        record, result = await self._ended(request, opened)
        return TerminalOpened(record.id, record.node_id or wanted.node, int(result.get("pid", 0)))

    @route("GET /v1/terminals", Scope.READ, "Terminals of connected nodes, newest first; ended ones for 30 minutes.")
    async def terminals(self, request: Request) -> TerminalsAnswer:
        found, silent = await self._terminals.listing(request.principal)
        return TerminalsAnswer(found, len(found), silent)

    @route(
        "DELETE /v1/terminals/{terminal_id}",
        Scope.TOOLS_EXEC,
        "End a terminal with all its processes.",
        errors=(404, 409, 502, 503),
        statuses=NODE_STATUSES,
        narrow=True,
    )
    async def end(self, request: Request) -> TerminalEnded:
        opened = await self._terminals.end(request.params["terminal_id"], request.principal)
        _, result = await self._ended(request, opened)
        return TerminalEnded(request.params["terminal_id"], str(result.get("message", "")))

    @route(
        "GET /v1/terminals/{terminal_id}/ws",
        Scope.TOOLS_EXEC,
        "The socket of a terminal: connect with a WebSocket.",
        status=101,
        media=(),
        query=(Query("offset", "From this byte of the output on; a negative one counts from the end.", int),),
    )
    async def socket(self, _request: Request) -> NoReturn:
        """Refuse a request that is not an upgrade; upgrades do not get here."""
        raise Problem(400, "upgrade_required", "this is the socket of a terminal: connect to it with a WebSocket")

    async def _ended(self, request: Request, opened: OpenCall) -> tuple[CallRecord, dict[str, Any]]:
        """Return the record and result of a call; abandon it if its client leaves. Raises ToolError if it failed."""
        record = await end_of_call(request, self._gate, opened)
        ended = result_of(record)
        if ended.error is not None:
            raise ToolError.of(ended.error.kind, ended.error.message)
        return record, msgspec.json.decode(ended.result, type=dict[str, Any])
