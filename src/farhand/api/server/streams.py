"""Long-running answers, and clients that disconnect before their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from farhand.api.server.http import Request

EVENT_STREAM = b"text/event-stream; charset=utf-8"
PULSE_SECONDS = 15.0
# Only longer work is watched for a disconnect; for shorter work a task is not worth its cost.
WATCH_SECONDS = 0.05


class ClientWatch:
    """Calls `left` when the client disconnects; starts to watch after a delay, since most calls have ended by then."""

    def __init__(self, request: Request, left: Callable[[], None]) -> None:
        self._request = request
        self._left = left
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._begin)

    def stop(self) -> None:
        self._timer.cancel()
        # A cancelled task keeps its frames and thereby this object: drop the callback and what it references.
        self._left = _nothing
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        await self._request.gone()
        self._left()


def _nothing() -> None:
    pass


async def until_gone(
    request: Request, pieces: AsyncGenerator[bytes, None], ending: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield `pieces` until they end, the client leaves or the gateway stops."""
    over = {asyncio.ensure_future(request.gone()), asyncio.ensure_future(ending.wait())}
    following: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(pieces, None))
            await asyncio.wait({following, *over}, return_when=asyncio.FIRST_COMPLETED)
            piece = following.result() if following.done() else None
            if piece is None:
                return
            yield piece
    finally:
        for waiting in over:
            waiting.cancel()
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})
        await pieces.aclose()


async def with_pulse(
    pieces: AsyncGenerator[bytes, None], seconds: float = PULSE_SECONDS
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events, with a comment as keep-alive during a long silence."""
    following: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(pieces, None))
            done, _ = await asyncio.wait({following}, timeout=seconds)
            if not done:
                yield b": still here\n\n"
                continue
            piece, following = following.result(), None
            if piece is None:
                return
            yield piece
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})
        await pieces.aclose()
