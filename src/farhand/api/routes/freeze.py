"""`/v1/freeze` and `/v1/thaw`: stop everything, see that it is stopped, and lift it."""

from __future__ import annotations

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply, read_json
from farhand.api.server.route_docs import About
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.control.freeze import Answer
from farhand.gateway.hub import Hub
from farhand.protocol.errors import Failed
from farhand.protocol.freeze import MAX_REASON_CHARS


class FreezeRequest(msgspec.Struct):
    reason: str = ""


_decoder = msgspec.json.Decoder(FreezeRequest)


def freeze_routes(hub: Hub) -> list[Route]:
    async def reason(request: Request) -> str:
        body = await request.body()
        wanted: FreezeRequest = read_json(body, _decoder) if body.strip() else FreezeRequest()
        if len(wanted.reason) > MAX_REASON_CHARS:
            raise Problem(400, "invalid_request", f"a reason has at most {MAX_REASON_CHARS} characters")
        return wanted.reason

    async def freeze(request: Request) -> Reply:
        why = await reason(request)
        try:
            return json_reply(await hub.freeze.freeze(request.credential.id, why))
        except Failed as error:
            raise Problem(503, "not_recorded", error.message) from None

    async def thaw(request: Request) -> Reply:
        await reason(request)
        try:
            return json_reply(await hub.freeze.thaw(request.credential.id))
        except Failed as error:
            raise Problem(503, "not_recorded", error.message) from None

    async def show(_request: Request) -> Reply:
        return json_reply(hub.freeze.state())

    return [
        Route(
            "GET",
            "/v1/freeze",
            (Scope.READ, Scope.FREEZE),
            show,
            about=About("Whether everything is frozen, and what each node says of it.", answer=Answer),
        ),
        Route(
            "POST",
            "/v1/freeze",
            Scope.FREEZE,
            freeze,
            about=About(
                "Stop everything and begin nothing, on every node, until it is lifted; the answer is each node's own.",
                body=FreezeRequest,
                answer=Answer,
                errors=(503,),
                idempotent=True,  # a second order changes nothing; the first must not wait for the store
            ),
        ),
        Route(
            "POST",
            "/v1/thaw",
            Scope.ADMIN,
            thaw,
            about=About("Lift a freeze.", body=FreezeRequest, answer=Answer, errors=(503,), idempotent=True),
        ),
    ]
