"""The server's HTTP connections, on the parser of httptools; uvicorn accepts them and ends them when the server stops.

uvicorn's own protocol takes three times as long for a request, and an application behind it sees a request only after
its head was parsed. This module therefore also enforces the limits for peers that have not presented a credential: the
size of the request head (431) and of trailers, deadlines for head and body, and the number of connections of each
address (`connection_limits`). tests/integration/http/test_connections.py checks each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final
from urllib.parse import unquote

import httptools

from farhand.api.server.connection_limits import HEAD_SECONDS, REQUEST_SECONDS, ConnectionLimits
from farhand.api.server.guard import ADMITTED, AUTHORITY
from farhand.api.server.http import Problem, Scope, complete_answer, new_request_id
from farhand.api.server.http_exchange import HttpExchange

log = logging.getLogger(__name__)

# Maximum size of a request head, and of everything else that is not body: trailers and chunk extensions.
MAX_HEAD_BYTES: Final = 64 * 1024
# Maximum unread bytes of a body; beyond that the client has to wait.
MAX_UNREAD_BYTES: Final = 64 * 1024
KEEP_ALIVE_SECONDS: Final = 5.0
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    """One connection. It is limited until one of its requests is authenticated."""

    def __init__(self, *, config: Any, server_state: Any, limits: ConnectionLimits, **options: Any) -> None:
        """`config`, `server_state` and `options` are uvicorn's."""
        self._options = {"config": config, "server_state": server_state, **options}
        self._serve = config.loaded_app
        self._socket_protocol = config.ws_protocol_class
        self._state = server_state
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        # A request behind one with `Connection: close` is ignored, not an error that hides the answer to the first.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._transport: asyncio.Transport
        self._scheme = "http"
        self._client: tuple[str, int] | None = None
        # Set while no request of this connection has been authenticated.
        self._deadline: asyncio.TimerHandle | None = None
        # The request whose head was parsed last, the one that is being answered, and those that wait for it.
        self._latest: HttpExchange | None = None
        self._serving: HttpExchange | None = None
        self._waiting: deque[tuple[Scope, HttpExchange]] = deque()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        # Whether the client wants to go on after the latest request.
        self._keep_alive = True
        # The latest request asks for a WebSocket, and is not behind one that is not answered yet.
        self._upgrading = False
        # Bytes received since the last complete head or piece of a body.
        self._unframed_bytes = 0
        self._unread_bytes = 0
        self._in_head = True
        self._reading = True
        self._writable: asyncio.Future[None] | None = None
        # When the connection became idle, and whether a part of a request has arrived since. One timer checks them, so
        # that no timer is set for each request.
        self._idle_since: float | None = None
        self._begun = False
        self._idle_timer: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._state.connections.add(self)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._deadline = self._loop.call_later(HEAD_SECONDS, self.drop)
        self._limits.add(self, self._client[0] if self._client else "")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lift_limits()
        self._limits.release(self)
        self._state.connections.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.resume_writing()
        self._waiting.clear()
        for exchange in (self._serving, self._latest):
            if exchange is not None:
                exchange.client_left()
        self._parser = None

    def shutdown(self) -> None:
        """Close the connection, since the server stops; a request is answered first."""
        if self._latest is None or self._latest.answered:
            self._transport.close()
        else:
            self._keep_alive = self._latest.keep_alive = False

    def drop(self) -> None:
        """Close the connection at once."""
        self._lift_limits()
        self._transport.abort()

    def _lift_limits(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._limits.remove(self)

    def _admit(self, token_id: str | None) -> None:
        """Lift the limits of strangers, as a request is authenticated; the limit of its token is in force instead."""
        self._lift_limits()
        if token_id is not None and not self._limits.hold(self, token_id) and self._serving is not None:
            self._serving.keep_alive = False

    def _restart_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = self._loop.call_later(seconds, self.drop)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return  # it is set again after the next answer
        # A part of a request, or the rest of a body that is not read, does not keep a connection open for good.
        allowed = REQUEST_SECONDS if self._begun else KEEP_ALIVE_SECONDS
        left = self._idle_since + allowed - self._loop.time()
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._check_idle)
        else:
            self._transport.close()

    # -- reading ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unframed_bytes += len(data)
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._upgrading:
                self._upgrade()
        except httptools.HttpParserError:
            self._refuse_unparsable()
        if self._unframed_bytes > MAX_HEAD_BYTES and not self._transport.is_closing():
            # The parser collects the name and value of a header piece by piece, which takes quadratic time.
            if self._in_head and self._pending is not None:
                self._pending.keep_alive = False
                self._pause()
            elif self._in_head:
                self._refuse(Problem(431, "too_large", f"the request head exceeds {MAX_HEAD_BYTES} bytes"))
            else:
                self.drop()

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._expects_continue = False
        if self._deadline is not None:
            self._restart_deadline(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers would be appended to the headers after the guard has checked them.
        if self._in_head:
            # The parser strips leading whitespace only (RFC 9110, section 5.5).
            name, value = name.lower(), value.rstrip(b" \t")
            self._headers.append((name, value))
            if name == b"expect":
                self._expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._idle_since = None
        self._unframed_bytes = 0
        if self._deadline is not None:
            self._restart_deadline(REQUEST_SECONDS)
        parser = self._parser
        upgrade = parser.should_upgrade()
        # The answers to requests before it would get among the frames of the socket.
        self._upgrading = upgrade and self._pending is None and self._wants_socket()
        if self._upgrading:
            self._latest = None
            return
        url = self._url
        if url.startswith(b"/") and b"#" not in url:
            path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            path, query = parsed.path, parsed.query or b""
        text = path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "method": parser.get_method().decode("ascii"),
            "path": unquote(text) if "%" in text else text,
            "query_string": query,
            "headers": self._headers,
            "scheme": self._scheme,
            "client": self._client,
        }
        scheme, separator, rest = url.partition(b"://")
        if separator and b"/" not in scheme:
            scope[AUTHORITY] = rest.partition(b"/")[0]
        if self._deadline is not None:
            scope[ADMITTED] = self._admit
        # What follows a request for another protocol may be of that protocol.
        self._keep_alive = parser.should_keep_alive() and parser.get_http_version() != "1.0" and not upgrade
        # A client that waits for leave to send its body sends another request instead if it is refused (RFC 9110,
        # section 10.1.1), which must not be taken for the body.
        exchange = HttpExchange(self, keep_alive=self._keep_alive and not self._expects_continue)
        before, self._latest = self._pending, exchange
        self._unread_bytes = 0
        if before is None:
            self._start(scope, exchange)
        else:
            self._pause()
            self._waiting.append((scope, exchange))

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        exchange = self._pending
        if exchange is not None:
            self._unread_bytes += len(body)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._pause()
            exchange.add(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        exchange = self._pending
        if exchange is not None:
            if self._expects_continue:
                self._expects_continue = False
                exchange.keep_alive = self._keep_alive
            exchange.end()

    @property
    def _pending(self) -> HttpExchange | None:
        """Return the latest request, unless it is answered."""
        return None if self._latest is None or self._latest.answered else self._latest

    def _wants_socket(self) -> bool:
        headers = dict(self._headers)
        tokens = [token.strip() for token in headers.get(b"connection", b"").lower().split(b",")]
        return b"upgrade" in tokens and headers.get(b"upgrade", b"").lower() == b"websocket"

    def _upgrade(self) -> None:
        """Give the connection to the protocol for WebSockets, which reads the request once more."""
        self._lift_limits()  # it limits its own unauthenticated connections
        self._limits.release(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._state.connections.discard(self)
        head = [b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), self._url)]
        head += [b"%b: %b\r\n" % header for header in self._headers]
        protocol = self._socket_protocol(**self._options)
        protocol.connection_made(self._transport)
        protocol.data_received(b"".join([*head, b"\r\n"]))
        self._transport.set_protocol(protocol)

    def _refuse_unparsable(self) -> None:
        """Refuse what cannot be parsed. Complete requests before it are answered first; then the connection closes."""
        pending = self._pending
        if pending is not None and not pending.complete and self._waiting:
            self._waiting.pop()
            self._latest = pending = self._waiting[-1][1] if self._waiting else self._serving
        if pending is not None and pending.complete:
            pending.keep_alive = False
        elif pending is not None and pending.started:
            self._transport.close()
        else:
            self._refuse(Problem(400, "invalid_request", "not a valid, unambiguous HTTP/1.1 request"))

    def _refuse(self, problem: Problem) -> None:
        self._transport.write(complete_answer(problem.reply(), new_request_id(), self.default_headers, close=True))
        self._transport.close()

    def _pause(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _resume(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    # -- serving ------------------------------------------------------------------------------------------

    def _start(self, scope: Scope, exchange: HttpExchange) -> None:
        self._serving = exchange
        # An explicit name: generating the default one takes as long as the rest of creating a task.
        exchange.task = self._loop.create_task(self._run(scope, exchange), name="http")
        self._state.tasks.add(exchange.task)

    async def _run(self, scope: Scope, exchange: HttpExchange) -> None:
        try:
            await self._serve(scope, exchange)
        except Exception:
            log.exception("%s %s failed while it was answered", scope["method"], scope["path"])
        finally:
            self._state.tasks.discard(exchange.task)
            if not exchange.answered:
                self._transport.close()

    def accept_body(self) -> None:
        """Read on, and tell a client that waits for it to send the body."""
        self._unread_bytes = 0
        if self._expects_continue:
            self._expects_continue = False
            if self._latest is not None:
                self._latest.keep_alive = self._keep_alive
            self._transport.write(CONTINUE)
        self._resume()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every answer."""
        headers: list[tuple[bytes, bytes]] = self._state.default_headers
        return headers

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has read most of what was written."""
        if self._writable is not None:
            await self._writable

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def answered(self, exchange: HttpExchange) -> None:
        """Go on with the next request, or close the connection."""
        if self._transport.is_closing():
            return
        if not exchange.keep_alive:
            self._transport.close()
            return
        self._resume()
        if self._waiting:
            self._start(*self._waiting.popleft())
            return
        self._idle_since = self._loop.time()
        self._begun = not exchange.complete
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._check_idle)
