"""`POST /v1/calls/{id}/undo`: take back what a call did to files."""

from __future__ import annotations

import msgspec

from farhand.api.routes.invoke import InvokeAnswer, answer_of, not_recorded, read_key, watched
from farhand.api.server.http import Problem, Reply, Request, read_json
from farhand.api.server.route_docs import About
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import IdempotencyConflict
from farhand.gateway.control.undo import Undo
from farhand.gateway.hub import Hub
from farhand.protocol.errors import NotFound
from farhand.store.ports import StoreError


class UndoRequest(msgspec.Struct):
    # Only tell what would be done.
    dry_run: bool = False


_decoder = msgspec.json.Decoder(UndoRequest)


def undo_routes(hub: Hub, undo: Undo) -> list[Route]:
    async def answer(request: Request) -> Reply:
        body = await request.body()
        wanted: UndoRequest = read_json(body, _decoder) if body.strip() else UndoRequest()
        try:
            begun = await undo.begin(
                request.params["call_id"],
                request.principal,
                dry_run=wanted.dry_run,
                idempotency_key=read_key(request),
            )
        except NotFound as error:
            raise Problem(404, "not_found", error.message) from None
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except StoreError as error:
            raise not_recorded(error) from None
        record = await watched(hub, request, begun)
        request.id = record.id
        return Reply(answer_of(record))

    return [
        Route(
            "POST",
            "/v1/calls/{call_id}/undo",
            Scope.TOOLS_WRITE,
            answer,
            narrow=True,
            about=About(
                "Give the files a call changed their old content back; 200 whatever came of it.",
                body=UndoRequest,
                answer=InvokeAnswer,
                errors=(404, 409, 503),
                idempotent=True,
            ),
        )
    ]
