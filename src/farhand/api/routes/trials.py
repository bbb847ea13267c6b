"""`/v1/trials`: what a trial run changed, and whether that is kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.router import route
from farhand.api.server.streams import end_of_call
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.trials import TrialCalls
from farhand.store.tables.calls import CallRecord, CallState
from farhand.tools.trial import CONFLICT

_STATUS = {"not_found": 404, "invalid_args": 400, "not_allowed": 403, "timeout": 504}


class TrialShown(msgspec.Struct):
    trialId: str  # noqa: N815
    # `running`, `ready`, `keeping`, `kept`, `discarded` or `failed`.
    state: str
    command: str
    changes: list[dict[str, Any]]
    startedAt: int  # noqa: N815
    expiresAt: int  # noqa: N815
    # The call that kept it, which can be undone.
    keptBy: str = ""  # noqa: N815


trial_route = partial(route, answer=TrialShown, errors=(403, 404, 409, 423, 502, 503, 504), narrow=True, content=True)


class TrialRoutes:
    def __init__(self, gate: Gate, trials: TrialCalls) -> None:
        self._gate = gate
        self._trials = trials

    @trial_route("GET /v1/trials/{trial_id}", Scope.TOOLS_WRITE, "What a trial changed, and its state.")
    async def show(self, request: Request) -> Reply:
        return await self._end(request, "show")

    @trial_route(
        "POST /v1/trials/{trial_id}/keep",
        Scope.TOOLS_WRITE,
        "Apply what a trial changed: all of it, or, if a file has been changed since, nothing (409).",
        idempotent=True,
    )
    async def keep(self, request: Request) -> Reply:
        return await self._end(request, "keep")

    @trial_route("POST /v1/trials/{trial_id}/discard", Scope.TOOLS_WRITE, "Drop what a trial changed.", idempotent=True)
    async def discard(self, request: Request) -> Reply:
        return await self._end(request, "discard")

    async def _end(self, request: Request, action: str) -> Reply:
        opened = await self._trials.begin(
            request.params["trial_id"],
            action,
            request.principal,
            idempotency_key=None if action == "show" else request.idempotency_key,
        )
        record = await end_of_call(request, self._gate, opened)
        if record.state is CallState.OK and record.result is not None:
            return Reply(bytes(record.result))
        raise _problem(record)


def _problem(record: CallRecord) -> Problem:
    message = record.error_message or f"the call ended as {record.state}"
    if message.startswith(CONFLICT):
        return Problem(409, "conflict", message.removeprefix(CONFLICT))
    if record.state is CallState.DENIED:
        return Problem(423 if message.startswith("frozen") else 403, "not_allowed", message)
    kind = record.error_kind or "failed"
    return Problem(_STATUS.get(kind, 502), kind, message)
