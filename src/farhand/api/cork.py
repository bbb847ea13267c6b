"""uvicorn's HTTP protocol with one write for each answer, and a limit to what comes before a body.

uvicorn writes the head of an answer and its body apart, and each write is a system call that wakes the client. A head
is held until its body comes, or until the loop comes round.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 86\r\n\r\n"
    b'{"error":{"code":"too_large","message":"a request head has at most 65536 bytes here"}}'
)


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()
