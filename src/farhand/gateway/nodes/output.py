"""List commands on nodes and read their output."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec

from farhand.gateway.nodes.queries import Queries, read_answer
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.errors import ErrorKind, Failed, ToolError
from farhand.protocol.names import NATIVE
from farhand.protocol.redaction import KnownSecrets, OffsetRedactor

log = logging.getLogger(__name__)

OUTPUT_WAIT_MS = 20_000
# Short, so that a reader quickly learns whether there is output and where it starts.
FIRST_WAIT_MS = 200
NODE_AWAY_SECONDS = 120.0
JOBS_SECONDS = 5.0
INPUT_SECONDS = 24 * 60 * 60.0


class Output(msgspec.Struct, frozen=True):
    """Hold a piece of a command's output and its position."""

    offset: int
    next_offset: int
    data: bytes
    over: bool
    skipped: int = 0
    # Columns and rows of the command's terminal, if it has one.
    size: tuple[int, int] | None = None
    # How the command ended, in the last piece.
    exit_code: int | None = None
    signal: str | None = None

    def masked(self, redactor: OffsetRedactor, *, flush: bool) -> Output:
        """Return the part that can be shown now, without secrets; `flush` as in `OffsetRedactor.feed`."""
        offset, data = redactor.feed(self.offset, self.data, flush=flush)
        return msgspec.structs.replace(self, offset=offset, next_offset=offset + len(data), data=data)


class JobView(msgspec.Struct, frozen=True):
    """Describe a command as its node reports it."""

    job_id: str
    command: str
    started_at: int
    running: bool
    call_id: str | None = None
    workdir: str = ""
    pid: int = 0
    background: bool = False
    ended_at: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    lost: bool = False
    output_bytes: int = 0
    # Columns and rows of its terminal, if it has one.
    size: tuple[int, int] | None = None


# The number of commands a node keeps, and as many running ones.
JobViews = Annotated[list[JobView], msgspec.Meta(max_length=16_384)]


class RemoteCommands:
    """Query nodes about their commands; the gateway's own machine is `gsv`."""

    def __init__(
        self,
        node_registry: NodeRegistry,
        queries: Queries,
        secrets: KnownSecrets,
        *,
        is_open: Callable[[str], Awaitable[bool]],
        closing: Callable[[], bool],
    ) -> None:
        """Create the reader.

        `secrets` are masked in output. `is_open` returns whether a call is open, `closing` whether the gateway is
        stopping.
        """
        self._node_registry = node_registry
        self._queries = queries
        self._secrets = secrets
        self._is_open = is_open
        self._closing = closing

    async def output(
        self, node_id: str, of: Mapping[str, str], offset: int, *, wait: bool
    ) -> AsyncGenerator[Output, None]:
        """Yield a command's output from `offset` on, without secrets; with `wait`, until the command has ended.

        Waits for a node that disconnects. Raises ToolError if the node does not know the command or stays offline.
        """
        redactor = self.redactor(offset)
        offset = redactor.next_offset
        own = node_id == NATIVE
        away_since: float | None = None
        begun = False
        while True:
            wait_ms = 0 if not wait else OUTPUT_WAIT_MS if begun else FIRST_WAIT_MS
            node = self._node_registry.nodes.get(node_id)
            connection = node.connection if node else None
            try:
                params = {**of, "offset": offset, "wait_ms": wait_ms}
                answer = await self._queries.ask(node_id, "output", params, OUTPUT_WAIT_MS / 1000 + 10)
            except ToolError as error:
                if not wait or (node is None and not own):
                    raise
                # Disconnected, or reconnected.
                if node is not None and (connection is None or node.connection is not connection):
                    now = time.monotonic()
                    away_since = away_since or now
                    if now - away_since > NODE_AWAY_SECONDS:
                        raise
                    await asyncio.sleep(0.2)
                elif begun or error.kind is not ErrorKind.NOT_FOUND or not await self._may_start(node_id, of):
                    raise
                else:
                    await asyncio.sleep(0.02)
                continue
            begun = True
            away_since = None
            page = read_answer(node_id, answer, Output)
            if page.next_offset < offset + len(page.data):
                raise Failed(f"node {node_id!r} sent output that does not follow what it sent before")
            offset = page.next_offset
            yield page.masked(redactor, flush=page.over)
            if page.over or (not wait and not page.data) or self._closing():
                return

    def redactor(self, offset: int) -> OffsetRedactor:
        """Return what removes secrets from output that is read from `offset` on."""
        return OffsetRedactor(self._secrets, offset)

    async def page(self, node_id: str, of: Mapping[str, str], offset: int, wait_ms: int) -> Output:
        """Return the output from `offset` on, or from the end on if it is negative; waits if there is none yet.

        Its secrets are not masked: see `Output.masked`. Raises ToolError if the node is disconnected or does not know
        the command.
        """
        params = {**of, "offset": offset, "wait_ms": wait_ms}
        return read_answer(node_id, await self._queries.ask(node_id, "output", params, wait_ms / 1000 + 10), Output)

    async def send(self, node_id: str, of: Mapping[str, str], **given: Any) -> None:
        """Send input to a command: `data`, a new `size` of its terminal, or `close`.

        Returns when the command has read most of it. Raises ToolError, also if it does not read for some minutes.
        """
        if isinstance(data := given.get("data"), bytes):
            given["data"] = base64.b64encode(data).decode()
        await self._queries.ask(node_id, "input", {**of, **given}, INPUT_SECONDS)

    async def _may_start(self, node_id: str, of: Mapping[str, str]) -> bool:
        """Return whether the command belongs to an open call, so that it may be about to start."""
        if "call_id" not in of or "output" not in self._queries.answered_by(node_id):
            return False
        return await self._is_open(of["call_id"])

    async def jobs(
        self, node_id: str | None = None, *, may_see: Callable[[str], bool] = lambda _: True
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the commands of one or all connected nodes, newest first, and the nodes that did not answer.

        Nodes that the caller may not see are left out.
        """
        nodes = [connection.node_id for connection in self._node_registry.connections]
        asked = [name for name in (*nodes, NATIVE) if node_id in (None, name) and may_see(name)]
        asked = [name for name in asked if "jobs" in self._queries.answered_by(name)]
        answers = await asyncio.gather(
            *(self._queries.ask(name, "jobs", None, JOBS_SECONDS) for name in asked), return_exceptions=True
        )
        jobs: list[dict[str, Any]] = []
        silent = []
        for name, answer in zip(asked, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                found = read_answer(name, answer, JobViews)
                jobs += [{**msgspec.structs.asdict(job), "node_id": name} for job in found]
            except ToolError as error:
                if error.kind is ErrorKind.NOT_ALLOWED:
                    continue  # its owner does not offer commands, so there are none to list
                log.warning("failed to list the commands of node %s: %s", name, error)
                silent.append(name)
        return sorted(jobs, key=lambda job: int(job["started_at"]), reverse=True), silent
