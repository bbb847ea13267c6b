"""`POST /v1/tools/invoke` calls a tool, `POST /v1/calls/{id}/undo` restores the files a call changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET, UnsetType

from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.large_bodies import beside_loop, result_bytes
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import EVENT_STREAM, end_of_call, event, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.admission import MAX_TIMEOUT_MS
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id, result_of
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.control.undo import Undo
from farhand.gateway.control.undo_run import RunUndo, UndoneRun
from farhand.gateway.schedule.time_parsing import DAY_MS, read_deadline
from farhand.gateway.sessions.keys import agent_id, agent_of
from farhand.protocol.calls import NULL, ToolCall, ToolFailure
from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import Approval

LONGEST_WAIT_MS = 30 * DAY_MS


class InvokeRequest(msgspec.Struct, forbid_unknown_fields=True):
    tool: str
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    session_key: str | None = None
    agent_id: str | None = None
    timeout_ms: int | None = None
    background: bool = False
    # If its node is offline, the call waits for it and is answered at once with the state `waiting`.
    when_online: bool = False
    # Answer with server-sent events: `approval_requested` if the call needs an approval, then `done` with the answer.
    stream: bool = False
    # How long it waits: `18:00`, an ISO time, `in 2 hours`, milliseconds since 1970; a day by default.
    before: str | int | None = None


class RouteTaken(msgspec.Struct, omit_defaults=True):
    kind: str
    node_id: str | None = None
    capability: str | None = None


class InvokeAnswer(msgspec.Struct):
    request_id: str
    ok: bool
    route: RouteTaken
    duration_ms: int
    state: str
    result: msgspec.Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode


class InvokeRoutes:
    def __init__(self, gate: Gate, clock: Callable[[], int], zone: Callable[[], ZoneInfo]) -> None:
        """`zone` is the time zone in which `before` is read."""
        self._gate = gate
        self._clock = clock
        self._zone = zone

    @route(
        "POST /v1/tools/invoke",
        Scope.TOOLS_READ,
        "Call a tool. The status is 200 even if the tool fails.",
        answer=InvokeAnswer,
        media=(JSON, EVENTS),
        errors=(409, 503),
        idempotent=True,
        narrow=True,
        content=True,
    )
    async def invoke(self, request: Request, wanted: InvokeRequest) -> Reply:
        _check(wanted)
        call = _call(wanted)
        request.id = call.id
        opened = await self._gate.begin(
            call,
            principal=request.principal,
            background=wanted.background,
            idempotency_key=request.idempotency_key,
            before=self._before(wanted),
        )
        if wanted.stream:
            request.id = opened.record.id
            # A stopping gateway ends its calls first, so the stream still gets its last event.
            events = until_gone(request, with_pulse(self._events(opened)), asyncio.Event())
            return Reply(content_type=EVENT_STREAM, pieces=events)
        return await _answered(self._gate, request, opened)

    async def _events(self, opened: OpenCall) -> AsyncGenerator[bytes, None]:
        asked: asyncio.Future[Approval] = asyncio.get_running_loop().create_future()
        opened.on_approval(lambda approval: None if asked.done() else asked.set_result(approval))
        ended = asyncio.ensure_future(self._gate.wait(opened))
        try:
            first: set[asyncio.Future[Any]] = {ended, asked}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                yield event("approval_requested", _encode(ApprovalRequested.of(asked.result())))
            record = await asyncio.shield(ended)
            yield await beside_loop(result_bytes(record), lambda: event("done", answer_of(record)))
        finally:
            asked.cancel()
            if not ended.done():  # the client left
                ended.cancel()
                self._gate.abandon(opened)

    def _before(self, wanted: InvokeRequest) -> int | None:
        """Return until when a call may wait for its node; None if it may not. Raises Problem."""
        if not wanted.when_online:
            if wanted.before is not None:
                raise Problem(400, "invalid_request", "before needs when_online: true")
            return None
        now = self._clock()
        if wanted.before is None:
            return now + DAY_MS
        try:
            before = read_deadline(wanted.before, now, self._zone())
        except InvalidArgs as error:
            raise Problem(400, "invalid_request", f"before: {error.message}") from None
        if not now < before <= now + LONGEST_WAIT_MS:
            raise Problem(400, "invalid_request", f"before must be within the next 30 days, not {wanted.before!r}")
        return before


class UndoRequest(msgspec.Struct, forbid_unknown_fields=True):
    # Only report what would be done.
    dry_run: bool = False


class UndoRoutes:
    def __init__(self, gate: Gate, undo: Undo, runs: RunUndo) -> None:
        self._gate = gate
        self._undo = undo
        self._runs = runs

    @route(
        "POST /v1/calls/{call_id}/undo",
        Scope.TOOLS_WRITE,
        "Restore the files that a call changed. The status is 200 even if that fails.",
        body_optional=True,
        answer=InvokeAnswer,
        errors=(404, 409, 503),
        idempotent=True,
        narrow=True,
    )
    async def undo(self, request: Request, wanted: UndoRequest) -> Reply:
        begun = await self._undo.begin(
            request.params["call_id"],
            request.principal,
            dry_run=wanted.dry_run,
            idempotency_key=request.idempotency_key,
        )
        return await _answered(self._gate, request, begun)

    @route(
        "POST /v1/runs/{run_id}/undo",
        Scope.TOOLS_WRITE,
        "Undo everything a run changed through file tools and kept trials, newest first.",
        body_optional=True,
        errors=(404, 503),
        content=True,
    )
    async def undo_run(self, request: Request, wanted: UndoRequest) -> UndoneRun:
        return await self._runs.undo(request.params["run_id"], request.principal, dry_run=wanted.dry_run)


async def _answered(gate: Gate, request: Request, opened: OpenCall) -> Reply:
    """Return the record of an ended call; abandon the call if its client leaves."""
    record = await end_of_call(request, gate, opened)
    return Reply(await beside_loop(result_bytes(record), partial(answer_of, record)))


def _check(wanted: InvokeRequest) -> None:
    """Raise Problem for an invalid request."""
    if not wanted.tool:
        raise Problem(400, "invalid_request", "tool must name a tool; `GET /v1/tools` lists them")
    if wanted.timeout_ms is not None and not 1 <= wanted.timeout_ms <= MAX_TIMEOUT_MS:
        raise Problem(
            400, "invalid_request", f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {wanted.timeout_ms}"
        )


def _call(wanted: InvokeRequest) -> ToolCall:
    return ToolCall(
        id=new_call_id(),
        tool=wanted.tool,
        args=wanted.args,
        session_key=wanted.session_key,
        agent_id=wanted.agent_id or _agent(wanted.session_key),
        timeout_ms=wanted.timeout_ms,
    )


def _agent(session_key: str | None) -> str | None:
    """Return the agent in a session key: `agent:helper:main` works in helper's workspace."""
    return agent_id(agent_of(session_key)) if session_key and session_key.startswith("agent:") else None


def answer_of(record: CallRecord) -> bytes:
    """Return the record of a call as the JSON of the answer."""
    result: msgspec.Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType = UNSET
    state = record.state
    if state is CallState.OK:
        result = NULL if record.result is None else record.result
    elif record.error_kind is not None or state not in (CallState.RUNNING, CallState.WAITING):
        error = result_of(record).error or UNSET
    return _encode(
        InvokeAnswer(
            record.id,
            error is UNSET,
            RouteTaken(record.route, record.node_id, record.capability),
            round(record.duration_ms or 0),
            str(state),
            result,
            error,
        )
    )
