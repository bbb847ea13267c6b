"""One connection to a gateway: frames in, frames out, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Mapping

import picows

from farhand.protocol.version import (
    CLOSE_BAD_HELLO,
    CLOSE_NOT_ALLOWED,
    CLOSE_REPLACED,
    CLOSE_UNAUTHORIZED,
    CLOSE_VERSION,
    MAX_FRAME_BYTES,
)
from farhand.sdk.errors import Refused

CONNECT_SECONDS = 10.0
TCP_CORK: int | None = getattr(socket, "TCP_CORK", None)

# File bytes that may wait in the socket's buffer: later frames, such as a response, wait behind them.
WRITE_AHEAD_BYTES = 256 * 1024
UNSENT_BYTES = 128 * 1024
FRAME_RESERVE = 14

FATAL_CLOSES = frozenset({CLOSE_BAD_HELLO, CLOSE_UNAUTHORIZED, CLOSE_NOT_ALLOWED, CLOSE_VERSION})


# The refusal of a SerialAgent gateway for a token outside the query. Farhand sends the same with an X-Request-Id.
NO_TOKEN_IN_QUERY = "invalid or missing node token"  # noqa: S105

log = logging.getLogger(__name__)


class TokenHeaderIgnored(Refused):
    """A gateway other than Farhand refused the token: it reads tokens only from the query."""


class LinkLost(Exception):
    """The connection failed or ended; another attempt may succeed."""

    def __init__(self, reason: str, *, replaced: bool = False) -> None:
        super().__init__(reason)
        self.replaced = replaced


class GatewayLink(picows.WSListener):
    """A connection made by `GatewayLink.connect`. Text frames go to `on_text`, binary ones to `on_frame`.

    The argument of `on_frame` is valid until it returns. `ended` is set to the reason once the link has ended. The
    caller of `connect` calls `close`.
    """

    def __init__(
        self, on_text: Callable[[GatewayLink, bytes], None], on_frame: Callable[[memoryview], None] | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[LinkLost | Refused] = loop.create_future()
        self.heard_at = loop.time()
        self.on_text = on_text
        self.on_frame = on_frame
        self._room = asyncio.Event()
        self._room.set()
        self.welcomed = False
        self.url = ""
        self._time = loop.time
        self._call_soon = loop.call_soon
        self._sent_this_turn = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._text = True
        self._transport: picows.WSTransport | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        on_text: Callable[[GatewayLink, bytes], None],
        on_frame: Callable[[memoryview], None] | None = None,
    ) -> GatewayLink:
        """Connect. Raises Refused if the gateway rejects the node permanently, LinkLost for temporary failures."""
        dialled: list[socket.socket] = []
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await picows.ws_connect(
                    lambda: cls(on_text, on_frame),
                    url,
                    ssl_context=tls,
                    extra_headers=dict(headers),
                    max_frame_size=MAX_FRAME_BYTES,
                    max_redirects=0,
                    websocket_handshake_timeout=None,
                    socket_factory=lambda parsed: _dial(parsed.host, parsed.port, dialled),
                    logger_name=_wire_log(),
                )
        except asyncio.CancelledError:
            _hang_up(dialled)
            raise
        except picows.WSInvalidStatusError as error:
            raise _refusal(error) from None
        except ssl.SSLCertVerificationError as error:
            raise Refused(f"the gateway's certificate is not trusted: {error.verify_message}") from None
        except TimeoutError:
            _hang_up(dialled)
            raise LinkLost(f"no connection within {CONNECT_SECONDS:.0f} s") from None
        except socket.gaierror as error:
            raise LinkLost(
                f"the host name cannot be resolved ({error.strerror}); check the gateway's address"
            ) from None
        except ConnectionRefusedError:
            raise LinkLost("connection refused; check the port, and that the gateway is running") from None
        except (OSError, picows.WSError) as error:
            raise LinkLost(str(error) or type(error).__name__) from None
        if link is None:  # lost in the middle of the handshake
            raise LinkLost("the connection was lost before it was open")
        if not isinstance(link, cls):
            raise LinkLost("the gateway closed the connection before it answered")
        link.url = url
        return link

    def send(self, frame: bytes) -> None:
        """Queue a text frame; on a link that has ended it is dropped."""
        if self._transport is None or self._transport.is_disconnected:
            return
        # Frames after the first of a loop iteration are corked until its end: each packet wakes the gateway.
        if self._sent_this_turn == 0:
            self._call_soon(self._end_turn)
        elif self._sent_this_turn == 1:
            self._cork(1)
        self._sent_this_turn += 1
        self._transport.send(picows.WSMsgType.TEXT, frame)

    def send_frame(self, frame: bytes | bytearray) -> None:
        """Queue a binary frame.

        The first `FRAME_RESERVE` bytes of a bytearray are reserved for the socket's own header, and its content is
        undefined afterwards.
        """
        if self._transport is None or self._transport.is_disconnected:
            return
        if isinstance(frame, bytearray):
            self._transport.send_reuse_external_bytearray(picows.WSMsgType.BINARY, frame, FRAME_RESERVE)
        else:
            self._transport.send(picows.WSMsgType.BINARY, frame)

    async def writable(self) -> None:
        """Wait until most of what was sent has left the buffer; return at once on a link that has ended."""
        if not self._room.is_set():
            await self._room.wait()

    def _end_turn(self) -> None:
        if self._sent_this_turn > 1:
            self._cork(0)
        self._sent_this_turn = 0

    def _cork(self, on: int) -> None:
        if TCP_CORK is not None and self._transport is not None:
            connection = self._transport.underlying_transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, TCP_CORK, on)

    def drop(self, reason: str) -> None:
        """End the link without a closing handshake: the other side does not respond."""
        self._finish(LinkLost(reason))
        if self._transport is not None:
            self._transport.disconnect(False)

    async def close(self) -> None:
        """Close the connection and wait briefly for the other side's closing frame."""
        if self._transport is None or self._transport.is_disconnected:
            return
        self._transport.send_close(picows.WSCloseCode.GOING_AWAY, b"node is shutting down")
        try:
            async with asyncio.timeout(1):
                await self._transport.wait_disconnected()
        except TimeoutError:
            self._transport.disconnect(False)
        except picows.WSError as error:
            log.debug("invalid last frame from the gateway: %s", error)

    # -- called by picows -------------------------------------------------------------------------------

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._transport = transport
        transport.underlying_transport.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        keep_unsent_low(transport.underlying_transport)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        self.heard_at = self._time()
        kind = frame.msg_type
        if kind == picows.WSMsgType.TEXT and frame.fin and frame.payload_size <= MAX_FRAME_BYTES:
            self._parts.clear()
            self.on_text(self, frame.get_payload_as_bytes())
        elif kind == picows.WSMsgType.CLOSE:
            payload = frame.get_payload_as_bytes()
            code = int.from_bytes(payload[:2]) if len(payload) >= 2 else 1005
            self._finish(_ending(code, payload[2:], welcomed=self.welcomed))
            transport.send_close(picows.WSCloseCode.OK)
            transport.disconnect()
        elif kind == picows.WSMsgType.BINARY and frame.fin:
            self._parts.clear()
            if self.on_frame is not None:
                self.on_frame(frame.get_payload_as_memoryview())
        elif kind in (picows.WSMsgType.TEXT, picows.WSMsgType.BINARY, picows.WSMsgType.CONTINUATION):
            if kind != picows.WSMsgType.CONTINUATION:
                self._text = kind == picows.WSMsgType.TEXT
                self._parts.clear()
                self._size = 0
            self._parts.append(frame.get_payload_as_bytes())
            self._size += len(self._parts[-1])
            if self._size > MAX_FRAME_BYTES:
                self.drop(f"the gateway sent a message of more than {MAX_FRAME_BYTES} bytes")
            elif frame.fin:
                message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                if self._text:
                    self.on_text(self, message)
                elif self.on_frame is not None:
                    self.on_frame(memoryview(message))

    def on_ws_disconnected(self, _transport: picows.WSTransport) -> None:
        self._finish(LinkLost("the connection was lost"))

    def _finish(self, end: LinkLost | Refused) -> None:
        self._room.set()
        if not self.ended.done():
            self.ended.set_result(end)


def keep_unsent_low(transport: asyncio.BaseTransport) -> None:
    """Limit unsent bytes in the kernel, so that on a slow line a response does not wait behind a file."""
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if connection is not None and option is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


async def _dial(host: str, port: int, dialled: list[socket.socket]) -> socket.socket:
    """Return a connected socket, also added to `dialled`: picows loses it if the upgrade is abandoned."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in addresses:
        try:
            candidate = socket.socket(family, kind, protocol)
            try:
                candidate.setblocking(False)
                # An address that does not respond, as with broken IPv6, leaves time for the others.
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    await loop.sock_connect(candidate, address)
            except BaseException:
                candidate.close()
                raise
        except OSError as error:
            failure = error
            continue
        dialled.append(candidate)
        return candidate
    raise failure


def _hang_up(dialled: list[socket.socket]) -> None:
    # The transport that owns the socket notices and closes it; closing it here would leave the transport broken.
    for connected in dialled:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)


def _wire_log() -> logging.Logger:
    """Return a logger that hides picows' debug output, which contains the token."""
    wire = log.getChild("wire")
    wire.setLevel(logging.WARNING)
    return wire


def _refusal(error: picows.WSInvalidStatusError) -> Refused | LinkLost:
    status = int(error.response.status) if error.response else 0
    text = (error.raw_body or b"").decode(errors="replace").strip()[:200]
    reason = f"the gateway answered HTTP {status}" + (f": {text}" if text else "")
    names = {str(name).lower() for name in error.response.headers} if error.response else set()
    if status == 401 and text == NO_TOKEN_IN_QUERY and "x-request-id" not in names:
        return TokenHeaderIgnored(reason)
    if 400 <= status < 500 and status not in (408, 425, 429):
        return Refused(reason)
    return LinkLost(reason)


def _ending(code: int, message: bytes, *, welcomed: bool) -> LinkLost | Refused:
    reason = f"the gateway closed the connection ({code}" + (
        f": {message.decode(errors='replace')})" if message else ")"
    )
    if code == CLOSE_REPLACED:
        return LinkLost(reason, replaced=True)
    if code in FATAL_CLOSES or (code in (1002, 1008) and not welcomed):
        return Refused(reason)
    return LinkLost(reason)
