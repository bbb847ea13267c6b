"""The connection to an MCP server that a machine runs: lines of JSON-RPC, relayed by queries.

The gateway's own machine answers the same queries, so there is one way to run a server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farhand.gateway.mcp.settings import McpServerSettings
from farhand.gateway.nodes.queries import Disconnected, Queries, read_answer
from farhand.machine.jobs.line_process import Lines
from farhand.protocol.errors import Failed, NotFound, Timeout, ToolError
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.names import NATIVE
from farhand.protocol.untrusted import one_line

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage


MCP_QUERY: Final = "mcp"
OPEN_SECONDS: Final = 60.0
SEND_SECONDS: Final = 30.0
WAIT_SECONDS: Final = 20.0
# A node that disconnects may return within this time; the server runs on meanwhile.
RETURN_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.5
# A server that writes more must wait: reading its messages takes time of the gateway.
MAX_LINES_PER_SECOND: Final = 2000


class ServerEnded(Failed):
    """The program of the server has ended."""


@contextlib.asynccontextmanager
async def hosted(
    queries: Queries,
    name: str,
    settings: McpServerSettings,
    sealed: dict[str, str],
    ended: asyncio.Event,
    why: list[str],
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server and yield the streams of messages from and to it; the server is ended on exit.

    `sealed`: the secrets that its environment names, for a node. `ended` is set, and the reason added to `why`, when
    the program ends or its machine is lost. Raises ToolError if it cannot be started.
    """
    import anyio  # noqa: PLC0415 - loaded when the first server starts

    machine = settings.node or NATIVE
    server = f"{name}-{token_hex(4)}"
    ask = _Relay(queries, machine, server)
    opening: dict[str, Any] = {"argv": settings.command, "env": settings.env, "cwd": settings.cwd}
    opening |= {"secrets": sealed} if sealed else {}
    await queries.ask(machine, MCP_QUERY, {"action": "open", "server": server, **opening}, OPEN_SECONDS)
    incoming_writer, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, outgoing_reader = anyio.create_memory_object_stream[Any](0)

    async def receive() -> None:
        try:
            async with incoming_writer:
                async for line in ask.lines():
                    await incoming_writer.send(_message(line))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        except ToolError as error:
            why.append(error.message)
        finally:
            ended.set()

    async def send() -> None:
        async with outgoing_reader:
            try:
                async for message in outgoing_reader:
                    await ask.send(message.message.model_dump_json(by_alias=True, exclude_unset=True))
            except ToolError as error:
                why.append(error.message)
                ended.set()

    tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(send())]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (incoming_writer, incoming, outgoing, outgoing_reader):
            stream.close()
        with contextlib.suppress(ToolError):
            await asyncio.shield(queries.ask(machine, MCP_QUERY, {"action": "close", "server": server}, SEND_SECONDS))


class _Relay:
    """Sends lines to one server and fetches its output, across reconnections of its node."""

    def __init__(self, queries: Queries, machine: str, server: str) -> None:
        self._queries = queries
        self._machine = machine
        self._server = server
        self._number = 0

    async def lines(self) -> AsyncIterator[str]:
        """Yield lines until the server ends. Raises ServerEnded or another ToolError."""
        after = 0
        while True:
            wait = {"after": after, "wait_ms": round(WAIT_SECONDS * 1000)}
            answer = await self._ask({"action": "receive", **wait}, WAIT_SECONDS + SEND_SECONDS)
            found = read_answer(self._machine, answer, Lines)
            for line in found.lines:
                yield line
            await asyncio.sleep(len(found.lines) / MAX_LINES_PER_SECOND)
            after = max(after, found.last)
            if found.exited:
                said = one_line(found.errors[-1000:], 1000)
                status = "" if found.exit_code is None else f" with status {found.exit_code}"
                raise ServerEnded(f"the program ended{status}" + (f": {said}" if said else ""))

    async def send(self, line: str) -> None:
        self._number += 1
        await self._ask({"action": "send", "lines": [line], "number": self._number}, SEND_SECONDS)

    async def _ask(self, params: dict[str, Any], seconds: float) -> msgspec.Raw:
        """Ask, and ask again while the node is away; a repeated message has no effect."""
        deadline = asyncio.get_running_loop().time() + RETURN_SECONDS
        while True:
            try:
                return await self._queries.ask(self._machine, MCP_QUERY, {**params, "server": self._server}, seconds)
            except (Failed, Timeout, NotFound) as error:
                away = self._machine != NATIVE and MCP_QUERY not in self._queries.answered_by(self._machine)
                if not (away or isinstance(error, Disconnected)) or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)


def _message(line: str) -> SessionMessage | Exception:
    """Return the message in a line, or the error that its reader reports."""
    from mcp.shared.message import SessionMessage  # noqa: PLC0415 - the extra is loaded when it is first used
    from mcp_types import jsonrpc_message_adapter  # noqa: PLC0415

    try:
        check_value_count(line.encode())
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, msgspec.MsgspecError) as error:
        return error if isinstance(error, ValueError) else ValueError(str(error))
