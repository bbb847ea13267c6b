"""One HTTP request and its answer, between the connection that parses it and the guard that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farhand.api.server.http_protocol import HttpConnection


class ClientLeft(Exception):
    """The client closed the connection before the end of its request."""


class HttpExchange:
    """A request whose head was read. Its body may still arrive."""

    __slots__ = (
        "_arrived",
        "_connection",
        "_gone",
        "_parts",
        "_watchers",
        "answered",
        "complete",
        "keep_alive",
        "left",
        "started",
        "task",
    )

    def __init__(self, connection: HttpConnection, *, keep_alive: bool) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._arrived: asyncio.Future[None] | None = None
        self._gone: list[asyncio.Future[None]] = []
        self._watchers: list[Callable[[], None]] = []
        # What serves it.
        self.task: asyncio.Task[None] | None = None
        # The connection stays open after the answer.
        self.keep_alive = keep_alive
        # The whole body has arrived.
        self.complete = False
        # A part of the answer was written.
        self.started = False
        # The whole answer was written.
        self.answered = False
        # The client closed the connection before that.
        self.left = False

    # -- the request --------------------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """Return what has arrived of the body since the last time; waits for more unless it is `complete`.

        Raises ClientLeft.
        """
        if not self.complete and not self._parts and not self.left:
            self._arrived = asyncio.get_running_loop().create_future()
            self._connection.accept_body()
            await self._arrived
        return self.take()

    def take(self) -> bytes:
        """Return what has arrived of the body since the last time. Raises ClientLeft."""
        if self.left:
            raise ClientLeft
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def gone(self) -> None:
        """Return once the client has left or was answered."""
        if not self.left and not self.answered:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._gone.append(future)
            await future

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` if the client leaves before it is answered; soon, if it has left."""
        if self.left:
            asyncio.get_running_loop().call_soon(left)
        else:
            self._watchers.append(left)

    def unwatch(self, left: Callable[[], None]) -> None:
        if left in self._watchers:
            self._watchers.remove(left)

    # -- the answer ---------------------------------------------------------------------------------------

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._connection.default_headers

    async def send(self, data: bytes) -> None:
        """Write a part of the answer, and wait while the client does not read."""
        self.started = True
        if not self.left:
            self._connection.write(data)
            await self._connection.drain()

    def finish(self, data: bytes = b"") -> None:
        """Write the last part of the answer."""
        self.started = True
        if not self.left:
            if data:
                self._connection.write(data)
            self.answered = True
            self._release()
            self._connection.answered(self)

    # -- for the connection -------------------------------------------------------------------------------

    def add(self, part: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(part)
        self._wake()

    def end(self) -> None:
        """Note that the body is complete."""
        self.complete = True
        self._wake()

    def client_left(self) -> None:
        if self.answered:
            return
        self.left = True
        self._wake()
        self._release()
        watchers, self._watchers = self._watchers, []
        for left in watchers:
            left()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _release(self) -> None:
        for future in self._gone:
            if not future.done():
                future.set_result(None)
        self._gone.clear()
