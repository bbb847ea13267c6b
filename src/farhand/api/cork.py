"""One write for each answer.

uvicorn writes the head of an answer and its body apart, and each write is a system call that wakes the client. Gathered
until the loop's next turn they are one: a tool call with 64 callers costs the gateway about a tenth less (see
docs/performance.md).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class CorkedTransport:
    """A transport that holds what is written until the loop comes round. Everything else is the transport's own."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self._held: list[bytes] = []
        self._call_soon = asyncio.get_running_loop().call_soon

    def write(self, data: bytes) -> None:
        if not self._held:
            self._call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self.inner.close()

    def is_closing(self) -> bool:
        return self.inner.is_closing()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self.inner.write(b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CorkedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on a corked transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]
