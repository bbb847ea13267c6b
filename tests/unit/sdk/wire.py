"""Gateways that are not ours, for the client to talk to: one over `websockets`, one that writes its own bytes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gc
import hashlib
import http
import json
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import websockets
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from farhand.sdk import NodeClient, ReconnectBackoff, Shutdown, ToolRegistry

# The original's welcome, key for key.
PLAIN: dict[str, Any] = {"type": "gateway_welcome", "protocol_version": 1, "gateway_version": "0.2.1"}

# A gateway that announced what Farhand adds.
RESUMING = {**PLAIN, "farhand": {"features": ["cancel", "resume", "tools"], "gateway_id": "g1"}}

AT_ONCE = ReconnectBackoff(initial_delay=0.01, max_delay=0.05)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of its own; it also fails if it leaves a task or an unretrieved exception behind."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        unseen: list[str] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(str(context)))
            async with asyncio.timeout(60):
                await test(*arguments, **keywords)
            for _ in range(100):
                strays = asyncio.all_tasks() - {asyncio.current_task()}
                if not strays:
                    break
                await asyncio.sleep(0.01)
            assert not strays
            gc.collect()
            await asyncio.sleep(0)

        asyncio.run(main())
        assert not unseen

    return run


class Peer:
    """The gateway's end of one connection."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.hello: Any = None
        assert connection.request is not None
        self.path = connection.request.path
        self.headers = connection.request.headers
        self.released = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.connection.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def receive(self, kind: str | None = None) -> Any:
        """The next message, or the next of this type."""
        async with asyncio.timeout(60):
            while True:
                frame = await self.connection.recv()
                assert isinstance(frame, str), "the node sent a binary frame"
                message = json.loads(frame)
                if kind is None or message["type"] == kind:
                    return message

    async def request(self, request_id: str, tool: str, args: Any = None, **more: Any) -> None:
        await self.send({"type": "tool_request", "request_id": request_id, "tool": tool, "args": args, **more})

    async def call(self, tool: str, args: Any = None, request_id: str = "r", **more: Any) -> Any:
        """The response to one request."""
        await self.request(request_id, tool, args, **more)
        response = await self.receive("tool_response")
        assert response["request_id"] == request_id
        return response

    async def round_trip(self) -> None:
        """Everything sent before has been seen by the node once this returns."""
        await self.send({"type": "ping", "timestamp": -77})
        while (await self.receive("pong"))["timestamp"] != -77:
            pass

    async def quiet(self) -> list[Any]:
        """What the node sends, pings apart, until it has seen everything sent so far."""
        await self.send({"type": "ping", "timestamp": -78})
        seen = []
        while (message := await self.receive()) != {"type": "pong", "timestamp": -78}:
            if message["type"] != "ping":
                seen.append(message)
        return seen

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self.connection.close(code, reason)

    def cut(self) -> None:
        """End the connection as a broken cable would: no close frame."""
        self.connection.transport.abort()

    async def ended(self) -> int | None:
        """The close code once the node's end is gone; None when there was no close frame."""
        async with asyncio.timeout(60):
            with contextlib.suppress(websockets.ConnectionClosed):
                while True:
                    await self.connection.recv()
            await self.connection.wait_closed()
        return self.connection.protocol.close_rcvd.code if self.connection.protocol.close_rcvd else None


class FakeGateway:
    """Accepts nodes, one `accept` at a time; `refusals` are HTTP answers given to the next upgrades instead."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._open: list[Peer] = []
        self.refusals: list[tuple[int, str]] = []
        self.refusal_headers: dict[str, str] = {}
        self.upgrades = 0
        self.paths: list[str] = []
        self.url = ""

    async def __aenter__(self) -> FakeGateway:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            0,
            process_request=self._refuse,
            ping_interval=None,
            max_size=None,
            compression=None,
            ssl=self._tls,
            close_timeout=2,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        self.url = f"{'wss' if self._tls else 'ws'}://127.0.0.1:{self.port}/v1/nodes/ws"
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self._open:
            peer.released.set()
        self._server.close()
        await self._server.wait_closed()

    def _refuse(self, _connection: ServerConnection, request: Request) -> Response | None:
        self.upgrades += 1
        self.paths.append(request.path)
        if not self.refusals:
            return None
        status, body = self.refusals.pop(0)
        headers = Headers([("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        headers.update(self.refusal_headers)
        return Response(status, http.HTTPStatus(status).phrase, headers, body.encode())

    async def _serve(self, connection: ServerConnection) -> None:
        peer = Peer(connection)
        self._open.append(peer)
        self._peers.put_nowait(peer)
        await peer.released.wait()

    async def accept(self, welcome: dict[str, Any] | None = PLAIN) -> Peer:
        """The next node that connects, its hello read and, unless None, its welcome sent."""
        async with asyncio.timeout(60):
            peer = await self._peers.get()
        peer.hello = await peer.receive()
        if welcome is not None:
            await peer.send(welcome)
        return peer


class Served:
    """A client at work; `ending` is what `run` raised."""

    def __init__(self, client: NodeClient, registry: ToolRegistry) -> None:
        self.client = client
        self.registry = registry
        self.shutdown = asyncio.Event()
        self.task = client.spawn(registry, self.shutdown)

    async def ending(self) -> BaseException:
        async with asyncio.timeout(60):
            await asyncio.wait({self.task})
        error = self.task.exception()
        assert error is not None
        return error


@contextlib.asynccontextmanager
async def serving(url: str, registry: ToolRegistry, **options: Any) -> AsyncIterator[Served]:
    """A client serving `registry`; when the block ends it is shut down and must say so."""
    options.setdefault("reconnect_backoff", AT_ONCE)
    options.setdefault("node_id", "probe1")
    served = Served(NodeClient(url, **options), registry)
    try:
        yield served
    finally:
        if served.task.done():
            served.task.exception()
        else:
            served.shutdown.set()
            with pytest.raises(Shutdown):
                async with asyncio.timeout(60):
                    await served.task


# -- bytes by hand ----------------------------------------------------------------------------------------


def ws_frame(payload: str | bytes, opcode: int = 1, *, fin: bool = True) -> bytes:
    """One unmasked frame, as a server sends it."""
    data = payload.encode() if isinstance(payload, str) else payload
    first = (0x80 if fin else 0) | opcode
    if len(data) < 126:
        return struct.pack("!BB", first, len(data)) + data
    if len(data) < 1 << 16:
        return struct.pack("!BBH", first, 126, len(data)) + data
    return struct.pack("!BBQ", first, 127, len(data)) + data


class RawPeer:
    """A TCP connection whose bytes the test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def upgrade(self, also: bytes = b"") -> None:
        """Read the upgrade and answer it, with `also` in the same write."""
        request = await self.reader.readuntil(b"\r\n\r\n")
        key = next(
            line.partition(b":")[2].strip()
            for line in request.split(b"\r\n")
            if line.lower().startswith(b"sec-websocket-key:")
        )
        digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        self.writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n" + also
        )

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def hang_up(self) -> None:
        """End the connection, so that the node need not wait for a goodbye this peer never says."""
        self.writer.close()

    async def read_frame(self) -> tuple[int, bytes]:
        """Opcode and payload of the node's next frame."""
        async with asyncio.timeout(60):
            first, second = await self.reader.readexactly(2)
            assert second & 0x80, "a client masks its frames"
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
            mask = await self.reader.readexactly(4)
            data = await self.reader.readexactly(length)
        return first & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))

    async def receive(self, kind: str) -> Any:
        while True:
            opcode, payload = await self.read_frame()
            if opcode == 1 and (message := json.loads(payload))["type"] == kind:
                return message

    async def at_end(self) -> bool:
        """True once the node has closed its end."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        return True


class RawGateway:
    """A listening socket without manners."""

    def __init__(self) -> None:
        self._peers: asyncio.Queue[RawPeer] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> RawGateway:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}/v1/nodes/ws"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._peers.put_nowait(RawPeer(reader, writer))

    async def accept(self) -> RawPeer:
        async with asyncio.timeout(60):
            return await self._peers.get()
