"""`/mcp`: the tools of a credential for MCP clients (streamable HTTP), through the gate like any other call.

A fast answer is JSON; a call that takes longer, or whose caller asks for progress, becomes a stream of server-sent
events. A client with a session that loses such a stream resumes it with `Last-Event-ID`: the call continues meanwhile
and is found in the record, even after a restart of the gateway. A client without a session cancels a call by
disconnecting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial
from secrets import token_hex
from typing import Any, Final

import msgspec
from msgspec import UNSET

from farhand.api.mcp import messages as rpc
from farhand.api.mcp.messages import Id, Message, RpcError
from farhand.api.mcp.sessions import MOST_STREAMS, Asked, Listener, Session, Sessions
from farhand.api.mcp.tools import Names, outcome, tools
from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.large_bodies import beside_loop, result_bytes
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import ClientWatch, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import CallProgress, OpenCall, new_call_id
from farhand.gateway.calls.output_redaction import covered
from farhand.gateway.nodes.machines_tool import NODE_LIST
from farhand.gateway.nodes.output import RemoteCommands
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import ToolError
from farhand.protocol.names import NATIVE
from farhand.protocol.redaction import KnownSecrets
from farhand.store.tables.calls import CallRecord

# The origin of these calls, for the policy.
MCP: Final = ("mcp",)
# An answer within this time is JSON: no client's limit for an event applies to it.
SOON_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 0.3
# Interval of progress events for a call that prints nothing.
QUIET_SECONDS: Final = 5.0
MOST_TAIL: Final = 500
GATHER_SECONDS: Final = 0.1
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
        secrets: KnownSecrets,
        ending: asyncio.Event,
    ) -> None:
        """`ending` is set when the gateway stops."""
        self._node_registry = node_registry
        self._catalog = catalog
        self._gate = gate
        self._commands = commands
        self._secrets = secrets
        self._ending = ending
        self._names = Names(node_registry, catalog)
        self._sessions = Sessions(gateway_id)
        self._listening = 0
        self._life = token_hex(4)

    # -- messages ---------------------------------------------------------------------------------------

    @route(
        "POST /mcp",
        SCOPES,
        "A message of the Model Context Protocol (streamable HTTP).",
        body=Message,
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

    async def _take(self, request: Request, message: Message, modern: bool) -> Reply:
        """Handle a notification, or an unexpected answer."""
        if modern:
            rpc.check_version(request.header(b"mcp-protocol-version") or "")
            return Reply(status=202)
        session = self._session(request)
        if message.method == "notifications/cancelled":
            cancelled = message.value("requestId")
            asked = session.calls.get(cancelled) if isinstance(cancelled, int | str) else None
            if asked is not None:
                asked.given_up = True
                reason = message.value("reason")
                told = f": {reason[:500]}" if isinstance(reason, str) and reason else ""
                await self._gate.cancel(asked.call_id, f"cancelled by its client{told}")
        return Reply(status=202)

    async def _answer(self, request: Request, message: Message, request_id: Id, modern: bool) -> Reply:
        method = message.method
        if method == "initialize" and not modern:
            return self._initialize(request, message, request_id)
        session = None if modern else self._session(request)
        if method == "tools/call":
            return await self._call(request, message, request_id, session)
        if method == "subscriptions/listen" and modern:
            return self._subscribe(request, message, request_id)
        if method == "tools/list":
            cursor = message.value("cursor")
            if not isinstance(cursor, str | None):
                raise RpcError(rpc.INVALID_PARAMS, "cursor must be one that an earlier answer gave")
            value, cached = tools(self._catalog, request.principal, cursor), 0
        elif method == "server/discover" and modern:
            value, cached = {"supportedVersions": list(rpc.MODERN_VERSIONS), **_introduction()}, DISCOVERED_MS
        elif method == "ping" and not modern:
            return Reply(rpc.result(request_id, {}))
        else:
            raise RpcError(rpc.METHOD_NOT_FOUND, f"there is no method {str(method)[:100]!r} here")
        return Reply(rpc.result(request_id, rpc.complete(value, modern=modern, cached_ms=cached)))

    def _initialize(self, request: Request, message: Message, request_id: Id) -> Reply:
        wanted = message.value("protocolVersion")
        if not isinstance(wanted, str):
            raise RpcError(rpc.INVALID_PARAMS, "initialize needs protocolVersion")
        version = wanted if wanted in rpc.HANDSHAKE_VERSIONS else rpc.HANDSHAKE_VERSIONS[-1]
        session = self._sessions.begin(request.credential.id)
        told = {"protocolVersion": version, "serverInfo": rpc.SERVER, **_introduction()}
        return Reply(rpc.result(request_id, told), headers=[(b"mcp-session-id", session.id.encode())])

    def _session(self, request: Request) -> Session:
        return self._sessions.find(request.header(b"mcp-session-id"), request.credential.id)

    # -- calls ------------------------------------------------------------------------------------------

    async def _call(self, request: Request, message: Message, request_id: Id, session: Session | None) -> Reply:
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
        begun = await self._gate.begin(call, principal=request.principal, own=own, origins=MCP)
        exchange = _Exchange(
            self._gate, self._commands, self._secrets, begun, request_id, message.progress_token, session
        )
        asked = Asked(call.id)
        if session is not None:
            session.calls[request_id] = asked
        ended = begun.ended()
        ended.add_done_callback(exchange.over)
        # Clients without a session cancel by disconnecting; others cancel explicitly and may return for the answer.
        watch = ClientWatch(request, lambda: self._gate.abandon(begun)) if session is None else None
        patience = SOON_SECONDS if message.progress_token is None else PROGRESS_SECONDS
        try:
            await asyncio.wait({ended}, timeout=patience if _accepts(request, SSE) else None)
        except asyncio.CancelledError:
            if session is None:
                self._gate.abandon(begun)
            raise
        finally:
            if watch is not None:
                watch.stop()
        if ended.done():
            if asked.given_up and _accepts(request, SSE):
                return Reply(content_type=SSE)  # a cancelled request gets no answer: its stream ends empty
            record = ended.result()
            render = partial(_ended, record, request_id, modern=session is None)
            return Reply(await beside_loop(result_bytes(record), render))
        version = request.header(b"mcp-protocol-version") or rpc.ASSUMED_VERSION
        return self._stream(request, exchange.pieces(version))

    def _stream(self, request: Request, pieces: AsyncGenerator[bytes, None]) -> Reply:
        live = until_gone(request, with_pulse(pieces), self._ending)
        return Reply(content_type=SSE, headers=[(b"x-accel-buffering", b"no")], pieces=live)

    # -- listening --------------------------------------------------------------------------------------

    @route(
        "GET /mcp",
        SCOPES,
        "News for an MCP session as server-sent events, or the rest of a stream that was lost.",
        media=(EVENTS,),
        also={
            **{
                202: "A notification was taken.",
                400: "No message, or one that contradicts itself: a JSON-RPC error.",
                404: "No such session, or method.",
                406: "The client does not take what would be answered.",
            },
            405: "Clients without sessions listen by `subscriptions/listen`.",
        },
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
            if seen is not None and (place := _read_place(seen)) is not None:
                return self._stream(request, await self._rest(request, *place))
        except RpcError as error:
            return error.reply(None, modern=False)
        self._refuse_when_busy()
        return self._stream(request, self._news(session, seen))

    async def _rest(self, request: Request, call_id: str, request_id: Id) -> AsyncGenerator[bytes, None]:
        record = await self._gate.find(call_id)
        if record is None or record.credential != request.credential.id:
            raise RpcError(rpc.INVALID_REQUEST, "there is nothing to take up again at this Last-Event-ID", status=404)

        async def pieces() -> AsyncGenerator[bytes, None]:
            ended = await self._gate.end_of(call_id)
            assert ended is not None
            yield await beside_loop(
                result_bytes(ended),
                lambda: rpc.event(_ended(ended, request_id, modern=False), _place(call_id, request_id)),
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

    def _subscribe(self, request: Request, message: Message, request_id: Id) -> Reply:
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
        self._sessions.end(session)
        for asked in list(session.calls.values()):
            asked.given_up = True
            await self._gate.cancel(asked.call_id, "its client ended the session")
        return Reply(b'{"ended":true}')


class _Exchange:
    """A call whose answer becomes a stream."""

    def __init__(
        self,
        gate: Gate,
        commands: RemoteCommands,
        secrets: KnownSecrets,
        opened: OpenCall,
        request_id: Id,
        token: Id | None,
        session: Session | None,
    ) -> None:
        self._gate = gate
        self._commands = commands
        self._secrets = secrets
        self._opened = opened
        self._request_id = request_id
        self._token = token
        self._session = session

    def over(self, _ended: asyncio.Future[CallRecord]) -> None:
        if self._session is None:
            return
        asked = self._session.calls.get(self._request_id)
        if asked is not None and asked.call_id == self._opened.record.id:
            del self._session.calls[self._request_id]

    async def pieces(self, version: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer; with a session they have ids, so that a lost stream can be resumed."""
        place = None if self._session is None else _place(self._opened.record.id, self._request_id)
        ended = self._opened.ended()
        news: asyncio.Queue[bytes | None] = asyncio.Queue(2)
        ended.add_done_callback(lambda _: news.put_nowait(None))
        telling = asyncio.ensure_future(self._tell(news)) if self._token is not None else None
        try:
            if place is not None:
                yield rpc.opening(version, place)
            while (message := await news.get()) is not None:
                yield rpc.event(message, place)
            record = ended.result()
            yield await beside_loop(
                result_bytes(record),
                lambda: rpc.event(_ended(record, self._request_id, modern=self._session is None), place),
            )
        finally:
            if telling is not None:
                telling.cancel()
            if self._session is None and not ended.done():
                self._gate.abandon(self._opened)

    async def _tell(self, news: asyncio.Queue[bytes | None]) -> None:
        """Report progress: the tool's, else the elapsed time with the last line that the call's command printed."""
        record = self._opened.record
        began = time.monotonic()
        of, commands = {"call_id": record.id}, self._commands
        # Redact before cutting out a line, so that partial secrets are recognised.
        pages = covered(lambda at: commands.output(record.node_id or NATIVE, of, at, wait=True), 0, self._secrets)
        tail = b""
        printing = True
        by_tool: bool | None = None
        following: asyncio.Future[Any] | None = None
        changed = self._opened.progress_changed()
        try:
            while True:
                if printing and following is None:
                    following = asyncio.ensure_future(anext(pages, None))
                waiting = {changed, following} if following is not None else {changed}
                await asyncio.wait(waiting, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                printed = quiet = not any(one.done() for one in waiting)
                if following is not None and following.done():
                    page = None
                    with contextlib.suppress(ToolError):
                        page = following.result()
                    following = None
                    printing = page is not None
                    if page is not None and page.data:
                        tail = (tail + page.data)[-MOST_TAIL:]
                        printed = True
                said = self._opened.progress
                if changed.done():
                    changed = self._opened.progress_changed()
                elif not printed and not quiet:
                    continue
                if by_tool is None:  # numbers must grow, so both kinds are never mixed
                    by_tool = said is not None
                seconds = round(time.monotonic() - began, 3)
                params = {"progressToken": self._token, **_progress(seconds, tail, said, by_tool=by_tool)}
                if news.empty():  # a slow reader gets only the newest, after it has read the last
                    news.put_nowait(rpc.notification("notifications/progress", params))
                await asyncio.sleep(PROGRESS_SECONDS)
        finally:
            changed.cancel()
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
            await pages.aclose()


def _progress(seconds: float, tail: bytes, said: CallProgress | None, *, by_tool: bool) -> dict[str, Any]:
    """Return the fields of a progress notification, `by_tool` in the numbers of the tool, else in seconds."""
    lines = tail.decode(errors="replace").rstrip().splitlines()
    text = lines[-1] if lines else f"at work for {seconds:.0f} s"
    if said is None:
        return {"progress": seconds, "message": text}
    message = said.message or f"{100 * said.progress / said.total:.0f} %"
    if not by_tool:
        return {"progress": seconds, "message": message}
    return {"progress": said.progress, "total": said.total, "message": message}


def _introduction() -> dict[str, Any]:
    return {"capabilities": {"tools": {"listChanged": True}}, "instructions": INSTRUCTIONS}


def _ended(record: CallRecord, request_id: Id, *, modern: bool) -> bytes:
    if record.route == "unknown" and record.error_kind == "not_found":
        return RpcError(rpc.INVALID_PARAMS, f"Unknown tool: {record.error_message}").told(request_id)
    return rpc.result(request_id, rpc.complete(outcome(record), modern=modern))


def _place(call_id: str, request_id: Id) -> str:
    """Return the position at which a stream resumes: the call, and the id of its answer."""
    return f"call:{call_id}:{msgspec.json.encode(request_id).hex()}"


def _read_place(mark: str) -> tuple[str, Id] | None:
    kind, _, rest = mark.partition(":")
    call_id, _, encoded = rest.partition(":")
    if kind != "call":
        return None
    try:
        request_id = msgspec.json.decode(bytes.fromhex(encoded), type=Id)
    except (ValueError, msgspec.MsgspecError):
        return None
    return call_id, request_id


def _accepts(request: Request, media: bytes) -> bool:
    accept = request.headers.get(b"accept", b"*/*").lower()
    kinds = {part.partition(b";")[0].strip() for part in accept.split(b",")}
    return not kinds.isdisjoint({media, media.partition(b"/")[0] + b"/*", b"*/*"})
