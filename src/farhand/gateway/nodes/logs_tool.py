"""Implement `gsv__LogsGet`: the newest lines of a node's log."""

# The reference fixes the parameter names, and the schema is derived from these signatures.
# ruff: noqa: N803

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, Timeout
from farhand.protocol.redaction import mask_text
from farhand.tools.tool import Tool, tool

DEFAULT_LINES: Final = 100
MOST_LINES: Final = 5000
# Characters of a line; a Farhand node writes shorter ones.
LONGEST_LINE: Final = 16_384
ANSWER_SECONDS: Final = 20.0

NodeId = Annotated[
    str | None,
    Meta(description="Node to fetch logs from. Required when multiple nodes are connected."),
]
Lines = Annotated[int | float | None, Meta(description="Number of lines to return. Default 100, maximum 5000.")]


class LogPage(msgspec.Struct, frozen=True):
    """Hold the log lines that a node returned."""

    lines: list[str]
    truncated: bool = False


class NodeLogs:
    """Fetch the logs of connected nodes."""

    def __init__(self, node_registry: NodeRegistry, queries: Queries) -> None:
        self._node_registry = node_registry
        self._queries = queries

    def tools(self) -> list[Tool]:
        timeout_ms = int(ANSWER_SECONDS * 1000) + 5000
        return [tool(self.logs_get, name="gsv__LogsGet", read_only=True, timeout_ms=timeout_ms)]

    async def logs_get(self, nodeId: NodeId = None, lines: Lines = None) -> dict[str, Any]:
        """Fetch recent log lines from a connected node, oldest first."""
        asked = DEFAULT_LINES if lines is None else lines
        if not math.isfinite(asked) or asked < 1:
            raise InvalidArgs(f"lines must be a positive number, not {lines}")
        return await self.fetch(nodeId or None, min(int(asked), MOST_LINES))

    async def fetch(self, node_id: str | None, lines: int) -> dict[str, Any]:
        """Fetch log lines. Raises NotFound, Failed, Timeout, and InvalidArgs if `node_id` is required."""
        chosen = self._choose(node_id)
        if "logs" not in self._node_registry.queries(chosen):
            raise NotFound(f"node {chosen!r} keeps no log that can be fetched; `farhand node` programs do")
        try:
            answer = await self._queries.ask(chosen, "logs", {"lines": lines}, ANSWER_SECONDS)
        except Timeout:
            raise Timeout(f"logs.get timed out for node {chosen} after {ANSWER_SECONDS * 1000:.0f}ms") from None
        try:
            page = msgspec.json.decode(answer, type=LogPage)
        except msgspec.MsgspecError as error:
            raise Failed(f"node {chosen!r} sent an answer that cannot be read: {error}") from None
        shown = []
        for line in page.lines[-lines:]:
            shown.append(mask_text(line[:LONGEST_LINE]))
            await asyncio.sleep(0)  # masking takes half a second for a megabyte
        truncated = page.truncated or len(page.lines) > lines
        return {"nodeId": chosen, "lines": shown, "count": len(shown), "truncated": truncated}

    def _choose(self, node_id: str | None) -> str:
        connected = sorted(name for name, node in self._node_registry.nodes.items() if node.online)
        if node_id is not None:
            if node_id not in connected:
                node = self._node_registry.nodes.get(node_id)
                raise NotFound(f"Node not connected: {node.absence if node else self._node_registry.unknown(node_id)}")
            return node_id
        if not connected:
            raise NotFound("No nodes connected")
        if len(connected) > 1:
            raise InvalidArgs(f"nodeId required when multiple nodes are connected: {', '.join(connected)}")
        return connected[0]
