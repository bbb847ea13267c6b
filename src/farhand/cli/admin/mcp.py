"""`mcp`: the gateway's tools for MCP clients that start a program and talk to it over its input and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import stat
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import click
import httpx2

from farhand.cli.client import Address, Client, client_command, trust

VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
LOST: Final = -32000
PARSE_ERROR: Final = -32700
LONGEST_LINE: Final = 64 * 1024 * 1024
# How long an answer that was under way is looked for after the gateway went away.
AWAY_SECONDS: Final = 120.0
# How long a client that has closed our input may still be answered: after two seconds most would kill us, and with us
# gone nobody cancels what they left behind.
LAST_ANSWERS_SECONDS: Final = 1.5
FIRST_DELAY: Final = 0.2
LONGEST_DELAY: Final = 10.0

Json = dict[str, Any]


@click.command()
@client_command
def mcp(client: Client, as_json: bool) -> None:  # noqa: ARG001
    """Serve the gateway's tools to an MCP client on standard input and output.

    For clients that start a program; those that take a URL use /mcp of the gateway itself. What is read and written are
    lines of JSON-RPC, with or without --json.

    \b
    Example, in the settings of such a client:
      {"mcpServers": {"farhand": {"command": "farhand", "args": ["mcp"]}}}
    """
    asyncio.run(Bridge(client.find()).run())


class Bridge:
    """Passes messages on: each request is one of HTTP, so none waits for another."""

    def __init__(self, address: Address) -> None:
        self._url = f"{address.url}/mcp"
        self._headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if address.token:
            self._headers["authorization"] = f"Bearer {address.token}"
        verify = trust() if os.environ.get("FARHAND_CA_FILE") else True
        self._http = httpx2.AsyncClient(verify=verify, timeout=httpx2.Timeout(None, connect=10.0))
        # Headers of a client that shook hands.
        self._session: Json = {}
        self._asked: dict[Any, asyncio.Task[None]] = {}
        self._news: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the client closes our input."""
        reader = self._reader = asyncio.StreamReader(limit=LONGEST_LINE)
        patience = None
        if _can_be_waited_for(sys.stdin.fileno()):
            patience = LAST_ANSWERS_SECONDS
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        else:
            reader.feed_data(sys.stdin.buffer.read())
            reader.feed_eof()
        async with self._http:
            try:
                while line := await reader.readline():
                    if line.strip():
                        await self._pass_on(line)
                if self._asked:  # a script says all it has to say and then listens
                    await asyncio.wait(self._asked.values(), timeout=patience)
            finally:
                tasks = [*self._asked.values(), *([self._news] if self._news else [])]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if self._session:
                    with contextlib.suppress(httpx2.HTTPError):
                        await self._http.delete(self._url, headers=self._headers | self._session)

    async def _pass_on(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            assert isinstance(message, dict)
        except (ValueError, AssertionError, RecursionError):
            _say({"jsonrpc": "2.0", "id": None, "error": {"code": PARSE_ERROR, "message": "a line is one message"}})
            return
        if "id" in message and "method" in message:
            asking = self._asked[json.dumps(message["id"])] = asyncio.create_task(self._ask(message))
            asking.add_done_callback(self._failed)
            if message["method"] == "initialize":  # what follows belongs to the session that it opens
                await asyncio.wait([asking])
            return
        cancels = message.get("method") == "notifications/cancelled"
        if self._session or not cancels:  # without a session, to leave is to cancel
            with contextlib.suppress(httpx2.HTTPError):
                await self._http.post(self._url, json=message, headers=self._headers | self._described(message))
        if cancels:
            asked = self._asked.get(json.dumps(_params(message).get("requestId")))
            if asked is not None:
                asked.cancel()  # who cancelled is not answered
        if message.get("method") == "notifications/initialized" and self._news is None:
            self._news = asyncio.create_task(self._listen())
            self._news.add_done_callback(self._failed)

    def _failed(self, task: asyncio.Task[None]) -> None:
        """When nobody reads our output any more, there is nothing left to do."""
        if not task.cancelled() and isinstance(error := task.exception(), OSError):
            self._reader.set_exception(error)

    def _described(self, message: Json) -> Json:
        """The headers that go with a message."""
        version = _version_of(message)
        if version is None:
            return self._session
        name = _params(message).get("name")
        named = {"mcp-name": name} if message.get("method") == "tools/call" and isinstance(name, str) else {}
        return {"mcp-protocol-version": version, "mcp-method": str(message.get("method")), **named}

    async def _ask(self, message: Json) -> None:
        asked = message["id"]
        mark: str | None = None
        try:
            headers = self._headers | self._described(message)
            async with self._http.stream("POST", self._url, json=message, headers=headers) as answer:
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    self._answered(message, answer, await answer.aread())
                    return
                async for mark, told in _events(answer):  # noqa: B007 (it is wanted when the line breaks)
                    if told is not None:
                        _say(told)
                        if told.get("id") == asked:
                            return
            raise httpx2.ReadError("the stream ended before the answer")
        except httpx2.HTTPError as error:
            if mark is None or not await self._take_up(asked, mark):
                reason = f"the gateway at {self._url} did not answer: {error or type(error).__name__}"
                _say({"jsonrpc": "2.0", "id": asked, "error": {"code": LOST, "message": reason}})
        finally:
            self._asked.pop(json.dumps(asked), None)

    def _answered(self, message: Json, answer: httpx2.Response, body: bytes) -> None:
        asked = message["id"]
        try:
            told = json.loads(body)
            said = told.get("error")
        except (ValueError, AttributeError):
            told, said = {}, None
        if isinstance(said, dict) and not isinstance(said.get("code"), int):  # not MCP's: a token that is not known …
            told = {"error": {"code": LOST, "message": f"{answer.status_code}: {said.get('message')}"}}
        if not isinstance(told, dict) or not ({"result", "error"} & told.keys()):
            told = {"error": {"code": LOST, "message": f"the gateway answered with status {answer.status_code}"}}
        if message["method"] == "initialize" and "mcp-session-id" in answer.headers:
            version = told.get("result", {}).get("protocolVersion", "")
            self._session = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": version}
        _say({**told, "jsonrpc": "2.0", "id": asked})

    async def _take_up(self, asked: Any, mark: str) -> bool:
        """Look for the answer of a call whose stream was lost, while the gateway may come back."""
        delay = FIRST_DELAY
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAY_SECONDS):
                while True:
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, LONGEST_DELAY)
                    headers = self._headers | self._session | {"last-event-id": mark}
                    with contextlib.suppress(httpx2.HTTPError):
                        async with self._http.stream("GET", self._url, headers=headers) as answer:
                            if answer.status_code != 200:
                                return False
                            async for seen, told in _events(answer):
                                mark = seen or mark
                                if told is not None:
                                    _say(told)
                                    if told.get("id") == asked:
                                        return True
        return False

    async def _listen(self) -> None:
        """News of the session, for as long as there is one."""
        delay, mark = FIRST_DELAY, ""
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                headers = self._headers | self._session | ({"last-event-id": mark} if mark else {})
                async with self._http.stream("GET", self._url, headers=headers) as answer:
                    if answer.status_code != 200:
                        return
                    delay = FIRST_DELAY
                    async for seen, told in _events(answer):
                        mark = seen or mark
                        if told is not None:
                            _say(told)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_DELAY)


def _can_be_waited_for(descriptor: int) -> bool:
    """Whether the system tells when there is more to read; of files, and of /dev/null, it does not."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(descriptor, selectors.EVENT_READ)
        except OSError:
            return False
    return True


async def _events(answer: httpx2.Response) -> AsyncIterator[tuple[str | None, Json | None]]:
    """The events of a stream: the newest mark, and the message if there is one."""
    mark: str | None = None
    data: list[str] = []
    async for line in answer.aiter_lines():
        field, _, value = line.partition(":")
        if field == "id":
            mark = value.strip()
        elif field == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            text, data = "\n".join(data), []
            yield mark, json.loads(text) if text.strip() else None


def _params(message: Json) -> Json:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _version_of(message: Json) -> str | None:
    """The version a message says it is of; None for those of clients that shake hands."""
    meta = _params(message).get("_meta")
    version = meta.get(VERSION_KEY) if isinstance(meta, dict) else None
    return version if isinstance(version, str) else None


def _say(message: Json) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()
