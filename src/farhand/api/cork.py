"""uvicorn's HTTP protocol with one write for each answer, a limit to what comes before a body, and our own refusals.

uvicorn writes the head of an answer and its body apart, and each write is a system call that wakes the client. A head
is held until its body comes, or until the loop comes round.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from farhand.api.http import Problem, new_request_id

MAX_HEAD_BYTES = 64 * 1024


class CorkedTransport:
    """A transport that writes the head of an answer together with what follows. The rest is the transport's own."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self._held = b""
        self._call_soon = asyncio.get_running_loop().call_soon

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            self.inner.write(held + data)
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._held = data
            self._call_soon(self._flush)
        else:
            self.inner.write(data)

    def close(self) -> None:
        self._flush()
        self.inner.close()

    def is_closing(self) -> bool:
        return self.inner.is_closing()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self.inner.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CorkedProtocol(HttpToolsProtocol):
    """On a corked transport; a request line and headers longer than `MAX_HEAD_BYTES` end the connection with 431."""

    _head_bytes = 0
    _in_head = True
    _between = True
    """The last request has come whole, and nothing of the next."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(Problem(431, "too_large", f"a request head has at most {MAX_HEAD_BYTES} bytes here"))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What cannot be parsed. A request before it that is whole is answered first, and its answer is the last."""
        asked = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if asked is not None and not asked.more_body:
            asked.keep_alive = False
        elif asked is not None and asked.response_started:
            self.transport.close()
        else:
            self._refuse(Problem(400, "invalid_request", "this is not a request of HTTP/1.1, or has two meanings"))

    def _refuse(self, problem: Problem) -> None:
        self.transport.write(problem.reply().whole(new_request_id(), self.server_state.default_headers, close=True))
        self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what follows a body is no header: whoever checked the head has not seen it
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = self._between = True
        super().on_message_complete()
