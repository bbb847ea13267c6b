"""`POST /v1/tools/invoke`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from farhand.api.server.http import Problem, Reply, Request, read_json
from farhand.api.server.large_bodies import beside_loop, result_bytes
from farhand.api.server.streams import EVENT_STREAM, ClientWatch, until_gone, with_pulse
from farhand.gateway.calls.admission import MAX_TIMEOUT_MS
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY, IdempotencyConflict
from farhand.gateway.calls.open_call import OpenCall, new_call_id, result_of
from farhand.gateway.control.approvals import ApprovalRequested
from farhand.gateway.hub import Hub
from farhand.gateway.schedule.time_parsing import DAY_MS, read_deadline
from farhand.gateway.sessions.keys import agent_id, agent_of
from farhand.protocol.calls import NULL, ToolCall, ToolFailure
from farhand.protocol.errors import InvalidArgs
from farhand.store.ports import StoreError
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import Approval

LONGEST_WAIT_MS = 30 * DAY_MS


class InvokeRequest(msgspec.Struct):
    tool: str
    args: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    session_key: str | None = None
    agent_id: str | None = None
    timeout_ms: int | None = None
    background: bool = False
    # While its node is offline the call waits for it; it is answered at once then, with the state `waiting`.
    when_online: bool = False
    # Answer with server-sent events: `approval_requested` if the call waits for approval, then `done` with the answer.
    stream: bool = False
    # Until when it waits: `18:00`, an ISO moment, `in 2 hours`, milliseconds since 1970; a day by default.
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


_decoder = msgspec.json.Decoder(InvokeRequest)
_encode = msgspec.json.Encoder().encode


class InvokeDoor:
    """The route's handler."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def answer(self, request: Request) -> Reply:
        wanted = _read(await request.body())
        key = read_key(request)
        call = _call(wanted)
        request.id = call.id
        try:
            opened = await self._hub.gate.begin(
                call,
                principal=request.principal,
                background=wanted.background,
                idempotency_key=key,
                before=self._before(wanted),
            )
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except StoreError as error:
            raise not_recorded(error) from None
        if wanted.stream:
            request.id = opened.record.id
            # A gateway that stops ends its calls first, so that the last event says how this one stands.
            events = until_gone(request, with_pulse(self._events(opened)), asyncio.Event())
            return Reply(content_type=EVENT_STREAM, pieces=events)
        record = await watched(self._hub, request, opened)
        request.id = record.id
        return Reply(await beside_loop(result_bytes(record), partial(answer_of, record)))

    async def _events(self, opened: OpenCall) -> AsyncGenerator[bytes, None]:
        asked: asyncio.Future[Approval] = asyncio.get_running_loop().create_future()
        opened.on_approval(lambda approval: None if asked.done() else asked.set_result(approval))
        ended = asyncio.ensure_future(self._hub.gate.wait(opened))
        try:
            first: set[asyncio.Future[Any]] = {ended, asked}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                yield _event("approval_requested", _encode(ApprovalRequested.of(asked.result())))
            record = await asyncio.shield(ended)
            yield await beside_loop(result_bytes(record), lambda: _event("done", answer_of(record)))
        finally:
            asked.cancel()
            if not ended.done():  # the client left
                ended.cancel()
                self._hub.gate.abandon(opened)

    def _before(self, wanted: InvokeRequest) -> int | None:
        """The moment until which a call may wait for its node; None: it may not. Raises Problem."""
        now = self._hub.node_registry.clock()
        if not wanted.when_online:
            if wanted.before is not None:
                raise Problem(400, "invalid_request", "before belongs to when_online: true")
            return None
        if wanted.before is None:
            return now + DAY_MS
        try:
            before = read_deadline(wanted.before, now, self._hub.zone())
        except InvalidArgs as error:
            raise Problem(400, "invalid_request", f"before: {error.message}") from None
        if not now < before <= now + LONGEST_WAIT_MS:
            raise Problem(400, "invalid_request", f"before must be within the next 30 days, not {wanted.before!r}")
        return before


async def watched(hub: Hub, request: Request, opened: OpenCall) -> CallRecord:
    """The end of a call; should its client leave before, nobody waits for it any more."""
    watch = ClientWatch(request, lambda: hub.gate.abandon(opened))
    try:
        return await hub.gate.wait(opened)
    finally:
        watch.stop()


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def read_key(request: Request) -> str | None:
    """Raises Problem."""
    key = request.header(b"idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
    return key


def _read(body: bytes) -> InvokeRequest:
    """Raises Problem."""
    wanted: InvokeRequest = read_json(body, _decoder)
    if not wanted.tool:
        raise Problem(400, "invalid_request", "tool must name a tool; `GET /v1/tools` lists them")
    if wanted.timeout_ms is not None and not 1 <= wanted.timeout_ms <= MAX_TIMEOUT_MS:
        raise Problem(
            400, "invalid_request", f"timeout_ms must be between 1 and {MAX_TIMEOUT_MS}, not {wanted.timeout_ms}"
        )
    return wanted


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
    """Whose session it is, where the key says so: `agent:helper:main` works in helper's workspace."""
    return agent_id(agent_of(session_key)) if session_key and session_key.startswith("agent:") else None


def not_recorded(error: Exception) -> Problem:
    return Problem(503, "not_recorded", f"the call was not run: {error}")


def answer_of(record: CallRecord) -> bytes:
    result: msgspec.Raw | UnsetType = UNSET
    error: ToolFailure | UnsetType = UNSET
    state = record.state
    if state is CallState.OK:
        result = NULL if record.result is None else record.result
    elif record.error_kind is not None or state not in (CallState.RUNNING, CallState.WAITING):
        failure = result_of(record).error
        assert failure is not None
        error = failure
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
