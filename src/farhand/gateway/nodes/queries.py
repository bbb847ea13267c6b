"""Query nodes outside tool calls: the output of a command, the running jobs, the installed programs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.protocol.errors import Failed, NotFound, Timeout, ToolError
from farhand.protocol.json_limits import check_value_count
from farhand.protocol.messages import NodeAnswer, NodeQuery, encode
from farhand.protocol.names import NATIVE
from farhand.protocol.version import MIB

MAX_OPEN = 1024
# The maximum size of each kind of answer, in bytes.
LARGEST_ANSWER = 1 * MIB
LARGEST_ANSWERS = {"output": 2 * MIB, "jobs": 4 * MIB, "preview": 8 * MIB, "logs": 16 * MIB, "mcp": 24 * MIB}

T = TypeVar("T")
Query = Callable[[msgspec.Raw], Awaitable[Any]]


class Disconnected(Failed):
    """The node disconnected before it answered."""


class Queries:
    """Query connected nodes. Queries are not recorded and can be repeated."""

    def __init__(
        self, node_registry: NodeRegistry, own: Mapping[str, Query] | None = None, *, first_number: int = 1
    ) -> None:
        """Create the client; `own` answers for the gateway's own machine, under a name that no node can have.

        `first_number`: where the numbers of queries begin; gateways that share nodes use different ones.
        """
        self._node_registry = node_registry
        self._numbers = itertools.count(first_number)
        self._open: dict[int, tuple[Connection, str, asyncio.Future[msgspec.Raw]]] = {}
        self._own = own or {}

    def answered_by(self, node_id: str) -> Collection[str]:
        return self._own if node_id == NATIVE else self._node_registry.queries(node_id)

    async def ask(self, node_id: str, kind: str, params: Any, seconds: float) -> msgspec.Raw:
        """Send a query and return the answer.

        Raises NotFound if the node is not connected or does not answer such queries, Failed, Timeout.
        """
        if node_id == NATIVE and kind in self._own:
            answer = await self._own[kind](msgspec.Raw(msgspec.json.encode(params)))
            return msgspec.Raw(msgspec.json.encode(answer))
        node = self._node_registry.nodes.get(node_id)
        connection = node.connection if node else None
        if connection is None:
            raise NotFound(node.absence if node else self._node_registry.unknown(node_id))
        if kind not in connection.queries:
            raise NotFound(f"node {node_id!r} does not answer questions about {kind}")
        if len(self._open) >= MAX_OPEN:
            raise Failed("busy: too many questions are open; try again later")
        number = next(self._numbers)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open[number] = (connection, kind, future)
        connection.link.send(encode(NodeQuery(number, kind, msgspec.Raw(msgspec.json.encode(params)))))
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise Timeout(f"node {node_id!r} did not answer within {seconds:g} s") from None
        finally:
            del self._open[number]

    def answered(self, connection: Connection, answer: NodeAnswer) -> None:
        asked, kind, future = self._open.get(answer.query_id, (None, "", None))
        if asked is not connection or future is None or future.done():
            return
        most = LARGEST_ANSWERS.get(kind, LARGEST_ANSWER)
        if answer.error is not UNSET:
            future.set_exception(ToolError.of(answer.error.kind, answer.error.message))
        elif answer.result is UNSET:
            future.set_result(msgspec.Raw(b"null"))
        elif (size := memoryview(answer.result).nbytes) > most:
            said = f"the answer of node {connection.node_id!r} has {size} bytes; at most {most} are read"
            future.set_exception(Failed(said))
        else:
            try:
                check_value_count(answer.result)
            except msgspec.DecodeError as error:
                future.set_exception(Failed(f"the answer of node {connection.node_id!r} was rejected: {error}"))
            else:
                future.set_result(answer.result)

    def left(self, connection: Connection) -> None:
        for asked, _, future in self._open.values():
            if asked is connection and not future.done():
                future.set_exception(Disconnected(f"node {connection.node_id!r} disconnected"))


def read_answer(node_id: str, answer: msgspec.Raw, kind: type[T]) -> T:
    """Decode the answer of a node, which is not trusted. Raises Failed if it does not have the expected shape."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise Failed(f"node {node_id!r} sent an answer that cannot be read: {error}") from None
