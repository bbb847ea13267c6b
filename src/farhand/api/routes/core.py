"""The HTTP routes of the hub."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from farhand import __version__
from farhand.api.node_socket.login import INVALID_TOKEN, node_grant
from farhand.api.routes.invoke import InvokeAnswer, InvokeDoor, InvokeRequest, RouteTaken
from farhand.api.routes.shapes import (
    Alive,
    CallsAnswer,
    CallShown,
    Health,
    NodesAnswer,
    TokenMade,
    TokensAnswer,
    ToolsAnswer,
    Version,
)
from farhand.api.server.conditional import not_modified, not_modified_reply, requested_range, unsatisfiable
from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.route_docs import BYTES, EVENTS, JSON, PARTIAL, About, Query
from farhand.api.server.router import Route
from farhand.api.server.streams import until_gone
from farhand.gateway.access.credentials import CALLER_SCOPES, NARROW_CALLER_SCOPES, Scope
from farhand.gateway.calls.output_redaction import covered
from farhand.gateway.hub import Hub, Output
from farhand.protocol.calls import NULL
from farhand.protocol.errors import ErrorKind, FarhandError, ToolError
from farhand.protocol.key_auth import key_text, read_key
from farhand.protocol.names import NATIVE
from farhand.store.journal.events import Event
from farhand.store.tables.calls import LEFT_OUT, CallRecord, CallState
from farhand.store.tables.tokens import Token

CALL_QUERY = (
    Query("limit", "How many at most: 1 to 1000, 50 by default.", int),
    Query("before", "Older than this call."),
    Query("tool", "Of this tool."),
    Query("node_id", "Of this node."),
    Query("state", "In this state.", CallState),
    Query("session_key", "Of this session."),
    Query("group", "Of this fan-out."),
    Query(
        "bodies", "0 leaves arguments and results out. A list has 32 MiB of them at most, those of the newest calls."
    ),
)
OUTPUT_QUERY = (
    Query("offset", "From this byte on.", int),
    Query("wait", "0 gives what is there and ends."),
)
EVENT_QUERY = (
    Query("last_event_id", "After this event; the header Last-Event-ID does the same.", int),
    Query("follow", "0 ends after what is there."),
)
CALL_FILTERS = ("tool", "node_id", "state", "session_key")


class ProbeRequest(msgspec.Struct):
    bins: list[str]


class TokenRequest(msgspec.Struct):
    node_id: str | None = None
    label: str = ""
    scopes: list[Scope] | None = None
    # Patterns (`laptop__*`) of the tools it is for; none: all.
    tools: list[str] = []
    # The nodes it is for; none: all.
    nodes: list[str] = []
    expires_seconds: float | None = None
    # Of a node, as `farhand node key` shows it: then there is no secret to carry over.
    public_key: str | None = None


_probe_decoder = msgspec.json.Decoder(ProbeRequest)
_token_decoder = msgspec.json.Decoder(TokenRequest)
_encode = msgspec.json.Encoder().encode


def routes(hub: Hub) -> list[Route]:
    doors = Doors(hub)
    return [
        Route("GET", "/healthz", None, doors.healthz, about=About("The gateway answers.", answer=Alive)),
        Route(
            "GET",
            "/readyz",
            None,
            doors.readyz,
            about=About("The gateway can take calls.", answer=Alive, also={503: "It cannot."}),
        ),
        Route("GET", "/version", None, doors.version, about=About("The version of the gateway.", answer=Version)),
        Route("GET", "/v1/health", Scope.READ, doors.health, about=About("How the gateway is.", answer=Health)),
        Route(
            "GET",
            "/v1/nodes",
            Scope.READ,
            doors.nodes,
            about=About("Every known node, connected or not.", answer=NodesAnswer),
        ),
        Route(
            "DELETE",
            "/v1/nodes/{node_id}",
            Scope.ADMIN,
            doors.forget_node,
            about=About("Forget a node that is offline.", errors=(409,)),
        ),
        Route(
            "GET",
            "/v1/nodes/ws",
            None,
            doors.not_an_upgrade,
            guessable=True,
            about=About("The node socket: connect with a WebSocket.", status=101, media=(), errors=(401,)),
        ),
        Route(
            "GET",
            "/v1/tools",
            Scope.READ,
            doors.tools,
            about=About(
                "The tools that can be called now.", answer=ToolsAnswer, query=(Query("agent", "For this agent."),)
            ),
        ),
        Route(
            "POST",
            "/v1/tools/invoke",
            Scope.TOOLS_READ,
            InvokeDoor(hub).answer,
            narrow=True,
            content=True,
            about=About(
                "Call a tool; 200 whatever the tool said.",
                body=InvokeRequest,
                answer=InvokeAnswer,
                media=(JSON, EVENTS),
                errors=(409, 503),
                idempotent=True,
            ),
        ),
        Route(
            "GET",
            "/v1/calls",
            Scope.READ,
            doors.calls,
            about=About("Calls, newest first.", answer=CallsAnswer, query=CALL_QUERY),
        ),
        Route("GET", "/v1/calls/{call_id}", Scope.READ, doors.call, about=About("One call.", answer=CallShown)),
        Route(
            "DELETE",
            "/v1/calls/{call_id}",
            Scope.TOOLS_EXEC,
            doors.cancel,
            about=About("Cancel a call; the answer tells how it ended.", answer=CallShown),
        ),
        Route(
            "GET",
            "/v1/calls/{call_id}/output",
            Scope.READ,
            doors.call_output,
            about=About(
                "What a call's command printed, then live until it ends.",
                media=(BYTES,),
                query=OUTPUT_QUERY,
                also=PARTIAL,
                errors=(416, 502),
            ),
        ),
        Route(
            "GET",
            "/v1/jobs",
            Scope.READ,
            doors.jobs,
            about=About("Commands of the nodes, newest first.", query=(Query("node_id", "Of this node alone."),)),
        ),
        Route(
            "GET",
            "/v1/nodes/{node_id}/jobs/{job_id}/output",
            Scope.READ,
            doors.job_output,
            about=About(
                "What a command printed, then live until it ends.",
                media=(BYTES,),
                query=OUTPUT_QUERY,
                also=PARTIAL,
                errors=(416, 502),
            ),
        ),
        Route(
            "POST",
            "/v1/nodes/{node_id}/probe",
            Scope.READ,
            doors.probe,
            about=About("Ask a node which programs it has.", body=ProbeRequest, errors=(502,)),
        ),
        Route(
            "GET",
            "/v1/events",
            Scope.READ,
            doors.events,
            about=About("The journal as server-sent events.", media=(EVENTS,), query=EVENT_QUERY),
        ),
        Route(
            "GET",
            "/v1/tokens",
            Scope.ADMIN,
            doors.tokens,
            about=About("Every token, without its secret.", answer=TokensAnswer),
        ),
        Route(
            "POST",
            "/v1/tokens",
            Scope.ADMIN,
            doors.create_token,
            about=About(
                "Make a token; its secret is shown this once.", body=TokenRequest, status=201, answer=TokenMade
            ),
        ),
        Route("DELETE", "/v1/tokens/{token_id}", Scope.ADMIN, doors.revoke_token, about=About("Revoke a token.")),
    ]


class Doors:
    """One method for each route."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    # -- health -----------------------------------------------------------------------------------------

    async def healthz(self, _request: Request) -> Reply:
        return json_reply({"ok": True})

    async def readyz(self, _request: Request) -> Reply:
        healthy = self._hub.healthy
        return json_reply({"ok": healthy}, 200 if healthy else 503)

    async def version(self, _request: Request) -> Reply:
        return json_reply({"version": __version__})

    async def health(self, _request: Request) -> Reply:
        nodes = self._hub.node_registry.nodes.values()
        return json_reply(
            {
                "status": "ok" if self._hub.healthy else "failing",
                "version": __version__,
                "gateway_id": self._hub.gateway_id,
                "nodes": {"known": len(nodes), "online": sum(node.online for node in nodes)},
                "calls": {"open": len(self._hub.gate.open_records())},
                "frozen": self._hub.freeze.order,
                "store": {
                    "backup_at": self._hub.backup_at,
                    "backup_failure": self._hub.backup_failure,
                    "recovery": self._hub.recovery,
                },
            }
        )

    # -- nodes and tools --------------------------------------------------------------------------------

    async def not_an_upgrade(self, request: Request) -> Reply:
        grant, _ = node_grant(self._hub.credentials, list(request.headers.items()), request.query_string)
        if grant is None:
            raise Problem(401, "unauthorized", INVALID_TOKEN, headers=[(b"www-authenticate", b"Bearer")])
        raise Problem(400, "upgrade_required", "this is the node socket: connect to it with a WebSocket")

    async def nodes(self, _request: Request) -> Reply:
        nodes = [
            {
                "node_id": node_id,
                "name": node.card.name,
                "node_type": node.card.node_type,
                "version": node.card.version,
                "tags": node.card.tags,
                "capabilities": node.card.capabilities,
                "refused_capabilities": node.card.refused,
                "tools": [spec.name for spec in node.card.tools],
                "role": node.card.role,
                "online": node.online,
                "frozen": node.connection is not None and node.connection.frozen is not None,
                "connected_at": node.connected_at,
                "last_seen": node.last_seen,
                "running": node.running,
                "runtime": node.card.runtime,
            }
            for node_id, node in sorted(self._hub.node_registry.nodes.items())
        ]
        primary = self._hub.node_registry.primary()
        name = primary.card.node_id if primary else None
        return json_reply({"nodes": nodes, "count": len(nodes), "primary": name})

    async def forget_node(self, request: Request) -> Reply:
        node_id = request.params["node_id"]
        try:
            known = await self._hub.forget(node_id)
        except FarhandError as error:
            raise Problem(409, "conflict", str(error)) from None
        if not known:
            raise Problem(404, "not_found", f"there is no node {node_id!r}")
        return json_reply({"forgotten": node_id})

    async def tools(self, _request: Request) -> Reply:
        return json_reply({"tools": self._hub.catalog.offers()})

    # -- calls ------------------------------------------------------------------------------------------

    async def calls(self, request: Request) -> Reply:
        limit = request.query_int("limit", 50, 1, 1000)
        filters = {name: value for name in CALL_FILTERS if (value := request.query(name)) is not None}
        state = filters.get("state")
        if state is not None and state not in {known.value for known in CallState}:
            known_states = ", ".join(known.value for known in CallState)
            raise Problem(400, "invalid_request", f"state must be one of {known_states}, not {state!r}")
        bodies = request.flag("bodies")
        before, group = request.query("before"), request.query("group")
        records = await self._hub.calls(filters, limit, before, group, bodies=bodies)
        views = [self._view(record) for record in records]
        for record, view in zip(records, views, strict=True):
            if not bodies or record.args == LEFT_OUT:
                view.pop("args", None)
                view.pop("result", None)
        return json_reply({"calls": views, "count": len(views)})

    async def call(self, request: Request) -> Reply:
        record = await self._hub.gate.find(request.params["call_id"])
        if record is None:
            raise _no_call(request)
        return json_reply(self._view(record))

    async def cancel(self, request: Request) -> Reply:
        gate, call_id = self._hub.gate, request.params["call_id"]
        over = not gate.is_open(call_id)
        record = await gate.cancel(call_id)
        if record is None:
            raise _no_call(request)
        own = request.credential.id in (record.credential, record.on_behalf_of)
        view = self._view(record) if own or request.credential.may(Scope.READ) else _state_view(record)
        return json_reply({**view, "already_over": over})

    def _view(self, record: CallRecord) -> dict[str, Any]:
        view = _call_view(record)
        if record.state is CallState.WAITING:
            opened = self._hub.gate.waiting_calls.calls.get(record.id)
            waiting = opened.waiting if opened else None
            view["waits_for"] = waiting.why if waiting else "approval"
            view["approval_id"] = waiting.approval.id if waiting and waiting.approval else None
        return view

    # -- what commands print ----------------------------------------------------------------------------

    async def call_output(self, request: Request) -> Reply:
        record = await self._hub.gate.find(request.params["call_id"])
        if record is None or record.route == "unknown":
            raise _no_call(request)
        return await self._output(request, record.node_id or NATIVE, {"call_id": record.id})

    async def job_output(self, request: Request) -> Reply:
        return await self._output(request, request.params["node_id"], {"job_id": request.params["job_id"]})

    async def _output(self, request: Request, node_id: str, of: dict[str, str]) -> Reply:
        """Bytes from `offset` on: what is there with `wait=0`, else until the command has ended."""
        offset = request.query_int("offset", 0, 0, 2**62)
        wanted = requested_range(request)
        if wanted is not None and wanted.first < 0:  # the end of what is still being written is not known
            wanted = None
        wait = request.flag("wait") and wanted is None
        if wanted is not None:
            offset = wanted.first
        pages = covered(lambda place: self._hub.output(node_id, of, place, wait=wait), offset, self._hub.secrets)
        try:
            first = await anext(pages)
        except ToolError as error:
            raise _node_problem(error) from None
        headers = [(b"x-offset", b"%d" % first.offset)]
        if not wait:
            most = None if wanted is None or wanted.last is None else wanted.last + 1
            page, parts = first, [first.data]
            async with aclosing(pages):
                while most is None or page.next_offset < most:
                    following = await anext(pages, None)
                    if following is None:
                        break
                    page = following
                    parts.append(page.data)
            headers += [(b"x-next-offset", b"%d" % page.next_offset), (b"x-over", b"true" if page.over else b"false")]
            if page.over:
                etag = f"{next(iter(of.values()))}-{page.next_offset}"
                headers.append((b"etag", f'"{etag}"'.encode()))
                if wanted is None and not_modified(request, etag):
                    return not_modified_reply(headers)
            data = b"".join(parts)
            if wanted is None:
                return Reply(data, content_type=b"application/octet-stream", headers=headers, bare=True)
            data = data if most is None else data[: max(0, most - first.offset)]
            if not data:
                raise unsatisfiable(page.next_offset)
            total = b"%d" % page.next_offset if page.over else b"*"
            part = b"bytes %d-%d/%b" % (first.offset, first.offset + len(data) - 1, total)
            headers.append((b"content-range", part))
            return Reply(data, status=206, content_type=b"application/octet-stream", headers=headers, bare=True)
        pieces = until_gone(request, _bytes(first, pages), self._hub.ending)
        return Reply(content_type=b"application/octet-stream", headers=headers, pieces=pieces, bare=True)

    async def jobs(self, request: Request) -> Reply:
        jobs, silent = await self._hub.jobs(request.query("node_id"))
        return json_reply({"jobs": jobs, "count": len(jobs), "unanswered": silent})

    async def probe(self, request: Request) -> Reply:
        wanted: ProbeRequest = await request.json(_probe_decoder)
        try:
            runtime = await self._hub.probe(request.params["node_id"], wanted.bins)
        except ToolError as error:
            raise _node_problem(error) from None
        return json_reply(runtime)

    # -- the journal ------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Reply:
        last = request.header(b"last-event-id") or request.query("last_event_id")
        if last is not None and (not last.isdecimal() or len(last) > 18):
            raise Problem(400, "invalid_request", f"Last-Event-ID must be the id of an event, not {last[:50]!r}")
        follow = request.flag("follow")
        # The place to begin is settled before the answer begins: whoever has seen it misses nothing afterwards.
        end = await self._hub.last_event()
        position = end if last is None else min(int(last), end)
        pages = _stream(self._hub.events(position, follow=follow), behind=last is not None and position < int(last))
        pieces = until_gone(request, pages, self._hub.ending)
        return Reply(content_type=b"text/event-stream; charset=utf-8", pieces=pieces)

    # -- tokens -----------------------------------------------------------------------------------------

    async def tokens(self, _request: Request) -> Reply:
        return json_reply({"tokens": [_token_view(token) for token in await self._hub.tokens()]})

    async def create_token(self, request: Request) -> Reply:
        wanted: TokenRequest = await request.json(_token_decoder)
        usual = NARROW_CALLER_SCOPES if wanted.tools or wanted.nodes else CALLER_SCOPES
        scopes = [scope.value for scope in (usual if wanted.scopes is None else wanted.scopes)]
        if not scopes:
            raise Problem(400, "invalid_request", "a token needs at least one scope")
        try:
            key = None if wanted.public_key is None else read_key(wanted.public_key)
            token, secret = await self._hub.create_token(
                public_key=key,
                node_id=wanted.node_id,
                label=wanted.label,
                scopes=scopes,
                tools=wanted.tools,
                nodes=wanted.nodes,
                expires_seconds=wanted.expires_seconds,
                made_by=request.credential.id,
            )
        except ValueError as error:
            raise Problem(400, "invalid_request", str(error)) from None
        return json_reply({**_token_view(token), "token": secret}, 201, bare=True)

    async def revoke_token(self, request: Request) -> Reply:
        token_id = request.params["token_id"]
        removed = await self._hub.revoke_token(token_id)
        if not removed:
            raise Problem(404, "not_found", f"there is no valid token {token_id!r}")
        return json_reply({"revoked": token_id, "also": [token.id for token in removed[1:]]})


def _state_view(record: CallRecord) -> dict[str, Any]:
    """Return a call of another credential for one that may cancel it, but not read it."""
    return {"request_id": record.id, "id": record.id, "state": record.state.value}


def _call_view(record: CallRecord) -> dict[str, Any]:
    view: dict[str, Any] = {
        "request_id": record.id,
        "id": record.id,
        "tool": record.tool,
        "state": record.state.value,
        "route": RouteTaken(record.route, record.node_id, record.capability),
        "args": record.args,
        "credential": record.credential,
        "on_behalf_of": record.on_behalf_of,
        "session_key": record.session_key,
        "agent_id": record.agent_id,
        "background": record.background,
        "created_at": record.created_at,
        "deadline_at": record.deadline_at,
        "ended_at": record.ended_at,
        "duration_ms": None if record.duration_ms is None else round(record.duration_ms),
    }
    if record.state is CallState.OK:
        view["result"] = NULL if record.result is None else record.result
    elif record.error_kind is not None:
        view["error"] = {"kind": record.error_kind, "message": record.error_message}
    return view


def _token_view(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "label": token.label,
        "node_id": token.node_id,
        "scopes": token.scopes.split(),
        "created_at": token.created_at,
        "revoked_at": token.revoked_at,
        "tools": token.tools.split(),
        "nodes": token.nodes.split(),
        "expires_at": token.expires_at,
        "public_key": None if token.public_key is None else key_text(token.public_key),
        "last_used_at": token.last_used_at,
        "made_by": token.made_by,
    }


def _node_problem(error: ToolError) -> Problem:
    """Turn what a node answered to a question into an HTTP error."""
    statuses = {ErrorKind.NOT_FOUND: 404, ErrorKind.INVALID_ARGS: 400, ErrorKind.NOT_ALLOWED: 403}
    return Problem(statuses.get(error.kind, 502), error.kind.value, error.message)


def _no_call(request: Request) -> Problem:
    return Problem(404, "not_found", f"there is no call {request.params['call_id'][:100]!r}")


async def _stream(pages: AsyncIterator[list[Event]], *, behind: bool) -> AsyncGenerator[bytes, None]:
    """`behind`: the reader has seen events that this journal, an older copy brought back, does not have."""
    yield b": farhand journal\n\n"
    if behind:
        yield b": the journal ends before that event; what is new follows\n\n"
    async for page in pages:
        if not page:
            yield b": still here\n\n"
            continue
        yield b"".join(
            b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.kind.encode(), _encode(event)) for event in page
        )


async def _bytes(first: Output, pages: AsyncIterator[Output]) -> AsyncGenerator[bytes, None]:
    yield first.data
    async for page in pages:
        yield page.data
