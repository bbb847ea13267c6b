"""Gives nodes the credentials that their egress proxies add to requests: when a node joins, and after each change."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from farhand.gateway.access.secrets import Secrets
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.gateway.repeating import BackgroundTasks
from farhand.protocol.egress import QUESTION, EgressQuery
from farhand.protocol.errors import ToolError

log = logging.getLogger(__name__)

SECONDS = 30.0


class ProxyCredentials:
    def __init__(self, node_registry: NodeRegistry, queries: Queries, secrets: Secrets) -> None:
        self._node_registry = node_registry
        self._queries = queries
        self._secrets = secrets
        self._tasks = BackgroundTasks()

    def node_joined(self, connection: Connection) -> None:
        """Send a node its credentials; it has forgotten them, or has older ones."""
        if QUESTION in connection.queries:
            self._tasks.start(self._send(connection.node_id))

    def check(self, nodes: list[str]) -> None:
        """Raise ValueError if a node is connected and has no egress proxy."""
        for name in nodes:
            connection = self._node_registry.connection(name)
            if connection is not None and QUESTION not in connection.queries:
                raise ValueError(
                    f"node {name!r} has no egress proxy; start it with --root DIR and --network allow:HOST,... or "
                    "local, or set such a network in [sandbox] of its home"
                )

    async def changed(self) -> list[str]:
        """Send all connected nodes their credentials; return what went wrong."""
        wanted = [one.node_id for one in self._node_registry.connections if QUESTION in one.queries]
        found = await asyncio.gather(*(self._send(name) for name in wanted))
        return [problem for problem in found if problem is not None]

    async def _send(self, node_id: str) -> str | None:
        connection = self._node_registry.connection(node_id)
        if connection is None:
            return None
        try:
            credentials = self._secrets.for_proxy(node_id, connection.sealing_key)
            await self._queries.ask(node_id, QUESTION, msgspec.to_builtins(EgressQuery(credentials)), SECONDS)
        except (ToolError, ValueError) as error:
            problem = f"node {node_id!r} did not take its credentials: {error}"
            log.warning("%s", problem)
            return problem
        return None
