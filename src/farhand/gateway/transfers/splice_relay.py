"""Two connections of a long transfer, from its sender and to its receiver, and the thread that moves its bytes.

On the node sockets a file's bytes would be handled by the loops that answer calls, and calls would wait behind them.
Here the kernel moves them from one connection to the other, unread; what they are is between the two ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from farhand.gateway.transfers.relay import Role
from farhand.machine.priority import lower_thread_priority
from farhand.machine.socket_options import RESET_ON_CLOSE, limit_buffers_on_fast_links
from farhand.protocol.version import MIB

log = logging.getLogger(__name__)

CAN_CARRY: Final = hasattr(os, "splice")
ARRIVE_SECONDS: Final = 5.0
# What the sender hears when its connection is used; one that is not is closed.
GO: Final = b"\x01"


class Carriage:
    """Of one try of one transfer. Whoever made it calls `close`."""

    def __init__(self, broke: Callable[[], None]) -> None:
        """`broke` is told that a connection ended before `close`, or was not used as agreed."""
        self.tickets: dict[Role, str] = {"send": secrets.token_urlsafe(24), "receive": secrets.token_urlsafe(24)}
        self.broke = broke
        self._ends: dict[Role, asyncio.Future[socket.socket]] = {}
        # Bytes are moved, or were.
        self.carrying = False
        self._closed = False

    def expect(self, role: Role) -> Callable[[socket.socket | None], None]:
        """Somebody came with this ticket. What is returned is to be given the connection, or None if it was lost."""
        coming = self._ends[role] = asyncio.get_running_loop().create_future()

        def arrived(end: socket.socket | None) -> None:
            if end is None:
                coming.cancel()
            elif self._closed or coming.done():
                end.close()
            else:
                end.setblocking(True)
                limit_buffers_on_fast_links(end)
                coming.set_result(end)

        return arrived

    def expects(self, role: Role) -> bool:
        return role in self._ends

    async def start(self) -> bool:
        """Whether both connections are there, and bytes are moved from now on."""
        if len(self._ends) == 2:
            await asyncio.wait(self._ends.values(), timeout=ARRIVE_SECONDS)
        if self._closed or len(self._arrived()) < 2:
            self.close()
            return False
        ends = self._ends["send"].result(), self._ends["receive"].result(), asyncio.get_running_loop()
        try:
            threading.Thread(target=self._carry, args=ends, name="farhand-carriage", daemon=True).start()
        except RuntimeError as error:
            log.warning("a transfer goes by the node sockets: %s", error)
            self.close()
            return False
        self.carrying = True
        return True

    def close(self) -> None:
        self._closed = True
        for end in self._arrived():
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            if not self.carrying:
                end.close()

    def _arrived(self) -> list[socket.socket]:
        return [each.result() for each in self._ends.values() if each.done() and not each.cancelled()]

    def _carry(self, source: socket.socket, sink: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        lower_thread_priority()
        try:
            _move(source, sink)
        except OSError as error:
            log.debug("a connection for the bytes of a transfer ended: %s", error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._over, source, sink)

    def _over(self, source: socket.socket, sink: socket.socket) -> None:
        source.close()
        sink.close()
        if not self._closed:
            self._closed = True
            self.broke()


def _move(source: socket.socket, sink: socket.socket) -> None:
    """Until the source ends. Raises OSError."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a small pipe will do
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, MIB)
        source.sendall(GO)
        events = select.poll()
        events.register(source, select.POLLIN)
        events.register(sink, select.POLLRDHUP)
        while True:
            if any(each == sink.fileno() for each, _ in events.poll()):
                raise ConnectionResetError("the receiver hung up")
            if not (count := os.splice(source.fileno(), writing, MIB)):
                return
            while count:
                count -= os.splice(reading, sink.fileno(), count)
    finally:
        os.close(reading)
        os.close(writing)
