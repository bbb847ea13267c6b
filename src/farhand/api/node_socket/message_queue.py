"""Process the messages of a node's connection in order without blocking the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from farhand.api.server.large_bodies import LARGE_BYTES, beside_loop
from farhand.protocol.errors import ProtocolError
from farhand.protocol.messages import Message, decode

log = logging.getLogger(__name__)

# Time slice of one connection in one iteration of the loop.
TURN_SECONDS = 0.005
# Messages this close together arrived in one read, or in reads between which the loop did nothing else.
BURST_GAP_SECONDS = 0.0005

# Takes a raw message, and its decoded form or the decoding error.
Handle = Callable[[bytes, Message | ProtocolError], None]


class MessageQueue:
    """The message queue of one connection. While it is not empty, reading from the connection is paused.

    Most messages are handled at once. Those that follow a burst, or a message that is decoded in a thread, wait.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._waiting: deque[bytes | Callable[[], None]] = deque()
        self._draining: asyncio.Task[None] | None = None
        self._burst_began = 0.0
        self._last_ended = 0.0

    def put(self, text: bytes, came_at: float, transport: asyncio.Transport) -> None:
        """Handle a message that arrived at a time of the monotonic clock, now or after the waiting ones."""
        if self._draining is None:
            if came_at - self._last_ended > BURST_GAP_SECONDS:
                self._burst_began = came_at
            if len(text) < LARGE_BYTES and came_at - self._burst_began <= TURN_SECONDS:
                self._handle(text, _decoded(text))
                self._last_ended = time.monotonic()
                return
            self._draining = asyncio.get_running_loop().create_task(self._drain(transport))
        self._waiting.append(text)
        if not transport.is_closing():
            transport.pause_reading()

    def after(self, action: Callable[[], None]) -> None:
        """Run an action once all earlier messages are handled: now, if none waits."""
        if self._draining is None:
            action()
        else:
            self._waiting.append(action)

    def discard(self) -> None:
        """Drop the waiting messages."""
        self._waiting = deque(each for each in self._waiting if not isinstance(each, bytes))

    async def _drain(self, transport: asyncio.Transport) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)
                began = time.monotonic()
                while self._waiting and time.monotonic() - began < TURN_SECONDS:
                    await self._next()
        finally:
            self._draining = None
            if not transport.is_closing():
                transport.resume_reading()

    async def _next(self) -> None:
        waiting = self._waiting
        first = waiting.popleft()
        try:
            if not isinstance(first, bytes):
                first()
                return
            message = await beside_loop(len(first), partial(_decoded, first))
            if waiting is self._waiting:  # not discarded meanwhile
                self._handle(first, message)
        except Exception:
            log.exception("failed to handle a message from a node")


def _decoded(text: bytes) -> Message | ProtocolError:
    try:
        return decode(text)
    except ProtocolError as error:
        return error
