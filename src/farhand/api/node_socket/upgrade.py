"""The node socket: who may connect, and the handover of the connection.

uvicorn hands an upgraded connection over to picows, which the nodes use too: frames are parsed and masked in C and
handled where they arrive, without a queue or a task in between (see docs/decisions). picows documents only a server of
its own, which would need a second port; so this uses its protocol class, and pyproject.toml bounds its version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import unquote

import picows
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from farhand.api.node_socket.connection import NodeConversation
from farhand.api.node_socket.login import INVALID_TOKEN, node_grant
from farhand.api.node_socket.services import NodeServices
from farhand.api.server.guard import FILES_SOCKET, Guard
from farhand.api.server.http import Problem, Scope
from farhand.gateway.access.credentials import NodeGrant
from farhand.protocol.version import CLOSE_UNAUTHORIZED, HELLO_SECONDS, MAX_FRAME_BYTES

log = logging.getLogger(__name__)

CLOSE_RESTART = 1012
ANSWERED_SECONDS = 0.001
MOST_UNPROVED = 4


class OpenSocket(Protocol):
    """What picows calls for a connection, and how to end it."""

    def close(self, code: int, reason: str) -> None: ...


class OtherSocket(Protocol):
    """A WebSocket beside those of nodes."""

    def open(self, scope: Scope, ended: Callable[[], None]) -> tuple[Any, str | None]:
        """Return a picows listener with `close`, and the subprotocol to answer with. Raises Problem.

        `ended` is to be called when the connection has ended.
        """
        ...


class NodeSockets:
    """The protocol factory that uvicorn calls for each WebSocket upgrade."""

    def __init__(self, services: NodeServices, guard: Guard, others: Mapping[str, OtherSocket]) -> None:
        """`others`: further sockets, by the beginning of their paths."""
        self._services = services
        self._guard = guard
        self._others = others
        # By key; there are at most as many keys as are registered.
        self._unproved: dict[bytes, list[NodeConversation]] = {}

    def __call__(self, *, server_state: Any, **_: Any) -> _Handover:
        return _Handover(self, server_state.connections)

    def open(self, scope: Scope, ended: Callable[[], None]) -> tuple[NodeConversation, str | None]:
        """Return the conversation with a node that may connect, and the subprotocol to answer with. Raises Problem.

        `ended` is called when the connection has ended.
        """
        self._guard.admit_node(scope)
        grant, subprotocol = node_grant(self._services.credentials, scope["headers"], scope["query_string"])
        if grant is not None and grant.public_key is not None:
            return self._asked_to_prove(grant, scope, ended), subprotocol
        if grant is not None:
            if grant.token_id is None:  # a token that a person chose may be short enough to be guessed
                self._guard.check_lockout(scope)
            return NodeConversation(self._services, grant, _address(scope), ended=ended), subprotocol
        self._guard.check_lockout(scope)
        self._guard.node_failed(scope)
        raise Problem(401, "unauthorized", INVALID_TOKEN)

    def other(self, path: str) -> OtherSocket | None:
        """Return the socket at a path that is not one of the nodes'."""
        return next((socket for prefix, socket in self._others.items() if path.startswith(prefix)), None)

    def redeem(self, scope: Scope) -> Callable[[socket.socket | None], None]:
        """Return the function that takes a connection to the files socket. Raises Problem."""
        self._guard.admit_node(scope)
        if scope["scheme"] != "ws":
            raise Problem(400, "invalid_request", "the files socket is for connections without TLS")
        headers = dict(scope["headers"])
        ticket = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        wanted = self._services.transfers.redeem(ticket, _address(scope))
        # Not counted as a wrong token: tickets of ended attempts may arrive late, and cannot be guessed.
        if wanted is None:
            raise Problem(401, "unauthorized", "this ticket is not valid, or was used")
        return wanted

    def _asked_to_prove(self, grant: NodeGrant, scope: Scope, ended: Callable[[], None]) -> NodeConversation:
        """Start a connection whose key is still unproved; of a few per key, the oldest is closed."""
        key = grant.public_key or b""
        unproved = [one for one in self._unproved.get(key, []) if one.unproved]
        for one in unproved[: len(unproved) + 1 - MOST_UNPROVED]:
            one.close(CLOSE_UNAUTHORIZED, "too many came with this key and did not prove that it is theirs")
        conversation = NodeConversation(
            self._services, grant, _address(scope), ended=ended, failed=lambda: self._guard.node_failed(scope)
        )
        self._unproved[key] = [*unproved[1 - MOST_UNPROVED :], conversation]
        return conversation


class _Handover(asyncio.Protocol):
    """A temporary protocol while the connection passes from uvicorn to picows."""

    def __init__(self, sockets: NodeSockets, connections: set[Any]) -> None:
        self._sockets = sockets
        self._connections = connections
        self._conversation: OpenSocket | None = None
        # Takes the raw connection once the upgrade was answered.
        self._wanted: Callable[[socket.socket | None], None] | None = None
        self._transport: asyncio.Transport
        self._protocol: Any = WSProtocol(
            None,  # host
            None,  # path
            False,  # client side
            self._listener,
            logging.getLogger("picows.server"),
            True,  # disconnect on exception
            HELLO_SECONDS,
            False,  # automatic pings: we send those of our protocol
            0,
            0,
            picows.WSAutoPingStrategy.PING_WHEN_IDLE,
            False,  # automatic pongs: they would accumulate for a peer that does not read
            MAX_FRAME_BYTES,
            None,  # further headers
            16384,  # initial read buffer
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receive the request, which uvicorn repeats once; picows reads everything after it."""
        self._transport.pause_reading()
        while data and not self._transport.is_closing():
            buffer = self._protocol.get_buffer(len(data))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            self._protocol.buffer_updated(size)
            data = data[size:]
        asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if self._wanted is not None:
            self._give_away(self._wanted)
            return
        if self._transport.is_closing():
            self._connections.discard(self)
            return
        self._transport.set_protocol(self._protocol)
        self._transport.resume_reading()

    def _give_away(self, wanted: Callable[[socket.socket | None], None]) -> None:
        transport, loop = self._transport, asyncio.get_running_loop()
        if transport.is_closing():
            self._connections.discard(self)
            wanted(None)
        elif transport.get_write_buffer_size():
            loop.call_later(ANSWERED_SECONDS, self._give_away, wanted)  # our answer has not been sent yet
        else:
            taken: socket.socket | None = None
            try:
                taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            except OSError as error:
                log.warning("failed to keep a transfer connection: %s", error)
            transport.abort()
            loop.call_soon(wanted, taken)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._protocol.connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, since the server stops."""
        if self._conversation is not None:
            self._conversation.close(CLOSE_RESTART, "the gateway is stopping")
        else:
            self._transport.close()

    def _listener(self, request: picows.WSUpgradeRequest) -> picows.WSUpgradeResponseWithListener:
        scope = _scope(request, self._transport)
        try:
            if scope["path"] == FILES_SOCKET:
                self._wanted = self._sockets.redeem(scope)
                answer = picows.WSUpgradeResponse.create_101_response(None)
                return picows.WSUpgradeResponseWithListener(answer, picows.WSListener())
            socket = self._sockets.other(scope["path"]) or self._sockets
            conversation, subprotocol = socket.open(scope, lambda: self._connections.discard(self))
        except Problem as problem:
            # The refusal in the plug-in guide is plain text, so all are.
            headers = {
                "Content-Type": "text/plain; charset=utf-8",
                "X-Request-Id": secrets.token_hex(8),
                "Connection": "close",
            }
            headers.update({name.decode(): value.decode() for name, value in problem.headers})
            refusal = picows.WSUpgradeResponse.create_error_response(problem.status, str(problem).encode(), headers)
            return picows.WSUpgradeResponseWithListener(refusal, None)
        self._conversation = conversation
        chosen = {"Sec-WebSocket-Protocol": subprotocol} if subprotocol else None
        return picows.WSUpgradeResponseWithListener(picows.WSUpgradeResponse.create_101_response(chosen), conversation)


def _scope(request: picows.WSUpgradeRequest, transport: asyncio.Transport) -> Scope:
    """Return the request as an ASGI scope for the guard."""
    path, _, query = request.path.partition(b"?")
    # picows decodes headers as UTF-8 with surrogate escapes; this restores the bytes that were sent.
    headers = [
        (name.lower().encode("utf-8", "surrogateescape"), value.encode("utf-8", "surrogateescape"))
        for name, value in request.headers.items()
    ]
    secure = transport.get_extra_info("sslcontext") is not None
    return {
        "type": "websocket",
        "path": unquote(path.decode("latin-1")),
        "query_string": query,
        "headers": headers,
        "scheme": "wss" if secure else "ws",
        "client": transport.get_extra_info("peername"),
    }


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
