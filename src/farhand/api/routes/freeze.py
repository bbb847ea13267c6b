"""`/v1/freeze` and `/v1/thaw`: stop everything, show the state, and lift the freeze."""

from __future__ import annotations

import msgspec

from farhand.api.server.http import Request, invalid, refusing
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.control.freeze import Freeze, FreezeStatus
from farhand.protocol.errors import Failed
from farhand.protocol.freeze import MAX_REASON_CHARS


class FreezeRequest(msgspec.Struct):
    reason: str = ""


class FreezeRoutes:
    def __init__(self, freeze: Freeze) -> None:
        self._freeze = freeze

    @route("GET /v1/freeze", (Scope.READ, Scope.FREEZE), "Whether everything is frozen, and what each node reports.")
    async def show(self, _request: Request) -> FreezeStatus:
        return self._freeze.state()

    # A second order changes nothing; the first must not wait for the store.
    @route(
        "POST /v1/freeze",
        Scope.FREEZE,
        "Freeze every node until thawed; the answer has each node's report.",
        body_optional=True,
        errors=(503,),
        idempotent=True,
    )
    async def freeze(self, request: Request, wanted: FreezeRequest) -> FreezeStatus:
        _check(wanted)
        with refusing(Failed, status=503, code="not_recorded"):
            return await self._freeze.freeze(request.credential.id, wanted.reason)

    @route("POST /v1/thaw", Scope.ADMIN, "Lift a freeze.", body_optional=True, errors=(503,), idempotent=True)
    async def thaw(self, request: Request, wanted: FreezeRequest) -> FreezeStatus:
        _check(wanted)
        with refusing(Failed, status=503, code="not_recorded"):
            return await self._freeze.thaw(request.credential.id)


def _check(wanted: FreezeRequest) -> None:
    if len(wanted.reason) > MAX_REASON_CHARS:
        raise invalid(f"a reason has at most {MAX_REASON_CHARS} characters")
