"""Serves the gateway's tools to an MCP client over standard input and output, by forwarding to /mcp."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import selectors
import stat
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2

from farhand.cli.client import Address, tls_context

VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
# The parameter that the header Mcp-Name repeats, by method.
NAMING: Final = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId"),
}
LOST: Final = -32000
PARSE_ERROR: Final = -32700
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
# How long to look for a pending answer after the connection is lost.
RESUME_SECONDS: Final = 120.0
# How long to wait for answers after the client closes our input. Most clients kill us after two seconds, and then
# nothing would cancel their calls.
LAST_ANSWERS_SECONDS: Final = 1.5
FIRST_DELAY: Final = 0.2
MAX_DELAY: Final = 10.0

Json = dict[str, Any]


class Bridge:
    """Forwards messages: each becomes an HTTP request of its own, so none waits for another."""

    def __init__(self, address: Address) -> None:
        self._url = f"{address.url}/mcp"
        self._headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if address.token:
            self._headers["authorization"] = f"Bearer {address.token}"
        trusted = bool(address.certificate or os.environ.get("FARHAND_CA_FILE"))
        verify = tls_context(address.certificate) if trusted else True
        self._http = httpx2.AsyncClient(verify=verify, timeout=httpx2.Timeout(None, connect=10.0))
        # Headers of a client that sent `initialize`.
        self._session: Json = {}
        self._requests: dict[Any, asyncio.Task[None]] = {}
        self._notifications: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Forward messages until the client closes our input."""
        reader = self._reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        timeout = None
        if _is_pollable(sys.stdin.fileno()):
            timeout = LAST_ANSWERS_SECONDS
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        else:
            reader.feed_data(sys.stdin.buffer.read())
            reader.feed_eof()
        async with self._http:
            try:
                while line := await reader.readline():
                    if line.strip():
                        await self._forward(line)
                if self._requests:  # a script closes its output before it reads the answers
                    await asyncio.wait(self._requests.values(), timeout=timeout)
            finally:
                tasks = [*self._requests.values(), *([self._notifications] if self._notifications else [])]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if self._session:
                    with contextlib.suppress(httpx2.HTTPError):
                        await self._http.delete(self._url, headers=self._headers | self._session)

    async def _forward(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            assert isinstance(message, dict)
        except (ValueError, AssertionError, RecursionError):
            error = {"code": PARSE_ERROR, "message": "invalid message: each line must be one JSON object"}
            _send({"jsonrpc": "2.0", "id": None, "error": error})
            return
        if "id" in message and "method" in message:
            request = self._requests[json.dumps(message["id"])] = asyncio.create_task(self._ask(message))
            request.add_done_callback(self._failed)
            if message["method"] == "initialize":  # the following messages belong to the session it opens
                await asyncio.wait([request])
            return
        cancels = message.get("method") == "notifications/cancelled"
        if self._session or not cancels:  # without a session, closing the request cancels it
            with contextlib.suppress(httpx2.HTTPError):
                await self._http.post(self._url, json=message, headers=self._headers | self._headers_of(message))
        if cancels:
            asked = self._requests.get(json.dumps(_params(message).get("requestId")))
            if asked is not None:
                asked.cancel()  # a cancelled request gets no answer
        if message.get("method") == "notifications/initialized" and self._notifications is None:
            self._notifications = asyncio.create_task(self._listen())
            self._notifications.add_done_callback(self._failed)

    def _failed(self, task: asyncio.Task[None]) -> None:
        """Stop when our output cannot be written any more."""
        if not task.cancelled() and isinstance(error := task.exception(), OSError):
            self._reader.set_exception(error)

    def _headers_of(self, message: Json) -> Json:
        """Return the headers of a message's request."""
        version = _version_of(message)
        if version is None:
            return self._session
        name = _params(message).get(NAMING.get(str(message.get("method")), ""))
        named = {"mcp-name": _header_value(name)} if isinstance(name, str) else {}
        return {"mcp-protocol-version": version, "mcp-method": str(message.get("method")), **named}

    async def _ask(self, message: Json) -> None:
        request_id = message["id"]
        event_id: str | None = None
        try:
            headers = self._headers | self._headers_of(message)
            async with self._http.stream("POST", self._url, json=message, headers=headers) as answer:
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    self._relay(message, answer, await answer.aread())
                    return
                async for event_id, received in _events(answer):  # noqa: B007 (used after a lost connection)
                    if received is not None:
                        _send(received)
                        if received.get("id") == request_id:
                            return
            raise httpx2.ReadError("the stream ended without an answer")
        except httpx2.HTTPError as error:
            if event_id is None or not await self._resume(request_id, event_id):
                reason = f"the gateway at {self._url} did not answer: {error or type(error).__name__}"
                _send({"jsonrpc": "2.0", "id": request_id, "error": {"code": LOST, "message": reason}})
        finally:
            self._requests.pop(json.dumps(request_id), None)

    def _relay(self, message: Json, answer: httpx2.Response, body: bytes) -> None:
        request_id = message["id"]
        try:
            received = json.loads(body)
            error = received.get("error")
        except (ValueError, AttributeError):
            received, error = {}, None
        if isinstance(error, dict) and not isinstance(error.get("code"), int):  # an error of the gateway, not of MCP
            received = {"error": {"code": LOST, "message": f"{answer.status_code}: {error.get('message')}"}}
        if not isinstance(received, dict) or not ({"result", "error"} & received.keys()):
            received = {"error": {"code": LOST, "message": f"the gateway answered with status {answer.status_code}"}}
        if message["method"] == "initialize" and "mcp-session-id" in answer.headers:
            version = received.get("result", {}).get("protocolVersion", "")
            self._session = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": version}
        _send({**received, "jsonrpc": "2.0", "id": request_id})

    async def _resume(self, request_id: Any, event_id: str) -> bool:
        """Look for the answer of a request whose stream was lost. Return whether it was found."""
        delay = FIRST_DELAY
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESUME_SECONDS):
                while True:
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, MAX_DELAY)
                    headers = self._headers | self._session | {"last-event-id": event_id}
                    with contextlib.suppress(httpx2.HTTPError):
                        async with self._http.stream("GET", self._url, headers=headers) as answer:
                            if answer.status_code != 200:
                                return False
                            async for seen, received in _events(answer):
                                event_id = seen or event_id
                                if received is not None:
                                    _send(received)
                                    if received.get("id") == request_id:
                                        return True
        return False

    async def _listen(self) -> None:
        """Relay the session's notifications as long as it exists."""
        delay, event_id = FIRST_DELAY, ""
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                headers = self._headers | self._session | ({"last-event-id": event_id} if event_id else {})
                async with self._http.stream("GET", self._url, headers=headers) as answer:
                    if answer.status_code != 200:
                        return
                    delay = FIRST_DELAY
                    async for seen, received in _events(answer):
                        event_id = seen or event_id
                        if received is not None:
                            _send(received)
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_DELAY)


def _is_pollable(descriptor: int) -> bool:
    """Return whether a descriptor can be polled; regular files and /dev/null cannot."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(descriptor, selectors.EVENT_READ)
        except OSError:
            return False
    return True


async def _events(answer: httpx2.Response) -> AsyncIterator[tuple[str | None, Json | None]]:
    """Yield the events of a stream: the last event id, and the message if there is one."""
    event_id: str | None = None
    data: list[str] = []
    async for line in answer.aiter_lines():
        field, _, value = line.partition(":")
        if field == "id":
            event_id = value.strip()
        elif field == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            yield event_id, json.loads(text) if text.strip() else None


def _params(message: Json) -> Json:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _version_of(message: Json) -> str | None:
    """Return the protocol version in a message; None for clients that send `initialize`."""
    meta = _params(message).get("_meta")
    version = meta.get(VERSION_KEY) if isinstance(meta, dict) else None
    return version if isinstance(version, str) else None


def _header_value(text: str) -> str:
    """Return a text as the value of a header; one that headers cannot hold is encoded, as MCP specifies."""
    if text.isascii() and text.isprintable() and text == text.strip():
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def _send(message: Json) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()
