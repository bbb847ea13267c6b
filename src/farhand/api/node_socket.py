"""The node socket: who may connect, the hello, and then messages both ways until silence or a close.

uvicorn hands an upgraded connection over to picows, which is what the nodes speak too: frames are parsed and masked in
C and handled where they arrive, without a queue or a task in between (see docs/decisions).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast
from urllib.parse import unquote

import picows
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from farhand.api.cork import CorkedTransport
from farhand.api.guard import FILES_SOCKET
from farhand.api.http import Problem, Scope
from farhand.gateway.credentials import NodeGrant
from farhand.gateway.hub import Hub
from farhand.gateway.node_keys import proves
from farhand.gateway.roster import (
    Connection,
    HelloRefused,
)
from farhand.protocol.errors import ProtocolError
from farhand.protocol.liveness import Liveness, Look
from farhand.protocol.login import SCHEME, read_key
from farhand.protocol.messages import (
    FreezeReport,
    GatewayChallenge,
    NodeAnswer,
    NodeHello,
    NodeProof,
    Ping,
    Pong,
    ToolResponse,
    ToolsUpdate,
    TransferCredit,
    TransferDone,
    TransferReady,
    decode,
    encode,
)
from farhand.protocol.version import (
    CLOSE_BAD_HELLO,
    CLOSE_HELLO_TIMEOUT,
    CLOSE_SILENT,
    CLOSE_UNAUTHORIZED,
    HELLO_SECONDS,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
)
from farhand.sdk.link import keep_unsent_low

log = logging.getLogger("farhand.nodes")

BEARER = "bearer."
INVALID_TOKEN = "invalid or missing node token"  # noqa: S105
CLOSE_RESTART = 1012
CLOSE_WAIT_SECONDS = 2.0
"""How long a peer may take to answer our close before the connection is cut."""
ANSWERED_SECONDS = 0.001
CONGESTED_BYTES = 32 * 1024 * 1024
MOST_UNPROVED = 4
SIP_BYTES = 256 * 1024
SIPS_END_BYTES = 1024 * 1024
WRITE_AHEAD_BYTES = 256 * 1024
"""How much of the files on their way to a node may wait in its socket's buffer: what is sent next waits behind it."""


class Admission(Protocol):
    """What the door asks the guard before anything else."""

    def admit_node(self, scope: Scope) -> None:
        """Raises Problem for a connection that may not even present a token."""
        ...

    def node_failed(self, scope: Scope) -> None:
        """A wrong token came from there."""
        ...


class NodeDoor:
    """What uvicorn calls for each connection that asks to become a WebSocket."""

    def __init__(self, hub: Hub, guard: Admission) -> None:
        self._hub = hub
        self._guard = guard
        self._unproved: dict[bytes, list[NodeConversation]] = {}
        """By their keys, of which there are as many as are registered."""

    def __call__(self, *, server_state: Any, **_: Any) -> _Handover:
        return _Handover(self, server_state.connections)

    def open(self, scope: Scope) -> tuple[NodeConversation, str | None]:
        """The conversation with a node that may connect, and the subprotocol to answer with. Raises Problem."""
        self._guard.admit_node(scope)
        query = _query(scope["query_string"].decode("latin-1"))
        presented, subprotocol = _secrets(scope, query)
        key = _presented_key(scope)
        claimed = query.get("node_id", "")
        for claim in {unquote(claimed), unquote(claimed.replace("+", " "))}:
            if key is not None:
                grant = self._hub.credentials.recognise_key(key, claim)
                if grant is not None:
                    return self._asked_to_prove(grant, scope), subprotocol
                continue
            for secret in presented:
                grant = self._hub.credentials.recognise_node(secret, claim)
                if grant is not None:
                    return NodeConversation(self._hub, grant, _address(scope)), subprotocol
        self._guard.node_failed(scope)
        raise Problem(401, "unauthorized", INVALID_TOKEN)

    def redeem(self, scope: Scope) -> Callable[[socket.socket | None], None]:
        """Who is to be given a connection to the files socket. Raises Problem."""
        self._guard.admit_node(scope)
        if scope["scheme"] != "ws":
            raise Problem(400, "invalid_request", "the files socket is for connections without TLS")
        headers = dict(scope["headers"])
        ticket = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        wanted = self._hub.transfers.redeem(ticket, _address(scope))
        if wanted is None:  # no wrong token: tickets of tries that are over come late, and none can be guessed
            raise Problem(401, "unauthorized", "this ticket admits nobody, or was used")
        return wanted

    def _asked_to_prove(self, grant: NodeGrant, scope: Scope) -> NodeConversation:
        """Of those who come with one key and have proved nothing yet there are a few; the oldest makes room."""
        key = grant.public_key or b""
        unproved = [one for one in self._unproved.get(key, []) if one.unproved]
        for one in unproved[: len(unproved) + 1 - MOST_UNPROVED]:
            one.close(CLOSE_UNAUTHORIZED, "too many came with this key and did not prove that it is theirs")
        conversation = NodeConversation(self._hub, grant, _address(scope), lambda: self._guard.node_failed(scope))
        self._unproved[key] = [*unproved[1 - MOST_UNPROVED :], conversation]
        return conversation


class _Handover(asyncio.Protocol):
    """Stands in for a moment, while the connection goes from uvicorn to picows."""

    def __init__(self, door: NodeDoor, connections: set[Any]) -> None:
        self._door = door
        self._connections = connections
        self._conversation: NodeConversation | None = None
        self._wanted: Callable[[socket.socket | None], None] | None = None
        """By whom the connection is wanted as it is, once it was answered."""
        self._transport: asyncio.Transport
        self._protocol: Any = WSProtocol(
            None,  # host
            None,  # path
            False,  # client side
            self._listener,
            logging.getLogger("picows.server"),
            True,  # disconnect on exception
            HELLO_SECONDS,
            False,  # automatic pings: we send the protocol's own
            0,
            0,
            picows.WSAutoPingStrategy.PING_WHEN_IDLE,
            False,  # automatic pongs: there would be no end of them for a peer that does not read
            MAX_FRAME_BYTES,
            None,  # further headers
            16384,  # read buffer, to begin with
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        inner = transport.inner if isinstance(transport, CorkedTransport) else transport
        self._transport = cast(asyncio.Transport, inner)
        self._connections.add(self)
        self._protocol.connection_made(inner)

    def data_received(self, data: bytes) -> None:
        """uvicorn repeats the request to us once; everything after it is read by picows itself."""
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
            loop.call_later(ANSWERED_SECONDS, self._give_away, wanted)  # our answer has not left yet
        else:
            taken: socket.socket | None = None
            try:
                taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            except OSError as error:
                log.warning("a connection for the bytes of a transfer cannot be kept: %s", error)
            transport.abort()
            loop.call_soon(wanted, taken)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._protocol.connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops."""
        if self._conversation is not None:
            self._conversation.close(CLOSE_RESTART, "the gateway is stopping")
        else:
            self._transport.close()

    def _listener(self, request: picows.WSUpgradeRequest) -> picows.WSUpgradeResponseWithListener:
        scope = _scope(request, self._transport)
        try:
            if scope["path"] == FILES_SOCKET:
                self._wanted = self._door.redeem(scope)
                answer = picows.WSUpgradeResponse.create_101_response(None)
                return picows.WSUpgradeResponseWithListener(answer, picows.WSListener())
            conversation, subprotocol = self._door.open(scope)
        except Problem as problem:
            # The plug-in guide's refusal is plain text, and the rest follows it.
            headers = {
                "Content-Type": "text/plain; charset=utf-8",
                "X-Request-Id": secrets.token_hex(8),
                "Connection": "close",
            }
            headers.update({name.decode(): value.decode() for name, value in problem.headers})
            refusal = picows.WSUpgradeResponse.create_error_response(problem.status, str(problem).encode(), headers)
            return picows.WSUpgradeResponseWithListener(refusal, None)
        self._conversation = conversation
        conversation.on_end = lambda: self._connections.discard(self)
        chosen = {"Sec-WebSocket-Protocol": subprotocol} if subprotocol else None
        return picows.WSUpgradeResponseWithListener(picows.WSUpgradeResponse.create_101_response(chosen), conversation)


class Sips(asyncio.BufferedProtocol):
    """Stands before a connection's own protocol while a file comes through, and has it read a little at a time.

    picows takes in all there is, some megabytes, and handles every frame of it in one turn of the loop, and the loop
    reads on as long as there is more; calls would wait for all of it. Once no more of a file comes, it steps aside.
    """

    def __init__(self, transport: asyncio.Transport, inner: asyncio.BufferedProtocol) -> None:
        self._transport = transport
        self._inner = inner
        self.read = 0
        """Bytes since the last frame of a file."""
        self.over = False

    @classmethod
    def begin(cls, transport: asyncio.Transport) -> Sips:
        sips = cls(transport, cast(asyncio.BufferedProtocol, transport.get_protocol()))
        transport.set_protocol(sips)
        return sips

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._inner.get_buffer(sizehint))[:SIP_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes >= SIP_BYTES and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        self.read += nbytes
        self._inner.buffer_updated(nbytes)
        if self.read > SIPS_END_BYTES and not self.over:
            self.over = True
            self._transport.set_protocol(self._inner)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class NodeConversation(picows.WSListener):
    """A node's connection, from its hello until it leaves or falls silent; also the roster's hold on it."""

    def __init__(self, hub: Hub, grant: NodeGrant, address: str, failed: Callable[[], None] = lambda: None) -> None:
        """`failed` is told of a wrong signature."""
        self.address = address
        self._hub = hub
        self._grant = grant
        self._failed = failed
        self._challenge: GatewayChallenge | None = None
        self._connection: Connection | None = None
        self._gathered = bytearray()
        self._text = True
        self._heard_at = time.monotonic()
        self._liveness = Liveness()
        self._outgoing: list[bytes] = []
        self._frames: deque[bytes] = deque()
        self._full = False
        self._owed: dict[picows.WSMsgType, bytes] = {}
        """Answers to pings, the protocol's own and WebSocket's, that wait until the peer reads."""
        self._direct = -1
        self._timer: asyncio.TimerHandle | None = None
        self._sips: Sips | None = None
        self._socket: picows.WSTransport | None = None
        self.on_end: Callable[[], None] = lambda: None

    # -- the roster's side ------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if self._socket is None:
            return
        if self._hub.gate.quiet and not self._outgoing:
            self._socket.send(picows.WSMsgType.TEXT, frame)
            return
        # With many calls open, one write for all frames of a turn: each write wakes the node.
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(frame)

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if self._socket is not None and frames:
            self._socket.underlying_transport.write(b"".join(_framed(frames)))

    def send_frame(self, frame: bytes | memoryview) -> None:
        if self._full or self._frames:
            self._frames.append(bytes(frame))
        elif self._socket is not None:
            self._send_binary(self._socket.underlying_transport, frame)

    def _send_frames(self) -> None:
        while self._frames and not self._full and self._socket is not None:
            self._send_binary(self._socket.underlying_transport, self._frames.popleft())

    def _send_binary(self, transport: asyncio.WriteTransport, frame: bytes | memoryview) -> None:
        """The kernel takes most frames as they are; only what it leaves is copied, for the transport to send."""
        head, taken = _head(0x82, len(frame)), 0
        # A transport that closes has given its descriptor back, or is about to: somebody else's it may be next.
        if self._direct >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # full, or gone, which the transport will find out
                taken = os.writev(self._direct, (head, frame))
        if taken < len(head):
            transport.writelines([head[taken:], bytes(frame)])
        elif taken < len(head) + len(frame):
            transport.write(bytes(memoryview(frame)[taken - len(head) :]))

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        owed, self._owed = self._owed, {}
        for kind, payload in owed.items():
            self._pong(kind, payload)
        self._send_frames()

    @property
    def congested(self) -> bool:
        socket = self._socket
        return socket is not None and socket.underlying_transport.get_write_buffer_size() > CONGESTED_BYTES

    def close(self, code: int, reason: str) -> None:
        """Say why, give the peer a moment to answer, then cut."""
        self._flush()
        socket, self._socket = self._socket, None
        if socket is None:
            return
        self._set_timer(CLOSE_WAIT_SECONDS, lambda: socket.disconnect(False))
        socket.send(picows.WSMsgType.CLOSE, code.to_bytes(2) + _fitting(reason))

    # -- called by picows -------------------------------------------------------------------------------

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._socket = transport
        transport.underlying_transport.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        keep_unsent_low(transport.underlying_transport)
        self._direct = _plain_descriptor(transport.underlying_transport)
        if self._grant.public_key is not None:
            self._challenge = GatewayChallenge(
                self._hub.gateway_id, secrets.token_urlsafe(32), self._hub.roster.clock()
            )
            self.send(encode(self._challenge))
        reason = f"no node_hello within {HELLO_SECONDS:.0f} s"
        self._set_timer(HELLO_SECONDS, lambda: self.close(CLOSE_HELLO_TIMEOUT, reason))

    @property
    def unproved(self) -> bool:
        """It came with a key and has not shown yet that it is its own."""
        return self._challenge is not None and self._socket is not None

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        self._heard_at = time.monotonic()
        kind = frame.msg_type
        if kind == picows.WSMsgType.TEXT and frame.fin:
            self._on_text(frame.get_payload_as_bytes())
        elif kind == picows.WSMsgType.BINARY and frame.fin:
            if self._connection is not None and self._connection.can_transfer and self._socket is not None:
                if self._sips is None or self._sips.over:
                    self._sips = Sips.begin(transport.underlying_transport)
                else:
                    self._sips.read = 0
                self._hub.transfers.on_frame(self._connection, frame.get_payload_as_memoryview())
        elif kind == picows.WSMsgType.CLOSE:
            if self._socket is not None:
                self._socket = None
                transport.send(picows.WSMsgType.CLOSE, frame.get_payload_as_bytes()[:2])
            transport.disconnect()
        elif kind in (picows.WSMsgType.PING, picows.WSMsgType.PONG):
            if self._connection is not None:
                self._hub.roster.seen(self._connection)
            if kind == picows.WSMsgType.PING:
                self._pong(picows.WSMsgType.PONG, frame.get_payload_as_bytes())
        elif kind in (picows.WSMsgType.TEXT, picows.WSMsgType.BINARY, picows.WSMsgType.CONTINUATION):
            self._on_part(kind, frame)

    def on_ws_disconnected(self, _transport: picows.WSTransport) -> None:
        self._socket, self._direct = None, -1
        self._frames.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._hub.leave(self._connection)
        self.on_end()

    # -- messages ---------------------------------------------------------------------------------------

    def _on_part(self, kind: picows.WSMsgType, frame: picows.WSFrame) -> None:
        """Gather a message that comes in several frames; a binary one is never cut up by a peer of ours."""
        if self._socket is None:
            return  # closing
        if kind != picows.WSMsgType.CONTINUATION:
            self._gathered.clear()
            self._text = kind == picows.WSMsgType.TEXT
        if self._text:
            self._gathered += frame.get_payload_as_bytes()
            if len(self._gathered) > MAX_FRAME_BYTES:
                self._gathered.clear()
                self.close(1009, f"a message has at most {MAX_FRAME_BYTES} bytes")
            elif frame.fin:
                message = bytes(self._gathered)
                self._gathered.clear()
                self._on_text(message)

    def _on_text(self, text: bytes) -> None:
        if self._socket is None:
            return  # closing
        connection = self._connection
        if connection is None:
            self._greet(text)
            return
        self._hub.roster.seen(connection)
        try:
            message = decode(text)
        except ProtocolError as error:
            log.debug("node %s: ignored a frame of %d bytes: %s", connection.node_id, len(text), error)
            if isinstance(error.__context__, UnicodeError):
                self.close(1007, "a text frame is UTF-8")
            return
        if isinstance(message, ToolResponse):
            self._hub.gate.answered(connection, message)
        elif isinstance(message, Ping):
            self._pong(picows.WSMsgType.TEXT, encode(Pong(message.timestamp)))
        elif isinstance(message, NodeAnswer):
            self._hub.queries.answered(connection, message)
        elif isinstance(message, FreezeReport):
            self._hub.freeze.answered(connection, message)
        elif isinstance(message, TransferCredit | TransferReady | TransferDone):
            if connection.can_transfer:
                self._hub.transfers.on_message(connection, message)
        elif isinstance(message, ToolsUpdate) and len(text) <= MAX_HELLO_BYTES:
            self._hub.update(connection, message)

    def _pong(self, kind: picows.WSMsgType, payload: bytes) -> None:
        """Answer a ping. A peer that does not read what it was sent is owed the newest answer alone (RFC 6455, 5.5.3):
        others would heap up here for as long as it asks."""
        if self._full:
            self._owed[kind] = payload
        elif kind == picows.WSMsgType.TEXT:
            self.send(payload)
        elif self._socket is not None:
            self._socket.send(kind, payload)

    def _greet(self, text: bytes) -> None:
        """Before the hello everything else is ignored; a hello that cannot be accepted closes the socket."""
        try:
            if len(text) > MAX_HELLO_BYTES:
                raise HelloRefused(1009, f"a hello has at most {MAX_HELLO_BYTES} bytes")
            try:
                hello = decode(text)
            except ProtocolError as error:
                if b'"node_hello"' in text:
                    raise HelloRefused(CLOSE_BAD_HELLO, f"this hello cannot be read: {error}") from None
                return
            if isinstance(hello, NodeProof) and self._challenge is not None:
                self._prove(self._challenge, hello)
            elif isinstance(hello, NodeHello):
                if self._challenge is not None:
                    raise HelloRefused(CLOSE_UNAUTHORIZED, "a node that comes with a key proves first that it has it")
                if not self._hub.credentials.still_grants(self._grant):
                    raise HelloRefused(CLOSE_UNAUTHORIZED, "this node's token was revoked, or is too old")
                card = self._hub.roster.examine(hello, self._grant.node_id)
                if self._grant == NodeGrant() and self._hub.credentials.has_own_token(card.node_id):
                    reason = f"node {card.node_id!r} has a token of its own, which the shared one does not replace"
                    raise HelloRefused(CLOSE_UNAUTHORIZED, reason)
                self.send(encode(self._hub.welcome(hello)))
                self._connection = self._hub.join(card, hello, self, self._grant.token_id)
                self._watch()
        except HelloRefused as refused:
            log.warning("a node was refused: %s", refused)
            self.close(refused.code, str(refused))

    def _prove(self, challenge: GatewayChallenge, proof: NodeProof) -> None:
        """One try: the number that was to be signed is good for this connection alone."""
        assert self._grant.public_key is not None
        node_id = self._grant.node_id or ""
        if not proves(self._grant.public_key, challenge, node_id, proof):
            self._failed()
            raise HelloRefused(CLOSE_UNAUTHORIZED, f"this is not the signature of node {node_id!r}")
        self._challenge = None

    def _watch(self) -> None:
        """Ask a silent node whether it is there; give it up when it does not answer, and when its token has ended."""
        if not self._hub.credentials.still_grants(self._grant):
            self.close(CLOSE_UNAUTHORIZED, "this node's token has expired")
            return
        silent = time.monotonic() - self._heard_at
        look, wait = self._liveness.look(silent)
        if look is Look.GIVE_UP:
            log.warning("a node has been silent for %.0f s", silent)
            self.close(CLOSE_SILENT, "silent for too long")
            return
        if look is Look.PING:
            self.send(encode(Ping(time.time_ns() // 1_000_000)))
        if self._grant.expires_at is not None:
            wait = min(wait, max(0.0, (self._grant.expires_at - self._hub.roster.clock()) / 1000) + 0.01)
        self._set_timer(wait, self._watch)

    def _set_timer(self, seconds: float, action: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action)


def _plain_descriptor(transport: asyncio.Transport) -> int:
    """Where bytes can be written past the transport while it has none of its own to write; -1 under TLS."""
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None or not hasattr(os, "writev"):
        return -1
    descriptor: int = connection.fileno()
    return descriptor


def _framed(payloads: list[bytes]) -> Iterator[bytes]:
    """Unmasked text frames, as a server sends them (RFC 6455, 5.2); picows has no call for several at once."""
    for payload in payloads:
        yield _head(0x81, len(payload))
        yield payload


def _head(first: int, size: int) -> bytes:
    if size < 126:
        return bytes((first, size))
    if size < 65536:
        return b"%c\x7e" % first + size.to_bytes(2)
    return b"%c\x7f" % first + size.to_bytes(8)


def _scope(request: picows.WSUpgradeRequest, transport: asyncio.Transport) -> Scope:
    """The request in the words the guard knows."""
    path, _, query = request.path.partition(b"?")
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()]
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


def _query(text: str) -> dict[str, str]:
    """The undecoded query values. Raises Problem when `token` or `node_id` comes twice."""
    values: dict[str, str] = {}
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if key in values and key in ("token", "node_id"):
            raise Problem(400, "invalid_request", f"the query names {key} twice")
        values[key] = value
    return values


def _secrets(scope: Scope, query: dict[str, str]) -> tuple[list[str], str | None]:
    """The token as it may be meant, best form first, and the subprotocol to answer with."""
    offered = [value for name, value in scope["headers"] if name == b"sec-websocket-protocol"]
    subprotocols = [part.strip() for value in offered for part in value.decode("latin-1").split(",")]
    answer = next((name for name in subprotocols if not name.startswith(BEARER)), None)
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return [value[7:].decode("latin-1").strip()], answer
    for subprotocol in subprotocols:
        if subprotocol.startswith(BEARER):
            try:
                encoded = subprotocol.removeprefix(BEARER)
                secret = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, ValueError):
                continue
            return [secret], answer or subprotocol
    token = query.get("token")
    if not token:
        return [""], answer
    # A seed client sends the token unencoded, so a plus may be a plus or stand for a space.
    return list(dict.fromkeys([unquote(token), unquote(token.replace("+", " ")), token])), answer


def _presented_key(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        scheme, _, key = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == SCHEME.lower():
            try:
                return read_key(key)
            except ValueError as error:
                raise Problem(400, "invalid_request", str(error)) from None
    return None


def _fitting(reason: str) -> bytes:
    """A close frame carries at most 123 bytes of reason."""
    return reason.encode()[:123].decode(errors="ignore").encode()
