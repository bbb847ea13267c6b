"""Ask every connected node how busy it is, every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from farhand.gateway.nodes.metrics import EVERY_SECONDS, METRICS, MetricsHistory, Reading
from farhand.gateway.nodes.queries import Queries, read_answer
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.repeating import BackgroundTasks, PeriodicTask
from farhand.protocol.errors import ToolError

ANSWER_SECONDS = 5.0
# Fewer than `Queries` allows, so that other questions have room.
MOST_AT_ONCE = 256
# Nodes are looked at more often than each is asked, which spreads the questions over the ten seconds.
LOOK_SECONDS = 1.0


class NodeMetricsTask(PeriodicTask):
    def __init__(
        self, node_registry: NodeRegistry, queries: Queries, history: MetricsHistory, clock: Callable[[], int]
    ) -> None:
        self._node_registry = node_registry
        self._queries = queries
        self._history = history
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._open = BackgroundTasks()

    async def __aexit__(self, *details: object) -> None:
        await super().__aexit__(*details)
        await self._open.stop()

    async def run_once(self) -> float:
        now = time.monotonic()
        nodes = self._node_registry.nodes
        for node_id in list(nodes):
            connection = nodes[node_id].connection
            if connection is None or METRICS not in connection.queries:
                continue
            if now - self._asked_at.get(node_id, 0.0) < EVERY_SECONDS or len(self._open) >= MOST_AT_ONCE:
                continue
            self._asked_at[node_id] = now
            self._open.start(self._ask(node_id))
        self._history.keep(nodes)
        for gone in self._asked_at.keys() - nodes.keys():
            del self._asked_at[gone]
        return LOOK_SECONDS

    async def _ask(self, node_id: str) -> None:
        try:
            answer = await self._queries.ask(node_id, METRICS, {}, ANSWER_SECONDS)
            self._history.add(node_id, self._clock(), read_answer(node_id, answer, Reading))
        except ToolError:
            return  # it left, is busy or sent nonsense: there is no sample
