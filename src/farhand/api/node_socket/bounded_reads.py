"""Reads a connection in bounded pieces while a file arrives through it."""

from __future__ import annotations

import asyncio
from typing import cast

READ_BYTES = 256 * 1024
# Bytes without a frame of a file after which the transfer counts as over.
IDLE_BYTES = 1024 * 1024


class BoundedReads(asyncio.BufferedProtocol):
    """Wraps a connection's own protocol while a file arrives, and yields to other connections after each read.

    picows reads all that has arrived, some megabytes, and handles every frame of it in one turn of the event loop, and
    the loop continues while there is more. Calls would wait for all of it: beside a transfer their p99 is several times
    as long. Once no more of a file arrives, the wrapper removes itself.
    """

    def __init__(self, transport: asyncio.Transport, inner: asyncio.BufferedProtocol) -> None:
        self._transport = transport
        self._inner = inner
        # Bytes since the last frame of a file; set to 0 with each of them.
        self.read = 0
        self.over = False

    @classmethod
    def begin(cls, transport: asyncio.Transport) -> BoundedReads:
        reads = cls(transport, cast(asyncio.BufferedProtocol, transport.get_protocol()))
        transport.set_protocol(reads)
        return reads

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._inner.get_buffer(sizehint))[:READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes >= READ_BYTES and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)
        self.read += nbytes
        self._inner.buffer_updated(nbytes)
        if self.read > IDLE_BYTES and not self.over:
            self.over = True
            self._transport.set_protocol(self._inner)

    def _resume(self) -> None:
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
