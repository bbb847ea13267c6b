"""The protocol of a node's connection: the hello, then messages both ways until a timeout or a close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import picows

from farhand.api.node_socket.bounded_reads import BoundedReads
from farhand.api.node_socket.message_queue import MessageQueue
from farhand.api.node_socket.services import NodeServices
from farhand.gateway.access.credentials import NodeGrant
from farhand.gateway.nodes.keys import proves
from farhand.gateway.nodes.registry import Connection, HelloRefused
from farhand.protocol.errors import ProtocolError
from farhand.protocol.liveness import Liveness, LivenessAction
from farhand.protocol.messages import (
    GatewayChallenge,
    Message,
    NodeHello,
    NodeProof,
    Ping,
    Pong,
    ToolsUpdate,
    decode,
    encode,
    may_be_response,
    readable_request_id,
)
from farhand.protocol.version import (
    CLOSE_BAD_HELLO,
    CLOSE_BUSY,
    CLOSE_HELLO_TIMEOUT,
    CLOSE_RESTART,
    CLOSE_SILENT,
    CLOSE_UNAUTHORIZED,
    HELLO_SECONDS,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_PLAIN_FRAME_BYTES,
)
from farhand.sdk.connection import keep_unsent_low

log = logging.getLogger(__name__)

# How long a peer may take to answer our close before the connection is aborted.
CLOSE_WAIT_SECONDS = 2.0
# Minimum pause between two updates of a node's tools, also as a multiple of the time an update took.
UPDATE_PAUSE_SECONDS = 0.02
UPDATE_REST = 10.0
# Longer hellos are handled one after the other, with this interval for each credential.
LONG_HELLO_BYTES = 64 * 1024
LONG_HELLO_SECONDS = 0.5
CONGESTED_BYTES = 32 * 1024 * 1024
# How many bytes of files may wait in a node's socket buffer, since later messages queue behind them.
WRITE_AHEAD_BYTES = 256 * 1024


class NodeConversation(picows.WSListener):
    """A node's connection from its hello until it disconnects or times out; the node registry's `Link`."""

    def __init__(
        self,
        services: NodeServices,
        grant: NodeGrant,
        address: str,
        *,
        ended: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended` is called when the connection has ended, `failed` for a wrong signature."""
        self.address = address
        self._services = services
        self._ended = ended
        self._grant = grant
        self._failed = failed
        self._challenge: GatewayChallenge | None = None
        self._connection: Connection | None = None
        self._longest_message = MAX_HELLO_BYTES
        self._gathered = bytearray()
        self._text = True
        self._heard_at = time.monotonic()
        self._liveness = Liveness()
        self._outgoing: list[bytes] = []
        self._frames: deque[bytes] = deque()
        self._full = False
        # Pending answers to pings, of our protocol and of WebSocket, until the peer reads.
        self._owed: dict[picows.WSMsgType, bytes] = {}
        self._direct = -1
        self._timer: asyncio.TimerHandle | None = None
        # Runs while the node's long hello is queued.
        self._greeting: asyncio.TimerHandle | None = None
        # Runs during the pause between updates of the node's tools; the newest update waits for its end.
        self._resting: asyncio.TimerHandle | None = None
        self._newest_update: ToolsUpdate | None = None
        self._reads: BoundedReads | None = None
        self._messages = MessageQueue(self._on_message)
        self._socket: picows.WSTransport | None = None
        self._loop = asyncio.get_running_loop()

    # -- for the node registry -------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if self._socket is None:
            return
        # One write for all frames of a loop iteration: each write wakes the node.
        if not self._outgoing:
            self._loop.call_soon(self._flush)
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
        """Write a frame directly to the socket; only what the kernel does not accept is copied to the transport."""
        head, taken = _head(0x82, len(frame)), 0
        # The descriptor of a closing transport may already belong to another connection.
        if self._direct >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # full or closed; the transport will notice
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
        """Send the reason, wait briefly for the peer's close, then abort."""
        self._flush()
        self._messages.discard()
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
                self._services.gateway_id, secrets.token_urlsafe(32), self._services.node_registry.clock()
            )
            self.send(encode(self._challenge))
        reason = f"no node_hello within {HELLO_SECONDS:.0f} s"
        self._set_timer(HELLO_SECONDS, lambda: self.close(CLOSE_HELLO_TIMEOUT, reason))

    @property
    def unproved(self) -> bool:
        """Return whether the node presented a key but has not proved yet that it owns it."""
        return self._challenge is not None and self._socket is not None

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        self._heard_at = time.monotonic()
        kind = frame.msg_type
        if frame.payload_size > self._longest_message:
            self._refuse_length()
        elif kind == picows.WSMsgType.TEXT and frame.fin:
            self._on_text(frame.get_payload_as_bytes())
        elif kind == picows.WSMsgType.BINARY and frame.fin:
            if self._connection is not None and self._connection.can_transfer and self._socket is not None:
                if self._reads is None or self._reads.over:
                    self._reads = BoundedReads.begin(transport.underlying_transport)
                else:
                    self._reads.read = 0
                relay, payload = self._services.relay, frame.get_payload_as_memoryview()
                if relay is None or not relay.pass_frame(self._connection, payload):
                    self._services.transfers.on_frame(self._connection, payload)
        elif kind == picows.WSMsgType.CLOSE:
            code = frame.get_payload_as_bytes()[:2]
            self._messages.after(lambda: self._close_answered(transport, code))
        elif kind in (picows.WSMsgType.PING, picows.WSMsgType.PONG):
            if self._connection is not None:
                self._services.node_registry.seen(self._connection)
            if kind == picows.WSMsgType.PING:
                self._pong(picows.WSMsgType.PONG, frame.get_payload_as_bytes())
        elif kind in (picows.WSMsgType.TEXT, picows.WSMsgType.BINARY, picows.WSMsgType.CONTINUATION):
            self._on_part(kind, frame)

    def _close_answered(self, transport: picows.WSTransport, code: bytes) -> None:
        if self._socket is not None:
            self._socket = None
            transport.send(picows.WSMsgType.CLOSE, code)
        transport.disconnect()

    def on_ws_disconnected(self, _transport: picows.WSTransport) -> None:
        self._socket, self._direct = None, -1
        self._frames.clear()
        self._messages.after(self._leave)

    def _leave(self) -> None:
        for timer in (self._timer, self._resting, self._greeting):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._services.inventory.leave(self._connection)
        self._ended()

    # -- messages ---------------------------------------------------------------------------------------

    def _on_part(self, kind: picows.WSMsgType, frame: picows.WSFrame) -> None:
        """Collect a message of several frames; our own nodes never split binary messages."""
        if self._socket is None:
            return  # closing
        if kind != picows.WSMsgType.CONTINUATION:
            self._gathered.clear()
            self._text = kind == picows.WSMsgType.TEXT
        if self._text:
            self._gathered += frame.get_payload_as_bytes()
            if len(self._gathered) > self._longest_message:
                self._refuse_length()
            elif frame.fin:
                message = bytes(self._gathered)
                self._gathered = bytearray()
                self._on_text(message)

    def _refuse_length(self) -> None:
        self._gathered = bytearray()
        what = "the hello" if self._connection is None else "the message"
        self.close(1009, f"{what} is longer than {self._longest_message} bytes")

    def _on_text(self, text: bytes) -> None:
        if self._socket is None:
            return  # closing
        if self._connection is None:
            self._greet_in_turn(text)
        else:
            self._messages.put(text, self._heard_at, self._socket.underlying_transport)

    def _on_message(self, text: bytes, message: Message | ProtocolError) -> None:
        connection = self._connection
        assert connection is not None, "messages are handled once the node has joined"
        self._services.node_registry.seen(connection)
        if isinstance(message, ProtocolError):
            log.debug("node %s: ignored a frame of %d bytes: %s", connection.node_id, len(text), message)
            if isinstance(message.__context__, UnicodeError):
                self.close(1007, "a text frame is UTF-8")
            elif may_be_response(text):
                request_id = readable_request_id(text)
                if connection.resume is None or (request_id is not None and self._services.gate.is_open(request_id)):
                    self._services.gate.node_calls.answered_unreadably(connection, request_id, str(message))
        elif self._services.relay is not None and self._services.relay.pass_on(connection, text, message):
            return  # it is for another gateway
        elif self._services.handle(connection, message):
            return
        elif isinstance(message, Ping):
            self._pong(picows.WSMsgType.TEXT, encode(Pong(message.timestamp)))
        elif isinstance(message, ToolsUpdate) and len(text) <= MAX_HELLO_BYTES:
            self._update(connection, message)

    def _update(self, connection: Connection, update: ToolsUpdate) -> None:
        """Apply an update of a node's tools. If updates arrive too fast, only the newest is applied.

        The pause after an update is a multiple of its cost, so that a node cannot block others with updates.
        """
        if self._resting is not None:
            self._newest_update = update
            return
        began = time.perf_counter()
        self._services.inventory.update(connection, update)
        pause = max(UPDATE_PAUSE_SECONDS, UPDATE_REST * (time.perf_counter() - began))
        self._resting = asyncio.get_running_loop().call_later(pause, self._rested, connection)

    def _rested(self, connection: Connection) -> None:
        self._resting = None
        update, self._newest_update = self._newest_update, None
        if update is not None and self._socket is not None:
            self._update(connection, update)

    def _pong(self, kind: picows.WSMsgType, payload: bytes) -> None:
        """Answer a ping. A peer that does not read gets only the newest answer (RFC 6455, 5.5.3), since others would
        accumulate here.
        """
        if self._full:
            self._owed[kind] = payload
        elif kind == picows.WSMsgType.TEXT:
            self.send(payload)
        elif self._socket is not None:
            self._socket.send(kind, payload)

    def _greet_in_turn(self, text: bytes) -> None:
        """Handle a hello at once, or after others with the same credential if it is long, since long ones take time."""
        if self._greeting is not None:
            return  # a hello is already queued
        now = asyncio.get_running_loop().time()
        turn = max(now, self._services.next_long_hello.get(self._grant.token_id, 0.0))
        if len(text) <= LONG_HELLO_BYTES:
            self._greet(text)
            return
        if turn - now > HELLO_SECONDS:
            self.close(CLOSE_BUSY, "too many nodes connect with this token; try again later")
            return
        self._services.next_long_hello[self._grant.token_id] = turn + LONG_HELLO_SECONDS
        self._greeting = asyncio.get_running_loop().call_at(turn, self._greet_now, text)

    def _greet_now(self, text: bytes) -> None:
        self._greeting = None
        if self._socket is not None:
            self._greet(text)

    def _greet(self, text: bytes) -> None:
        """Handle the hello. Other messages before it are ignored; an unacceptable hello closes the socket."""
        try:
            if len(text) > MAX_HELLO_BYTES:
                raise HelloRefused(1009, f"the hello is longer than {MAX_HELLO_BYTES} bytes")
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
                    raise HelloRefused(
                        CLOSE_UNAUTHORIZED, "a node that presents a key must first prove that it owns it"
                    )
                if not self._services.credentials.still_grants(self._grant):
                    raise HelloRefused(CLOSE_UNAUTHORIZED, "this node's token was revoked, or is too old")
                if self._services.relay is not None and self._services.gate.closing:
                    raise HelloRefused(CLOSE_RESTART, "the gateway is stopping; connect to another one")
                named = self._services.credentials.named_nodes
                card = self._services.node_registry.examine(
                    hello, self._grant.node_id, own_credential=self._grant.token_id is not None, named=named
                )
                if self._grant.anonymous and self._services.credentials.has_own_token(card.node_id):
                    reason = f"node {card.node_id!r} has its own token; the shared token is not accepted for it"
                    raise HelloRefused(CLOSE_UNAUTHORIZED, reason)
                if self._grant.anonymous and self._services.credentials.was_revoked(card.node_id):
                    reason = f"the token of node {card.node_id!r} was revoked; `farhand token create --node` makes one"
                    raise HelloRefused(CLOSE_UNAUTHORIZED, reason)
                known = self._services.node_registry.nodes.get(card.node_id)
                if known is not None and not known.may_join(asyncio.get_running_loop().time()):
                    raise HelloRefused(CLOSE_BUSY, f"node {card.node_id!r} connects too often; try again later")
                if card.node_id in named:
                    # `a:b/c` must mean a path on this node, which the owner named, and not one on a node `a:b`.
                    reason = f"this id begins with the node id {card.node_id!r} and a colon; use another one"
                    self._services.inventory.dismiss(self._services.node_registry.below(card.node_id, named), reason)
                self.send(encode(self._services.inventory.welcome(hello)))
                self._connection = self._services.inventory.join(card, hello, self, self._grant.token_id)
                self._longest_message = MAX_PLAIN_FRAME_BYTES if self._connection.plain else MAX_FRAME_BYTES
                self._watch()
        except HelloRefused as refused:
            log.warning("a node was refused: %s", refused)
            self.close(refused.code, str(refused))

    def _prove(self, challenge: GatewayChallenge, proof: NodeProof) -> None:
        """Verify the proof of a key. There is one attempt: the challenge is valid for this connection only."""
        assert self._grant.public_key is not None
        node_id = self._grant.node_id or ""
        if not proves(self._grant.public_key, challenge, node_id, proof):
            self._failed()
            raise HelloRefused(CLOSE_UNAUTHORIZED, f"the signature is not that of node {node_id!r}")
        self._challenge = None

    def _watch(self) -> None:
        """Ping a silent node; close the connection if it does not answer, or its token has ended."""
        if not self._services.credentials.still_grants(self._grant):
            self.close(CLOSE_UNAUTHORIZED, "this node's token has expired")
            return
        silent = time.monotonic() - self._heard_at
        look, wait = self._liveness.check(silent)
        if look is LivenessAction.GIVE_UP:
            log.warning("a node has been silent for %.0f s", silent)
            self.close(CLOSE_SILENT, "silent for too long")
            return
        if look is LivenessAction.PING:
            self.send(encode(Ping(time.time_ns() // 1_000_000)))
        if self._grant.expires_at is not None:
            wait = min(wait, max(0.0, (self._grant.expires_at - self._services.node_registry.clock()) / 1000) + 0.01)
        self._set_timer(wait, self._watch)

    def _set_timer(self, seconds: float, action: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action)


def _plain_descriptor(transport: asyncio.Transport) -> int:
    """Return the descriptor for direct writes while the transport's buffer is empty; -1 under TLS."""
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None or not hasattr(os, "writev"):
        return -1
    descriptor: int = connection.fileno()
    return descriptor


def _framed(payloads: list[bytes]) -> Iterator[bytes]:
    """Yield unmasked text frames, as a server sends them (RFC 6455, 5.2); picows cannot send several at once."""
    for payload in payloads:
        yield _head(0x81, len(payload))
        yield payload


def _head(first: int, size: int) -> bytes:
    if size < 126:
        return bytes((first, size))
    if size < 65536:
        return b"%c\x7e" % first + size.to_bytes(2)
    return b"%c\x7f" % first + size.to_bytes(8)


def _fitting(reason: str) -> bytes:
    """Cut the reason of a close frame to 123 bytes."""
    return reason.encode()[:123].decode(errors="ignore").encode()
