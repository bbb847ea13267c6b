"""Tools and calls: what can be called, the record of calls, and what their commands print."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from farhand.api.routes.invoke import RouteTaken
from farhand.api.routes.nodes import NODE_STATUSES
from farhand.api.server.conditional import not_modified, not_modified_reply, requested_range, unsatisfiable
from farhand.api.server.http import Problem, Reply, Request, copied, existing, invalid, refusing, unknown
from farhand.api.server.router import BYTES, PARTIAL, Query, route
from farhand.api.server.streams import until_gone
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.admission import Lookup, look_up, offers_to
from farhand.gateway.calls.catalog import Catalog, Offer
from farhand.gateway.calls.charging import Meter
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import CallLogLine, CallProgress
from farhand.gateway.calls.search import CallSearch
from farhand.gateway.control.receipts import Receipts
from farhand.gateway.nodes.output import Output, RemoteCommands
from farhand.protocol.calls import NULL, ToolFailure
from farhand.protocol.errors import Failed
from farhand.protocol.names import NATIVE
from farhand.protocol.receipts import Receipt, fingerprint
from farhand.protocol.version import MIB
from farhand.store.tables.calls import LEFT_OUT, CallRecord, CallState

CALL_QUERY = (
    Query("limit", "How many at most: 1 to 1000, 50 by default.", int),
    Query("before", "Only calls older than this one."),
    Query("tool", "Only calls of this tool."),
    Query("node_id", "Only calls of this node."),
    Query("state", "Only calls in this state.", CallState),
    Query("session_key", "Only calls of this session."),
    Query("credential", "Only calls by this acting credential."),
    Query("group", "Only calls of this fan-out."),
    Query(
        "bodies", "0 omits arguments and results. A list contains at most 32 MiB of them, those of the newest calls."
    ),
)
STREAMS = ("output", "errors")
# Maximum bytes of output in an answer that does not wait; the client continues from there.
MOST_AT_ONCE = 8 * MIB
MOST_PAGES = 256
# Input is passed to the node in pieces of at most this size.
INPUT_BYTES = 256 * 1024
CALL_FILTERS = ("tool", "node_id", "state", "session_key", "credential")
OUTPUT = {
    "media": (BYTES,),
    "query": (
        Query("offset", "From this byte on.", int),
        Query("wait", "0 returns the output so far, at most about 8 MiB, without waiting for more."),
        Query(
            "stream",
            "`errors` for the standard error of an attached command; that of other commands is in their output.",
        ),
    ),
    "also": PARTIAL,
    "errors": (416, 502),
    "statuses": NODE_STATUSES,
}


class ToolsAnswer(msgspec.Struct):
    tools: list[Offer]


class CallShown(msgspec.Struct):
    """A call record; `result` if it succeeded, else `error`. Times are milliseconds since 1970."""

    request_id: str
    id: str
    tool: str
    state: CallState
    route: RouteTaken
    credential: str
    on_behalf_of: str | None
    session_key: str | None
    agent_id: str | None
    background: bool
    created_at: int
    deadline_at: int
    ended_at: int | None
    duration_ms: int | None
    args: Any = UNSET
    result: Any = UNSET
    error: ToolFailure | UnsetType = UNSET
    # What a waiting call waits for: `approval` or `node`.
    waits_for: str | UnsetType = UNSET
    approval_id: str | UnsetType | None = UNSET
    # In the answer to a cancel: the call had ended before, and this request changed nothing.
    already_over: bool | UnsetType = UNSET
    # How far an open call is, and the newest lines of its log, as far as its tool reports them.
    progress: CallProgress | UnsetType = UNSET
    log: list[CallLogLine] | UnsetType = UNSET


class CallsAnswer(msgspec.Struct):
    calls: list[CallShown]
    count: int


@dataclass(frozen=True)
class CallRoutes:
    """`ending` is set when the gateway stops."""

    catalog: Catalog
    gate: Gate
    search: CallSearch
    commands: RemoteCommands
    ending: asyncio.Event

    @route(
        "GET /v1/tools",
        (Scope.READ, Scope.TOOLS_READ),
        "The tools that can be called now; without `read`, those that the credential may call.",
        query=(
            Query("agent", "Has no effect: the tools are the same for every agent."),
            Query("name", "The tool with this name, on a connected node or not; else names that are similar."),
        ),
        answer=ToolsAnswer,
    )
    async def tools(self, request: Request) -> ToolsAnswer | Lookup:
        name = request.query("name")
        if name is not None:
            return look_up(self.catalog, request.principal, name)
        return ToolsAnswer(offers_to(self.catalog, request.principal))

    @route("GET /v1/calls", Scope.READ, "Calls, newest first.", query=CALL_QUERY)
    async def calls(self, request: Request) -> CallsAnswer:
        limit = request.query_int("limit", 50, 1, 1000)
        filters = {name: value for name in CALL_FILTERS if (value := request.query(name)) is not None}
        state = filters.get("state")
        if state is not None and state not in {known.value for known in CallState}:
            known_states = ", ".join(known.value for known in CallState)
            raise invalid(f"state must be one of {known_states}, not {state!r}")
        bodies = request.flag("bodies")
        records = await self.search.search(
            filters, limit, request.query("before"), request.query("group"), bodies=bodies
        )
        shown = [self._shown(record, bodies=bodies and record.args != LEFT_OUT) for record in records]
        return CallsAnswer(shown, len(shown))

    @route("GET /v1/calls/{call_id}", Scope.READ, "One call.")
    async def call(self, request: Request) -> CallShown:
        record = await self._found(request)
        shown = self._shown(record)
        if shown.waits_for is not UNSET and not self.gate.is_open(record.id):  # it waits at another gateway
            shown.waits_for, shown.approval_id = await self.search.awaited(record.id)
        return shown

    @route(
        "DELETE /v1/calls/{call_id}",
        Scope.TOOLS_EXEC,
        "Cancel a call; the answer has its outcome.",
        answer=CallShown,
    )
    async def cancel(self, request: Request) -> CallShown | dict[str, Any]:
        call_id = request.params["call_id"]
        over = await self.gate.is_over(call_id)
        record = existing(await self.gate.cancel(call_id), "call", call_id)
        if request.credential.id in (record.credential, record.on_behalf_of) or request.credential.may(Scope.READ):
            return msgspec.structs.replace(self._shown(record), already_over=over)
        # A call of another credential, for a caller that may cancel it but not read it.
        return {"request_id": record.id, "id": record.id, "state": record.state.value, "already_over": over}

    async def _found(self, request: Request) -> CallRecord:
        return existing(await self.gate.find(request.params["call_id"]), "call", request.params["call_id"])

    def _shown(self, record: CallRecord, *, bodies: bool = True) -> CallShown:
        shown = copied(
            CallShown,
            record,
            request_id=record.id,
            route=RouteTaken(record.route, record.node_id, record.capability),
            duration_ms=None if record.duration_ms is None else round(record.duration_ms),
            args=record.args if bodies else UNSET,
            result=(record.result or NULL) if bodies and record.state is CallState.OK else UNSET,
        )
        if record.state is not CallState.OK and record.error_kind is not None:
            shown.error = ToolFailure(record.error_kind, record.error_message or "")
        if record.state is CallState.WAITING:
            opened = self.gate.waiting_calls.calls.get(record.id)
            waiting = opened.waiting if opened else None
            shown.waits_for = waiting.why if waiting else "approval"
            shown.approval_id = waiting.approval.id if waiting and waiting.approval else None
        opened = self.gate.running(record.id) if record.state is CallState.RUNNING else None
        if opened is not None and opened.progress is not None:
            shown.progress = opened.progress
        if opened is not None and opened.log:
            shown.log = list(opened.log)
        return shown

    # -- commands ---------------------------------------------------------------------------------------

    @route(
        "GET /v1/jobs",
        Scope.READ,
        "Commands of the nodes, newest first; not of nodes that the credential or the policy excludes.",
        query=(Query("node_id", "Only commands of this node."),),
    )
    async def jobs(self, request: Request) -> dict[str, Any]:
        node_id = request.query("node_id")
        if node_id is not None:
            self.gate.check_node(request.principal, node_id)
        jobs, silent = await self.commands.jobs(node_id, may_see=partial(self.gate.may_see_node, request.principal))
        return {"jobs": jobs, "count": len(jobs), "unanswered": silent}

    @route(
        "GET /v1/calls/{call_id}/output",
        (Scope.READ, Scope.TOOLS_EXEC),
        "Output of a call's command, streamed until it ends. A token without `read` gets that of its own calls.",
        **OUTPUT,
    )
    async def call_output(self, request: Request) -> Reply:
        record = await self._found(request)
        own = request.credential.id in (record.credential, record.on_behalf_of)
        if not own and not request.credential.may(Scope.READ):
            raise Problem(403, "forbidden", "this credential lacks the scope 'read', and did not make this call")
        if record.route == "unknown":
            raise unknown("call", request.params["call_id"])
        if not own:
            self.gate.check_node(request.principal, record.node_id or NATIVE)
        return await self._output(request, record.node_id or NATIVE, {"call_id": record.id})

    @route(
        "POST /v1/calls/{call_id}/input",
        Scope.TOOLS_EXEC,
        "Send input to the command of a call. The input ends with the body unless `close=0`.",
        query=(Query("close", "0 leaves the input open."),),
        takes=BYTES,
        errors=(404, 423, 502),
        statuses=NODE_STATUSES,
        streams=True,
        narrow=True,
    )
    async def input(self, request: Request) -> dict[str, Any]:
        record = await self._found(request)
        self.gate.check_attach(record, request.principal)
        if record.node_id is None:
            raise Problem(404, "not_found", f"call {record.id} runs no command on a node")
        node_id, of, size = record.node_id, {"call_id": record.id}, 0
        meter = await self.gate.meter(request.principal)
        async for piece in request.stream():
            for start in range(0, len(piece), INPUT_BYTES):
                part = bytes(piece[start : start + INPUT_BYTES])
                self.gate.check_attach(record, request.principal)  # rules may change while the input is sent
                await meter.add(len(part))
                await self.commands.send(node_id, of, data=part)
                size += len(part)
        await meter.close()
        if request.flag("close"):
            await self.commands.send(node_id, of, close=True)
        return {"written": size}

    @route(
        "GET /v1/nodes/{node_id}/jobs/{job_id}/output",
        Scope.READ,
        "Output of a command, streamed until the command ends.",
        **OUTPUT,
    )
    async def job_output(self, request: Request) -> Reply:
        self.gate.check_node(request.principal, request.params["node_id"])
        return await self._output(request, request.params["node_id"], {"job_id": request.params["job_id"]})

    async def _output(self, request: Request, node_id: str, of: dict[str, str]) -> Reply:
        """Return the output from `offset` on: what there is with `wait=0`, else until the command has ended."""
        offset = request.query_int("offset", 0, 0, 2**62)
        stream = request.query("stream") or "output"
        if stream not in STREAMS:
            raise invalid(f"stream must be one of {', '.join(STREAMS)}, not {stream[:50]!r}")
        if stream != "output":
            of = {**of, "stream": stream}
        wanted = requested_range(request)
        if wanted is not None and wanted.first < 0:  # output that is still being written has no known end
            wanted = None
        wait = request.flag("wait") and wanted is None
        if wanted is not None:
            offset = wanted.first
        meter = await self.gate.meter(request.principal)
        pages = _metered(self.commands.output(node_id, of, offset, wait=wait), meter)
        first = await anext(pages)
        headers = [(b"x-offset", b"%d" % first.offset)]
        if wait:
            pieces = until_gone(request, _bytes(first, pages), self.ending)
            return Reply(content_type=BYTES.encode(), headers=headers, pieces=pieces, bare=True)
        end = None if wanted is None or wanted.last is None else wanted.last + 1
        page, parts, room = first, [first.data], MOST_AT_ONCE - len(first.data)
        async with aclosing(pages):
            while room > 0 and len(parts) < MOST_PAGES and (end is None or page.next_offset < end):
                following = await anext(pages, None)
                if following is None:
                    break
                page = following
                parts.append(page.data)
                room -= len(page.data)
        headers += [(b"x-next-offset", b"%d" % page.next_offset), (b"x-over", b"true" if page.over else b"false")]
        if page.over:
            etag = f"{next(iter(of.values()))}-{page.next_offset}" + f"-{stream}" * (stream != "output")
            headers.append((b"etag", f'"{etag}"'.encode()))
            if wanted is None and not_modified(request, etag):
                return not_modified_reply(headers)
        data = b"".join(parts)
        if wanted is None:
            return Reply(data, content_type=BYTES.encode(), headers=headers, bare=True)
        data = data if end is None else data[: max(0, end - first.offset)]
        if not data:
            raise unsatisfiable(page.next_offset)
        total = b"%d" % page.next_offset if page.over else b"*"
        part = b"bytes %d-%d/%b" % (first.offset, first.offset + len(data) - 1, total)
        headers.append((b"content-range", part))
        return Reply(data, status=206, content_type=BYTES.encode(), headers=headers, bare=True)


class ReceiptKeyAnswer(msgspec.Struct):
    key: str
    fingerprint: str


class ReceiptRoutes:
    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts

    @route(
        "GET /v1/calls/{call_id}/receipt",
        (Scope.READ, Scope.TOOLS_READ),
        "The signed receipt of a call that has ended. A token without `read` gets that of its own calls.",
        query=(Query("content", "1 adds the arguments and the result."),),
        errors=(404, 409),
        narrow=True,
        content=True,
    )
    async def receipt(self, request: Request) -> Receipt:
        call_id = request.params["call_id"]
        record = await self._receipts.find(call_id)
        credential = request.credential
        readable = credential.may(Scope.READ) and not credential.narrowed
        if record is None or not (readable or credential.id in (record.credential, record.on_behalf_of)):
            raise unknown("call", call_id)
        with refusing(Failed, status=409, code="call_open"):
            return await self._receipts.make(record, content=request.query("content") == "1")

    @route("GET /v1/receipts/key", Scope.READ, "The public key with which this gateway signs receipts.")
    async def key(self, _request: Request) -> ReceiptKeyAnswer:
        return ReceiptKeyAnswer(self._receipts.key, fingerprint(self._receipts.key))


async def _metered(pages: AsyncGenerator[Output, None], meter: Meter) -> AsyncGenerator[Output, None]:
    """Yield pages, and count their bytes against budgets. Raises Denied once a limit is reached."""
    try:
        async with aclosing(pages):
            async for page in pages:
                await meter.add(len(page.data))
                yield page
    finally:
        await meter.close()


async def _bytes(first: Output, pages: AsyncIterator[Output]) -> AsyncGenerator[bytes, None]:
    yield first.data
    async for page in pages:
        yield page.data
