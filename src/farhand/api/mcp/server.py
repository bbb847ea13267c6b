"""`/mcp`: the tools of a credential for MCP clients (streamable HTTP), through the gate like any other call.

A fast answer is JSON; a call that takes longer, or whose caller asks for progress, becomes a stream of server-sent
events. A client with a session that loses such a stream resumes it with `Last-Event-ID`: the call continues meanwhile
and is found in the record, even after a restart of the gateway. A client without a session cancels a call by
disconnecting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from secrets import token_hex
from typing import Any, Final

import msgspec
from msgspec import UNSET

from farhand.api.mcp import messages as rpc
from farhand.api.mcp import tasks
from farhand.api.mcp.approval_forms import ApprovalForms
from farhand.api.mcp.content import McpContent
from farhand.api.mcp.messages import Id, RpcError, RpcMessage
from farhand.api.mcp.sessions import MOST_STREAMS, Listener, McpSessions, ServedCall, Session, SessionNotice
from farhand.api.mcp.streamed_answer import PROGRESS_SECONDS, QUESTION, StreamedAnswer, place_of, read_place, rendered
from farhand.api.mcp.tools import Names, tools
from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.large_bodies import beside_loop, result_bytes
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import until_gone, watching, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id
from farhand.gateway.control.approvals import request_of
from farhand.gateway.nodes.machines_tool import NODE_LIST
from farhand.gateway.nodes.output import RemoteCommands
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.waiting_calls import Approval

# The origin of these calls, for the policy.
MCP: Final = ("mcp",)
# An answer within this time is JSON: no client's limit for an event applies to it.
SOON_SECONDS: Final = 2.0
# A call that takes longer becomes a task, for clients that announce the extension.
TASK_SECONDS: Final = 0.5
GATHER_SECONDS: Final = 0.1
# The version with tasks that clients ask for; later ones have them as an extension.
TASKS_IN_CORE: Final = "2025-11-25"
DISCOVERED_MS: Final = 60_000
INSTRUCTIONS: Final = (
    "Tools of several machines. node_* acts on the machine whose id is its `node`, and so does {machine}__{Tool}; "
    "gsv__* is the gateway's own storage and services; other names without __ act on the machine the gateway runs on. "
    "A machine that is away has no tools here."
)
SSE: Final = b"text/event-stream"
SCOPES: Final = (Scope.TOOLS_READ, Scope.TOOLS_WRITE, Scope.TOOLS_EXEC)
RPC_ERRORS: Final = {
    202: "A notification was taken.",
    400: "No message, or one that contradicts itself: a JSON-RPC error.",
    404: "No such session, or method.",
    406: "The client does not take what would be answered.",
}


class McpRoutes:
    def __init__(
        self,
        gateway_id: str,
        node_registry: NodeRegistry,
        catalog: Catalog,
        gate: Gate,
        commands: RemoteCommands,
        tasks: tasks.Tasks,
        forms: ApprovalForms,
        content: McpContent,
        ending: asyncio.Event,
        tell: Callable[[SessionNotice], None] = lambda _: None,
    ) -> None:
        """`ending` is set when the gateway stops. `tell` passes what clients say about sessions to other gateways."""
        self._tasks = tasks
        self._forms = forms
        self._content = content
        self._node_registry = node_registry
        self._catalog = catalog
        self._gate = gate
        self._commands = commands
        self._ending = ending
        self._names = Names(node_registry, catalog)
        self._sessions = McpSessions(gateway_id, tell)
        self._listening = 0
        self._life = token_hex(4)

    # -- messages ---------------------------------------------------------------------------------------

    @route(
        "POST /mcp",
        SCOPES,
        "A message of the Model Context Protocol (streamable HTTP).",
        body=RpcMessage,
        body_raw=True,
        media=(JSON, EVENTS),
        also=RPC_ERRORS,
        errors=(503,),
        narrow=True,
        content=True,
    )
    async def post(self, request: Request) -> Reply:
        if not _accepts(request, JSON.encode()):
            return RpcError(rpc.INVALID_REQUEST, "answers are application/json", status=406).reply(None, modern=False)
        if not request.headers.get(b"content-type", b"").startswith(b"application/json"):
            raise Problem(415, "unsupported_media_type", "send Content-Type: application/json")
        modern = rpc.is_modern(request)
        request_id: Id | None = None
        try:
            message = rpc.read_message(await request.body())
            if message.id is UNSET or message.method is UNSET:
                return await self._take(request, message, modern)
            request_id = message.id
            assert request_id is not None
            if modern:
                rpc.check_modern(request, message)
            return await self._answer(request, message, request_id, modern)
        except RpcError as error:
            return error.reply(request_id, modern=modern)

    async def _take(self, request: Request, message: RpcMessage, modern: bool) -> Reply:
        """Handle a notification, or an unexpected answer."""
        if modern:
            rpc.check_version(request.header(b"mcp-protocol-version") or "")
            return Reply(status=202)
        session = self._session(request)
        if message.method is UNSET:
            await self._take_answer(request, session, message)
        if message.method == "notifications/cancelled":
            cancelled, reason = message.value("requestId"), message.value("reason")
            if isinstance(cancelled, int | str):
                why = reason[:500] if isinstance(reason, str) else ""
                notice = SessionNotice(session.id, request.credential.id, cancelled=cancelled, reason=why)
                if cancelled in session.calls:
                    await self.heard(notice)
                else:
                    self._sessions.tell(notice)
        return Reply(status=202)

    async def heard(self, notice: SessionNotice) -> None:
        """Act on what a client said about its session, here or to another gateway of the fleet."""
        try:
            session = self._sessions.find(notice.session_id, notice.credential)
        except RpcError:
            return
        if notice.log_level is not None:
            session.log_level = notice.log_level
        asked = None if notice.cancelled is None else session.calls.get(notice.cancelled)
        if asked is not None:
            asked.given_up = True
            why = f": {notice.reason}" if notice.reason else ""
            await self._gate.cancel(asked.call_id, f"cancelled by its client{why}")
        if notice.ended:
            self._sessions.end(session)
            for asked in list(session.calls.values()):
                asked.given_up = True
                await self._gate.cancel(asked.call_id, "its client ended the session")

    async def _take_answer(self, request: Request, session: Session, message: RpcMessage) -> None:
        """Handle the answer of the client's user to a question about an approval. Others need no handling."""
        asked = session.questions.pop(message.id, None) if isinstance(message.id, int | str) else None
        if asked is None and isinstance(message.id, str) and message.id.startswith(QUESTION):
            asked = message.id.removeprefix(QUESTION)  # asked by another gateway of the fleet, or before a restart
        if asked is None or message.result is UNSET:
            return
        approval = await self._forms.pending(asked)
        # The id comes from the client: only the approval of one of its own calls is meant.
        if approval is not None and request_of(approval).bound.credential == request.credential.id:
            await self._forms.answer(approval, msgspec.json.decode(message.result), request.credential)

    async def _answer(self, request: Request, message: RpcMessage, request_id: Id, modern: bool) -> Reply:
        method = message.method
        if method == "initialize" and not modern:
            return self._initialize(request, message, request_id)
        session = None if modern else self._session(request)
        if method == "tools/call":
            if modern and message.raw("requestState") is not None:
                return await self._retry(request, message, request_id)
            return await self._call(request, message, request_id, session)
        if method == "tasks/result" and not modern:
            return await self._task_result(request, message, request_id)
        if method == "subscriptions/listen" and modern:
            return self._subscribe(request, message, request_id)
        if method == "tools/list":
            cursor = message.value("cursor")
            if not isinstance(cursor, str | None):
                raise RpcError(rpc.INVALID_PARAMS, "cursor must be one that an earlier answer gave")
            with_tasks = request.header(b"mcp-protocol-version") == TASKS_IN_CORE
            value, cached = tools(self._catalog, request.principal, cursor, with_tasks=with_tasks), 0
        elif method == "server/discover" and modern:
            value, cached = {"supportedVersions": list(rpc.MODERN_VERSIONS), **_introduction(None)}, DISCOVERED_MS
        elif str(method).startswith("tasks/"):
            value = await self._tasks.answer(str(method), message, request.credential, modern=modern)
            cached = None
        elif method == "ping" and not modern:
            return Reply(rpc.result(request_id, {}))
        elif method == "logging/setLevel" and session is not None:
            session.log_level = rpc.log_level(message.value("level"))
            self._sessions.tell(SessionNotice(session.id, request.credential.id, log_level=session.log_level))
            return Reply(rpc.result(request_id, {}))
        else:
            value, cached = await self._content.answer(str(method), message, request.principal, modern=modern), 0
        return Reply(rpc.result(request_id, rpc.complete(value, modern=modern, cached_ms=cached)))

    def _initialize(self, request: Request, message: RpcMessage, request_id: Id) -> Reply:
        wanted = message.value("protocolVersion")
        if not isinstance(wanted, str):
            raise RpcError(rpc.INVALID_PARAMS, "initialize needs protocolVersion")
        version = wanted if wanted in rpc.HANDSHAKE_VERSIONS else rpc.HANDSHAKE_VERSIONS[-1]
        capabilities = message.value("capabilities")
        elicits = isinstance(capabilities, dict) and isinstance(capabilities.get("elicitation"), dict)
        session = self._sessions.begin(request.credential.id, elicits=elicits)
        notice = {"protocolVersion": version, "serverInfo": rpc.SERVER, **_introduction(version)}
        return Reply(rpc.result(request_id, notice), headers=[(b"mcp-session-id", session.id.encode())])

    def _session(self, request: Request) -> Session:
        return self._sessions.find(request.header(b"mcp-session-id"), request.credential.id)

    # -- calls ------------------------------------------------------------------------------------------

    async def _call(self, request: Request, message: RpcMessage, request_id: Id, session: Session | None) -> Reply:
        name, arguments = message.value("name"), message.raw("arguments")
        if not isinstance(name, str) or not name:
            raise RpcError(rpc.INVALID_PARAMS, "tools/call needs the name of a tool")
        if arguments is None or bytes(arguments) == b"null":
            arguments = msgspec.Raw(b"{}")
        if not bytes(arguments).startswith(b"{"):
            raise RpcError(rpc.INVALID_PARAMS, "arguments must be an object")
        call = ToolCall(new_call_id(), self._names.meant(name), arguments)
        request.id = call.id
        own = self._catalog.own(NODE_LIST) if name == NODE_LIST else None
        modern = session is None
        ttl = tasks.Tasks.wanted_ttl(message, modern=modern)
        begun = await self._gate.begin(
            call, principal=request.principal, own=own, background=ttl is not None, origins=MCP
        )
        if ttl is not None:
            return await self._task(request, begun, request_id, ttl, modern=modern)
        if modern and begun.held and rpc.elicits(message):
            return await self._ask(request, begun, request_id)
        streamed = StreamedAnswer(
            self._gate,
            self._commands,
            begun,
            request_id,
            message.progress_token,
            session,
            self._forms,
            request.credential,
            log_level=rpc.wanted_log_level(message) if session is None else session.log_level,
        )
        asked = ServedCall(call.id)
        if session is not None:
            session.calls[request_id] = asked
        ended = begun.ended()
        ended.add_done_callback(streamed.over)
        # Clients without a session cancel by disconnecting; others cancel explicitly and may return for the answer.
        watch = watching(request, lambda: self._gate.abandon(begun)) if session is None else contextlib.nullcontext()
        patience = PROGRESS_SECONDS if streamed.reports else SOON_SECONDS
        try:
            with watch:
                await asyncio.wait({ended}, timeout=patience if _accepts(request, SSE) else None)
        except asyncio.CancelledError:
            if session is None:
                self._gate.abandon(begun)
            raise
        if ended.done():
            if asked.given_up and _accepts(request, SSE):
                return Reply(content_type=SSE)  # a cancelled request gets no answer: its stream ends empty
            record = ended.result()
            render = partial(rendered, record, request_id, modern=session is None)
            return Reply(await beside_loop(result_bytes(record), render))
        version = request.header(b"mcp-protocol-version") or rpc.ASSUMED_VERSION
        return self._stream(request, streamed.pieces(version))

    async def _task(self, request: Request, begun: OpenCall, request_id: Id, ttl: int, *, modern: bool) -> Reply:
        """Answer a call that may become a task. Since 2026-07-28, one that ends soon is answered as such."""
        ended = begun.ended()
        if modern:
            approval = _approval(begun)
            either: set[asyncio.Future[Any]] = {ended, approval}
            with watching(request, lambda: self._gate.stop(begun, "the caller disconnected")):
                await asyncio.wait(either, timeout=TASK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        record = begun.record if not ended.done() else ended.result()
        unknown = record.route == "unknown" and record.error_kind == "not_found"
        if ended.done() and (modern or unknown):
            return Reply(await beside_loop(result_bytes(record), partial(rendered, record, request_id, modern=modern)))
        value = await self._tasks.create(record, ttl, modern=modern)
        return Reply(rpc.result(request_id, {**value, "_meta": rpc.SERVER_META} if modern else value))

    async def _task_result(self, request: Request, message: RpcMessage, request_id: Id) -> Reply:
        """Answer `tasks/result` once the task has ended."""
        _, record = await self._tasks.find(message, request.credential)
        ending = asyncio.ensure_future(self._gate.end_of(record.id))
        return await self._once_ended(request, ending, lambda ended: rpc.result(request_id, tasks.result(ended)))

    async def _ask(self, request: Request, begun: OpenCall, request_id: Id) -> Reply:
        """Answer a call that waits for approval with the question, which the client sends again with the answer."""
        approval, ended = _approval(begun), begun.ended()
        either: set[asyncio.Future[Any]] = {ended, approval}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return Reply(rendered(ended.result(), request_id, modern=True))
        asked = approval.result()
        form = {"method": "elicitation/create", "params": self._forms.request(asked, request.credential)}
        value = {"resultType": "input_required", "inputRequests": {asked.id: form}, "requestState": begun.record.id}
        return Reply(rpc.result(request_id, {**value, "_meta": rpc.SERVER_META}))

    async def _retry(self, request: Request, message: RpcMessage, request_id: Id) -> Reply:
        """Take the answer to a question about an approval, and answer the call that waited."""
        call_id, responses = message.value("requestState"), message.value("inputResponses")
        record = await self._gate.find(call_id) if isinstance(call_id, str) else None
        if record is None or record.credential != request.credential.id:
            raise RpcError(rpc.INVALID_PARAMS, "requestState is not one that an earlier answer gave")
        approval = await self._forms.pending(record.id)
        response = responses.get(approval.id) if isinstance(responses, dict) and approval is not None else None
        if approval is not None and response is not None:
            await self._forms.answer(approval, response, request.credential)
            if isinstance(response, dict) and response.get("action") == "cancel":
                await self._gate.cancel(record.id, "cancelled by its client's user")
        ending = asyncio.ensure_future(self._gate.end_of(record.id))
        return await self._once_ended(request, ending, lambda ended: rendered(ended, request_id, modern=True))

    async def _once_ended(
        self, request: Request, ending: asyncio.Future[CallRecord | None], render: Callable[[CallRecord], bytes]
    ) -> Reply:
        """Answer with the end of a call: as JSON if that is soon, else as a stream."""
        await asyncio.wait({ending}, timeout=SOON_SECONDS if _accepts(request, SSE) else None)

        async def message() -> bytes:
            record = await ending
            assert record is not None, "the call was found before"
            return await beside_loop(result_bytes(record), partial(render, record))

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield rpc.event(await message())

        return Reply(await message()) if ending.done() else self._stream(request, pieces())

    def _stream(self, request: Request, pieces: AsyncGenerator[bytes, None]) -> Reply:
        live = until_gone(request, with_pulse(pieces), self._ending)
        return Reply(content_type=SSE, headers=[(b"x-accel-buffering", b"no")], pieces=live)

    # -- listening --------------------------------------------------------------------------------------

    @route(
        "GET /mcp",
        SCOPES,
        "Messages for an MCP session as server-sent events, or the rest of an interrupted stream.",
        media=(EVENTS,),
        also={**RPC_ERRORS, 405: "Clients without sessions listen by `subscriptions/listen`."},
        errors=(503,),
        narrow=True,
    )
    async def listen(self, request: Request) -> Reply:
        """Open the stream of a session, or resume that of one of its calls."""
        if rpc.is_modern(request):
            raise Problem(405, "method_not_allowed", "send subscriptions/listen", headers=[(b"allow", b"POST")])
        if not _accepts(request, SSE):
            return RpcError(rpc.INVALID_REQUEST, "answers are text/event-stream", status=406).reply(None, modern=False)
        try:
            session = self._session(request)
            seen = request.header(b"last-event-id")
            if seen is not None and (place := read_place(seen)) is not None:
                return self._stream(request, await self._rest(request, *place))
        except RpcError as error:
            return error.reply(None, modern=False)
        self._refuse_when_busy()
        return self._stream(request, self._news(session, seen))

    async def _rest(self, request: Request, call_id: str, request_id: Id) -> AsyncGenerator[bytes, None]:
        record = await self._gate.find(call_id)
        if record is None or record.credential != request.credential.id:
            raise RpcError(rpc.INVALID_REQUEST, "no stream can be resumed from this Last-Event-ID", status=404)

        async def pieces() -> AsyncGenerator[bytes, None]:
            ended = await self._gate.end_of(call_id)
            assert ended is not None
            yield await beside_loop(
                result_bytes(ended),
                lambda: rpc.event(rendered(ended, request_id, modern=False), place_of(call_id, request_id)),
            )

        return pieces()

    async def _news(self, session: Session, seen: str | None) -> AsyncGenerator[bytes, None]:
        listener = Listener()
        session.streams.add(listener)
        try:
            yield b": farhand\n\n"
            async for mark in self._changes(listener, seen):
                yield rpc.event(rpc.notification("notifications/tools/list_changed", {}), mark)
        finally:
            session.streams.discard(listener)

    def _subscribe(self, request: Request, message: RpcMessage, request_id: Id) -> Reply:
        if not _accepts(request, SSE):
            raise RpcError(rpc.INVALID_REQUEST, "a subscription is answered by text/event-stream", status=406)
        wanted = message.value("notifications")
        if not isinstance(wanted, dict):
            raise RpcError(rpc.INVALID_PARAMS, "subscriptions/listen needs notifications")
        self._refuse_when_busy()
        meta = {rpc.SUBSCRIPTION_KEY: request_id}
        honoured = {"toolsListChanged": True} if wanted.get("toolsListChanged") is True else {}

        async def pieces() -> AsyncGenerator[bytes, None]:
            acknowledged = {"notifications": honoured, "_meta": meta}
            yield rpc.event(rpc.notification("notifications/subscriptions/acknowledged", acknowledged))
            async for _ in self._changes(Listener()):
                if honoured:
                    yield rpc.event(rpc.notification("notifications/tools/list_changed", {"_meta": meta}))

        return self._stream(request, pieces())

    async def _changes(self, listener: Listener, seen: str | None = None) -> AsyncGenerator[str, None]:
        """Yield a marker for each change of the tools, the first at once if they differ from `seen`."""
        self._node_registry.listeners.add(listener.wake.set)
        self._listening += 1
        try:
            if seen is not None and seen != self._mark():
                listener.wake.set()
            while True:
                await listener.wake.wait()
                if listener.over:
                    return
                await asyncio.sleep(GATHER_SECONDS)  # a node that connects or leaves causes several changes
                listener.wake.clear()
                yield self._mark()
        finally:
            self._listening -= 1
            self._node_registry.listeners.discard(listener.wake.set)

    def _mark(self) -> str:
        return f"tools:{self._life}:{self._node_registry.version}"

    def _refuse_when_busy(self) -> None:
        if self._listening >= MOST_STREAMS:
            raise Problem(503, "busy", f"{self._listening} clients listen already; try again later")

    @route("DELETE /mcp", SCOPES, "End an MCP session and cancel what is open in it.", also=RPC_ERRORS, narrow=True)
    async def end(self, request: Request) -> Reply:
        if rpc.is_modern(request):
            raise Problem(
                405, "method_not_allowed", "this protocol version has no sessions", headers=[(b"allow", b"POST")]
            )
        try:
            session = self._session(request)
        except RpcError as error:
            return error.reply(None, modern=False)
        notice = SessionNotice(session.id, request.credential.id, ended=True)
        self._sessions.tell(notice)
        await self.heard(notice)
        return Reply(b'{"ended":true}')


def _approval(begun: OpenCall) -> asyncio.Future[Approval]:
    """Return a future that ends when the owner is asked to approve a call."""
    future: asyncio.Future[Approval] = asyncio.get_running_loop().create_future()
    begun.on_approval(lambda approval: None if future.done() else future.set_result(approval))
    return future


def _introduction(version: str | None) -> dict[str, Any]:
    """Return what this server offers; `version` is that of a session."""
    capabilities: dict[str, Any] = {
        "tools": {"listChanged": True},
        "resources": {},
        "prompts": {},
        "completions": {},
        "logging": {},
    }
    if version is None:
        capabilities["extensions"] = {tasks.EXTENSION: {}}
    elif version == TASKS_IN_CORE:
        capabilities["tasks"] = tasks.CAPABILITY
    return {"capabilities": capabilities, "instructions": INSTRUCTIONS}


def _accepts(request: Request, media: bytes) -> bool:
    accept = request.headers.get(b"accept", b"*/*").lower()
    kinds = {part.partition(b";")[0].strip() for part in accept.split(b",")}
    return not kinds.isdisjoint({media, media.partition(b"/")[0] + b"/*", b"*/*"})
