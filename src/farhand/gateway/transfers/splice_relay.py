"""Relay the bytes of a long transfer between two dedicated connections in a thread.

On the node sockets, the event loops that answer calls would also handle the bytes of files, and calls would wait behind
them. Here the kernel moves the bytes from one connection to the other, unread.
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
# Sent to the sender when its connection is used; an unused one is closed.
GO: Final = b"\x01"


class SpliceRelay:
    """The connections of one attempt of a transfer. Its creator calls `close`."""

    def __init__(self, broke: Callable[[], None]) -> None:
        """`broke` is called if a connection ends before `close` or violates the protocol."""
        self.tickets: dict[Role, str] = {"send": secrets.token_urlsafe(24), "receive": secrets.token_urlsafe(24)}
        self.broke = broke
        self._ends: dict[Role, asyncio.Future[socket.socket]] = {}
        # Whether bytes are moved, or were.
        self.carrying = False
        self._closed = False

    def expect(self, role: Role) -> Callable[[socket.socket | None], None]:
        """Reserve the connection of a role; the returned function takes the socket, or None if it was lost."""
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
        """Start to move bytes if both connections are present; return whether they are."""
        if len(self._ends) == 2:
            await asyncio.wait(self._ends.values(), timeout=ARRIVE_SECONDS)
        if self._closed or len(self._arrived()) < 2:
            self.close()
            return False
        ends = self._ends["send"].result(), self._ends["receive"].result(), asyncio.get_running_loop()
        try:
            threading.Thread(target=self._carry, args=ends, name="farhand-splice", daemon=True).start()
        except RuntimeError as error:
            log.warning("transfer uses the node sockets: %s", error)
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
            log.debug("a transfer connection ended: %s", error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._over, source, sink)

    def _over(self, source: socket.socket, sink: socket.socket) -> None:
        source.close()
        sink.close()
        if not self._closed:
            self._closed = True
            self.broke()


def _move(source: socket.socket, sink: socket.socket) -> None:
    """Move bytes until the source ends. Raises OSError."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the default pipe size works too
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, MIB)
        source.sendall(GO)
        events = select.poll()
        events.register(source, select.POLLIN)
        events.register(sink, select.POLLRDHUP)
        while True:
            if any(each == sink.fileno() for each, _ in events.poll()):
                raise ConnectionResetError("the receiver disconnected")
            if not (count := os.splice(source.fileno(), writing, MIB)):
                return
            while count:
                count -= os.splice(reading, sink.fileno(), count)
    finally:
        os.close(reading)
        os.close(writing)
