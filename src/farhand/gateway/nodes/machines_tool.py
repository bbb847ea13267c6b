"""Implement `node_list`: the machines whose ids `node_bash` and the like take."""

from __future__ import annotations

from typing import Any, Final

from farhand.gateway.nodes.registry import NodeRegistry
from farhand.tools.tool import Tool, tool

NODE_LIST: Final = "node_list"


class NodeList:
    """List the known machines for callers that see the tools of all machines as one family."""

    def __init__(self, node_registry: NodeRegistry) -> None:
        self._node_registry = node_registry

    def tools(self) -> list[Tool]:
        return [tool(self.node_list, name=NODE_LIST, read_only=True)]

    async def node_list(self) -> dict[str, Any]:
        """List the machines: id, system, tags, and the tools that each of them lends."""
        machines = [
            {
                "node": node_id,
                "online": node.online,
                "system": node.card.runtime.get("hostOs"),
                "tags": node.tags,
                "tools": [spec.name for spec in node.lent],
                **({} if node.online else {"last_seen": node.seen}),
            }
            for node_id, node in sorted(self._node_registry.nodes.items())
        ]
        return {"machines": machines, "count": len(machines)}
