"""Reading a connection a little at a time while a file comes through it."""

from __future__ import annotations

import asyncio
from typing import cast

SIP_BYTES = 256 * 1024
SIPS_END_BYTES = 1024 * 1024


class Sips(asyncio.BufferedProtocol):
    """Stands before a connection's own protocol while a file comes through, and has it read a little at a time.

    picows takes in all there is, some megabytes, and handles every frame of it in one turn of the loop, and the loop
    reads on as long as there is more; calls would wait for all of it. Once no more of a file comes, it steps aside.
    """

    def __init__(self, transport: asyncio.Transport, inner: asyncio.BufferedProtocol) -> None:
        self._transport = transport
        self._inner = inner
        # Bytes since the last frame of a file.
        self.read = 0
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
