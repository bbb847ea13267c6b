"""The server's HTTP connections: uvicorn's protocol with limits for peers that have not presented a credential.

Adds to uvicorn: a size limit for the request head (431) and for trailers, deadlines for head and body and a number of
connections per address until a credential is presented (`connection_limits`), and refusals in the format of every other
error.

This subclasses a class that uvicorn does not document. An ASGI application sees a request only after its head was
parsed, and uvicorn has no setting for a slow or endless head, trailer or chunk extension. Writing a protocol on the
parser instead would repeat all of uvicorn's. So pyproject.toml bounds uvicorn's version from above, and
tests/integration/http/test_connections.py checks each limit.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from farhand.api.server.connection_limits import HEAD_SECONDS, REQUEST_SECONDS, ConnectionLimits
from farhand.api.server.guard import ADMITTED, AUTHORITY
from farhand.api.server.http import Problem, new_request_id

# Of a request head, and of whatever else of a request is no body: trailers and chunk extensions.
MAX_HEAD_BYTES = 64 * 1024
CLOSE = (b"connection", b"close")


class HttpConnection(HttpToolsProtocol):
    """One connection. It is limited until one of its requests is authenticated."""

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        # Set while no request of this connection has been authenticated.
        self._deadline: asyncio.TimerHandle | None = None
        # Bytes received since the last complete head or piece of a body.
        self._unframed_bytes = 0
        self._in_head = True

    # -- limits for unauthenticated connections -----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.drop)
        self._limits.add(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lift_limits()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def handle_websocket_upgrade(self) -> None:
        self._lift_limits()  # the node socket limits its own unauthenticated connections
        super().handle_websocket_upgrade()

    def drop(self) -> None:
        """Close the connection at once."""
        self._lift_limits()
        self.transport.abort()

    def _lift_limits(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._limits.remove(self)

    def _restart_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = self.loop.call_later(seconds, self.drop)

    # -- parsing ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unframed_bytes += len(data)
        super().data_received(data)
        if self._unframed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            # The parser collects the name and value of a header piece by piece, which takes quadratic time.
            if self._in_head:
                self._refuse(Problem(431, "too_large", f"the request head exceeds {MAX_HEAD_BYTES} bytes"))
            else:
                self.drop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is not None:
            self.scope[ADMITTED] = self._lift_limits  # type: ignore[literal-required]
            self._restart_deadline(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers would be appended to the headers after the guard has checked them.
        if self._in_head:
            # The parser strips leading whitespace only (RFC 9110, section 5.5).
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unframed_bytes = 0
        self._restart_deadline(REQUEST_SECONDS)
        scheme, separator, rest = self.url.partition(b"://")
        if separator and b"/" not in scheme:
            self.scope[AUTHORITY] = rest.partition(b"/")[0]  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse what cannot be parsed. A complete request before it is answered first; then the connection closes."""
        pending = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if pending is not None and not pending.more_body:
            pending.keep_alive = False
        elif pending is not None and pending.response_started:
            self.transport.close()
        else:
            self._refuse(Problem(400, "invalid_request", "not a valid, unambiguous HTTP/1.1 request"))

    def _refuse(self, problem: Problem) -> None:
        answer = problem.reply().to_bytes(new_request_id(), [*self.server_state.default_headers, CLOSE])
        self.transport.write(answer)
        self.transport.close()
