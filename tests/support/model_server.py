"""An OpenAI-compatible server over real HTTP with scripted replies, which keeps the requests.

    with ModelServer(calls(("read", {"path": "a.txt"})), text("It says hello.")) as server:
        ...                              # base URL: server.url; any key
        assert server.requests[1].messages[-1]["role"] == "tool"

Replies are given in order, or by `answer`, a function of the request. Without either left, the server answers 500 and
says so. It runs in a thread of its own, so tests may be synchronous or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Reply:
    """How one request is answered."""

    # Streaming chunks, as objects, or as bytes that are sent as they are.
    chunks: list[dict[str, Any] | bytes] = dataclasses.field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    # Instead of chunks: the whole answer, streaming or not.
    body: bytes | None = None
    # Write the stream in pieces of this many bytes, which splits lines and characters.
    piece: int = 0
    # Close the connection after the chunks instead of ending the stream.
    cut: bool = False
    # End the stream with `[DONE]`.
    done: bool = True
    # Held back until this is set, after the head of the response and `before_gate` chunks were sent.
    gate: threading.Event | None = None
    before_gate: int = 0
    # Seconds before the answer begins, for time-outs and benchmarks; tests that wait use `gate`.
    delay: float = 0.0
    # Close the connection at once, without a response.
    reset: bool = False


@dataclasses.dataclass
class Request:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    # Monotonic time of arrival.
    at: float
    # Set when the client disconnected before the answer was complete.
    left: threading.Event
    # Set when the answer was sent whole.
    ended: threading.Event

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.json["messages"]
        return messages

    @property
    def tools(self) -> list[str]:
        """Names of the tools the model was offered."""
        return [tool["function"]["name"] for tool in self.json.get("tools", [])]


def text(
    content: str,
    *,
    pieces: int = 3,
    thinking: str = "",
    finish_reason: str = "stop",
    usage: tuple[int, int] | None = (10, 5),
    cached: int = 0,
    cost: float | None = None,
    **options: Any,
) -> Reply:
    """A reply in words, in that many deltas."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if thinking:
        deltas.append({"reasoning_content": thinking})
    size = max(1, -(-len(content) // max(1, pieces)))
    deltas += [{"content": content[start : start + size]} for start in range(0, len(content), size)]
    return Reply(_chunks(deltas, finish_reason, usage, cached, cost), **options)


def calls(
    *uses: tuple[str, Any],
    say: str = "",
    ids: list[str | None] | None = None,
    split: bool = True,
    usage: tuple[int, int] | None = (10, 5),
    **options: Any,
) -> Reply:
    """A reply that calls tools: (name, arguments as an object, or as text to be sent as it is).

    With `split` the arguments come in several deltas by index, as OpenAI sends them; without, whole, as Ollama does.
    """
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": say or None}]
    for index, (name, arguments) in enumerate(uses):
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        identity = ids[index] if ids else f"call_{name}_{index}_{time.monotonic_ns()}"
        head: dict[str, Any] = {"index": index, "type": "function", "function": {"name": name, "arguments": ""}}
        if identity is not None:
            head["id"] = identity
        if not split:
            head["function"]["arguments"] = written
            deltas.append({"tool_calls": [head]})
            continue
        deltas.append({"tool_calls": [head]})
        half = len(written) // 2
        for part in (written[:half], written[half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    return Reply(_chunks(deltas, "tool_calls", usage, 0, None), **options)


def error(status: int, message: str = "no", *, retry_after: str | None = None, **fields: Any) -> Reply:
    """An error as OpenAI words it."""
    headers = {"retry-after": retry_after} if retry_after is not None else {}
    body = json.dumps({"error": {"message": message, "type": "error", "code": None, **fields}}).encode()
    return Reply(status=status, headers=headers, body=body)


def raw(*pieces: bytes, **options: Any) -> Reply:
    """A stream of exactly these bytes, each piece in a write of its own."""
    return Reply(list(pieces), done=False, **options)


class ModelServer:
    """Use as a context manager. `url` is what `OPENAI_BASE_URL` takes."""

    def __init__(self, *replies: Reply, answer: Callable[[Request], Reply | None] | None = None, port: int = 0) -> None:
        # Chat completions asked for, in order of arrival.
        self.requests: list[Request] = []
        # How many were opened.
        self.connections = 0
        self.models = ["scripted"]
        self._replies = list(replies)
        self._answer = answer
        self._port = port
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stopping: asyncio.Event | None = None

    def __enter__(self) -> ModelServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """What a gateway needs to use this server."""
        return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": "scripted-key", "FARHAND_MODEL": "scripted"}

    def add(self, *replies: Reply) -> None:
        with self._lock:
            self._replies += replies

    @property
    def left(self) -> int:
        """Replies that were not requested yet."""
        return len(self._replies)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            task = asyncio.ensure_future(self._connection(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read_request(reader)) is not None:
                if not await self._respond(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _respond(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can take another request."""
        if request.path.endswith("/models"):
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            _write_whole(writer, 200, {}, json.dumps(listed).encode())
            return True
        reply = self._next(request)
        sending = asyncio.ensure_future(self._send(reply, request, writer))
        # A client that hangs up is noticed while the answer is on its way, not only at the next write.
        watching = asyncio.ensure_future(_gone(reader))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                request.left.set()
                return False
            return await sending
        except ConnectionError:
            request.left.set()
            return False
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    def _next(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            reply = self._answer(request) if self._answer else None
            if reply is None and self._replies:
                reply = self._replies.pop(0)
        return reply or error(500, f"the script has no reply for request {len(self.requests)}")

    async def _send(self, reply: Reply, request: Request, writer: asyncio.StreamWriter) -> bool:
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.reset:
            return False
        if reply.body is not None or not request.json.get("stream"):
            await _open(reply.gate)
            body = reply.body if reply.body is not None else json.dumps(_whole(reply, request)).encode()
            _write_whole(writer, reply.status, reply.headers, body)
            await writer.drain()
            request.ended.set()
            return True
        writer.write(_head(reply.status, {"content-type": "text/event-stream", **reply.headers}, None))
        lines = [
            chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
            for chunk in reply.chunks
        ]
        for index, line in enumerate(lines):
            if index == reply.before_gate:
                await writer.drain()
                await _open(reply.gate)
            size = reply.piece or len(line)
            for start in range(0, len(line), size):
                _write_chunk(writer, line[start : start + size])
                await writer.drain()
                if reply.piece:
                    await asyncio.sleep(0)
        if len(lines) <= reply.before_gate:
            await _open(reply.gate)
        if reply.cut:
            return False
        if reply.done:
            _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        request.ended.set()
        return True


def _chunks(
    deltas: list[dict[str, Any]], finish_reason: str, usage: tuple[int, int] | None, cached: int, cost: float | None
) -> list[dict[str, Any] | bytes]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    chunks: list[dict[str, Any] | bytes] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
    if usage is not None:
        counted: dict[str, Any] = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if cost is not None:
            counted["cost"] = cost
        chunks.append({**head, "choices": [], "usage": counted})
    return chunks


def _whole(reply: Reply, request: Request) -> dict[str, Any]:
    """The chunks put together, for a request that does not stream."""
    content, finish_reason, usage = "", "stop", None
    uses: dict[int, dict[str, Any]] = {}
    for chunk in reply.chunks:
        assert not isinstance(chunk, bytes), "raw bytes are for streams"
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                use = uses.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                if "id" in part:
                    use["id"] = part["id"]
                for field, value in part["function"].items():
                    use["function"][field] += value
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if uses:
        message["tool_calls"] = list(uses.values())
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": request.json.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": usage,
    }


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, time.monotonic(), threading.Event(), threading.Event())


async def _gone(reader: asyncio.StreamReader) -> None:
    # Without reading: what is there may be the next request already.
    while not reader.at_eof():
        await asyncio.sleep(0.005)


async def _open(gate: threading.Event | None) -> None:
    while gate is not None and not gate.is_set():
        await asyncio.sleep(0.002)


def _head(status: int, headers: dict[str, str], length: int | None) -> bytes:
    framing = {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in {**headers, **framing}.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _write_whole(writer: asyncio.StreamWriter, status: int, headers: dict[str, str], body: bytes) -> None:
    writer.write(_head(status, {"content-type": "application/json", **headers}, len(body)) + body)


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
