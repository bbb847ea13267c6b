"""`POST /v1/tools/fanout`: one call to many nodes, one table back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from farhand.api.server.http import Reply, Request, json_reply, refusing
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import EVENT_STREAM, event, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.control.fanout import FanOut, FanOutAnswer, FanOutRequest, FanOuts
from farhand.protocol.errors import InvalidArgs


class FanOutRoutes:
    def __init__(self, fanouts: FanOuts, ending: asyncio.Event) -> None:
        """`ending` is set when the gateway stops."""
        self._fanouts = fanouts
        self._ending = ending

    @route(
        "POST /v1/tools/fanout",
        Scope.TOOLS_READ,
        "Call a tool on many nodes: `tag:NAME` or a list. The status is 200 even if calls fail.",
        answer=FanOutAnswer,
        media=(JSON, EVENTS),
        errors=(404, 409, 503),
        idempotent=True,
        narrow=True,
        content=True,
    )
    async def call(self, request: Request, wanted: FanOutRequest) -> Reply:
        with refusing(InvalidArgs):
            begun = await self._fanouts.begin(wanted, request.principal, request.idempotency_key)
        request.id = begun.group_id
        if wanted.stream:
            pieces = until_gone(request, with_pulse(_events(begun)), self._ending)
            return Reply(content_type=EVENT_STREAM, pieces=pieces)
        return await _watched(request, begun)


async def _watched(request: Request, begun: FanOut) -> Reply:
    """Return the table. If the client leaves before, no more calls are started."""
    gone = asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait({gone, begun.task}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.task.done():
            begun.abandon()
            return json_reply(begun.answer())
        return json_reply(begun.task.result())
    finally:
        gone.cancel()


async def _events(begun: FanOut) -> AsyncGenerator[bytes, None]:
    try:
        async for progress in begun.follow():
            yield event(progress.type, msgspec.json.encode(progress))
    finally:
        if not begun.task.done():
            begun.abandon()
