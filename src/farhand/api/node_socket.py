"""The node socket: who may connect, the hello, and then messages both ways until silence or a close."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from urllib.parse import unquote

from farhand.api.guard import refuse_upgrade
from farhand.api.http import Problem, Receive, Reply, Scope, Send
from farhand.gateway.credentials import NodeGrant
from farhand.gateway.hub import Hub
from farhand.gateway.roster import (
    CLOSE_BAD_HELLO,
    CLOSE_HELLO_TIMEOUT,
    CLOSE_SILENT,
    Connection,
    HelloRefused,
)
from farhand.protocol.errors import ProtocolError
from farhand.protocol.messages import NodeHello, Ping, Pong, ToolResponse, ToolsUpdate, decode, encode
from farhand.protocol.version import HELLO_SECONDS, LINK_DEADLINE_SECONDS, LINK_PING_SECONDS, MAX_HELLO_BYTES

log = logging.getLogger("farhand.nodes")

BEARER = "bearer."
INVALID_TOKEN = b"invalid or missing node token"


class SocketLink:
    """The roster's hold on a socket."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open = True

    async def send(self, frame: bytes) -> None:
        if self._open:
            try:
                await self._send({"type": "websocket.send", "text": frame.decode()})
            except (OSError, RuntimeError):  # the server's ways of saying that the peer has gone
                self._open = False

    async def close(self, code: int, reason: str) -> None:
        if self._open:
            self._open = False
            try:
                await self._send({"type": "websocket.close", "code": code, "reason": _fitting(reason)})
            except (OSError, RuntimeError):
                log.debug("the socket was gone before it could be closed with %d", code)

    def gone(self) -> None:
        self._open = False


class NodeSocket:
    """An ASGI application for `/v1/nodes/ws`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Serve a node to its end; False when its token was wrong."""
        try:
            grant, subprotocol = self._grant(scope)
        except Problem as problem:
            reply = Reply(str(problem).encode(), status=problem.status, content_type=b"text/plain; charset=utf-8")
            await refuse_upgrade(receive, send, reply)
            return problem.status != 401
        await receive()
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        link = SocketLink(send)
        try:
            connection = await self._greet(receive, link, grant)
        except HelloRefused as refused:
            log.warning("a node was refused: %s", refused)
            await link.close(refused.code, str(refused))
            return True
        if connection is None:
            return True
        try:
            await _Conversation(self._hub, connection, link, receive).run()
        finally:
            link.gone()
            await self._hub.leave(connection)
        return True

    def _grant(self, scope: Scope) -> tuple[NodeGrant, str | None]:
        """What the upgrade may do, and the subprotocol to answer with. Raises Problem."""
        query = _query(scope["query_string"].decode("latin-1"))
        secrets, subprotocol = _secrets(scope, query)
        claimed = query.get("node_id", "")
        for claim in {unquote(claimed), unquote(claimed.replace("+", " "))}:
            for secret in secrets:
                grant = self._hub.credentials.recognise_node(secret, claim)
                if grant is not None:
                    return grant, subprotocol
        raise Problem(401, "unauthorized", INVALID_TOKEN.decode())

    async def _greet(self, receive: Receive, link: SocketLink, grant: NodeGrant) -> Connection | None:
        """The connection of a node that said a proper hello in time. Raises HelloRefused; None if it left."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self._hello(receive)
        except TimeoutError:
            raise HelloRefused(CLOSE_HELLO_TIMEOUT, f"no node_hello within {HELLO_SECONDS:.0f} s") from None
        if hello is None:
            return None
        card = self._hub.roster.examine(hello, grant.node_id)
        await link.send(encode(self._hub.welcome(hello)))
        return self._hub.join(card, hello, link)

    async def _hello(self, receive: Receive) -> NodeHello | None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            if text is None:
                continue
            if len(text) > MAX_HELLO_BYTES:
                raise HelloRefused(1009, f"a hello has at most {MAX_HELLO_BYTES} bytes")
            try:
                hello = decode(text)
            except ProtocolError as error:
                if '"node_hello"' in text:
                    raise HelloRefused(CLOSE_BAD_HELLO, f"this hello cannot be read: {error}") from None
                continue
            if isinstance(hello, NodeHello):
                return hello


class _Conversation:
    """A node's messages, until it leaves or falls silent."""

    def __init__(self, hub: Hub, connection: Connection, link: SocketLink, receive: Receive) -> None:
        self._hub = hub
        self._connection = connection
        self._link = link
        self._receive = receive
        self._heard_at = time.monotonic()

    async def run(self) -> None:
        reader = asyncio.ensure_future(self._read())
        watcher = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({reader, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, watcher):
                task.cancel()
            await asyncio.gather(reader, watcher, return_exceptions=True)

    async def _read(self) -> None:
        receive, roster, connection = self._receive, self._hub.roster, self._connection
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            self._heard_at = time.monotonic()
            roster.seen(connection)
            text = message.get("text")
            if text is None:
                continue
            try:
                parsed = decode(text)
            except ProtocolError as error:
                log.debug("node %s: ignored a frame: %s", connection.node_id, error)
                continue
            if isinstance(parsed, ToolResponse):
                self._hub.gate.answered(connection, parsed)
            elif isinstance(parsed, Ping):
                await self._link.send(encode(Pong(parsed.timestamp)))
            elif isinstance(parsed, ToolsUpdate):
                self._hub.update(connection, parsed)

    async def _watch(self) -> None:
        """Ask a silent node whether it is there; give it up when it does not answer."""
        while True:
            silent = time.monotonic() - self._heard_at
            if silent >= LINK_DEADLINE_SECONDS:
                log.warning("node %s has been silent for %.0f s", self._connection.node_id, silent)
                await self._link.close(CLOSE_SILENT, "silent for too long")
                return
            if silent >= LINK_PING_SECONDS:
                await self._link.send(encode(Ping(time.time_ns() // 1_000_000)))
                await asyncio.sleep(min(5.0, LINK_DEADLINE_SECONDS - silent))
            else:
                await asyncio.sleep(LINK_PING_SECONDS - silent)


def _query(text: str) -> dict[str, str]:
    """The undecoded query values. Raises Problem when `token` or `node_id` comes twice."""
    values: dict[str, str] = {}
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if key in values and key in ("token", "node_id"):
            raise Problem(400, "invalid_request", f"the query names {key} twice")
        values[key] = value
    return values


def _secrets(scope: Scope, query: dict[str, str]) -> tuple[list[str], str | None]:
    """The token as it may be meant, best form first, and the subprotocol to answer with."""
    subprotocols: list[str] = scope.get("subprotocols", [])
    answer = next((name for name in subprotocols if not name.startswith(BEARER)), None)
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return [value[7:].decode("latin-1").strip()], answer
    for name in subprotocols:
        if name.startswith(BEARER):
            try:
                encoded = name.removeprefix(BEARER)
                secret = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, ValueError):
                continue
            return [secret], answer or name
    token = query.get("token")
    if not token:
        return [""], answer
    # A seed client sends the token unencoded, so a plus may be a plus or stand for a space.
    return list(dict.fromkeys([unquote(token), unquote(token.replace("+", " ")), token])), answer


def _fitting(reason: str) -> str:
    """A close frame carries at most 123 bytes of reason."""
    return reason.encode()[:123].decode(errors="ignore")
