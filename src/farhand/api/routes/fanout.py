"""`POST /v1/tools/fanout`: one call to many nodes, one table back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply, tool_problem
from farhand.api.server.route_docs import EVENTS, JSON, About
from farhand.api.server.router import Route
from farhand.api.server.streams import EVENT_STREAM, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY, IdempotencyConflict
from farhand.gateway.control.fanout import FanOut, FanOutAnswer, FanOutRequest, FanOuts
from farhand.gateway.hub import Hub
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.store.ports import StoreError

_decoder = msgspec.json.Decoder(FanOutRequest)


def fanout_routes(hub: Hub) -> list[Route]:
    fanouts = FanOuts(hub.database, hub.node_registry, hub.gate)

    async def call(request: Request) -> Reply:
        wanted: FanOutRequest = await request.json(_decoder)
        key = request.header(b"idempotency-key")
        if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
            raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
        try:
            begun = await fanouts.begin(wanted, request.principal, key)
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except InvalidArgs as error:
            raise Problem(400, "invalid_request", error.message) from None
        except ToolError as error:
            raise tool_problem(error) from None
        except StoreError as error:
            raise Problem(503, "not_recorded", f"nothing was called: {error}") from None
        request.id = begun.group_id
        if wanted.stream:
            pieces = until_gone(request, with_pulse(_told(begun)), hub.ending)
            return Reply(content_type=EVENT_STREAM, pieces=pieces)
        return await _watched(request, begun)

    return [
        Route(
            "POST",
            "/v1/tools/fanout",
            Scope.TOOLS_READ,
            call,
            narrow=True,
            content=True,
            about=About(
                "Call a tool on many nodes: `tag:NAME` or a list; 200 whatever the tools said.",
                body=FanOutRequest,
                answer=FanOutAnswer,
                media=(JSON, EVENTS),
                errors=(404, 409, 503),
                idempotent=True,
            ),
        )
    ]


async def _watched(request: Request, begun: FanOut) -> Reply:
    """The table. Should its client leave before, nothing more is begun."""
    gone = asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait({gone, begun.task}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.task.done():
            begun.abandon()
            return json_reply(begun.answer())
        return json_reply(begun.task.result())
    finally:
        gone.cancel()


async def _told(begun: FanOut) -> AsyncGenerator[bytes, None]:
    try:
        async for progress in begun.follow():
            yield b"event: %b\ndata: %b\n\n" % (progress.type.encode(), msgspec.json.encode(progress))
    finally:
        if not begun.task.done():
            begun.abandon()
