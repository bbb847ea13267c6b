"""Long-running answers, and clients that disconnect before their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from farhand.api.server.http import Request
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall
from farhand.store.tables.calls import CallRecord

EVENT_STREAM = b"text/event-stream; charset=utf-8"
PULSE_SECONDS = 15.0


@contextlib.contextmanager
def watching(request: Request, left: Callable[[], None]) -> Iterator[None]:
    """Call `left` if the client disconnects while the block runs."""
    request.exchange.watch(left)
    try:
        yield
    finally:
        request.exchange.unwatch(left)


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def end_of_call(request: Request, gate: Gate, opened: OpenCall) -> CallRecord:
    """Return the record of a call once it has ended; abandon the call if its client leaves."""
    with watching(request, lambda: gate.abandon(opened)):
        record = await gate.wait(opened)
    request.id = record.id
    return record


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
