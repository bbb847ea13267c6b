"""Track the nodes that were connected when the gateway last stopped: open work waits a while for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Final

from farhand.gateway.nodes.registry import NodeRegistry
from farhand.store.ports import Tx
from farhand.store.tables.nodes import NodeCard

RETURN_SECONDS: Final = 15.0
# A connected node is heard from at least this often, so it was last seen at most this long before a stop.
HEARD_MS: Final = 60_000
# After a kill it is unknown which nodes were connected: those seen within a day before it may have been.
LIKELY_MS: Final = 24 * 60 * 60 * 1000
LAST_EVENT: Final = "SELECT at, kind FROM events ORDER BY id DESC LIMIT 1"


class ReturningNodes:
    """Wait for expected nodes. Create it at startup; `wait` ends once all are connected or the time is up."""

    def __init__(self, node_registry: NodeRegistry, expected: Iterable[str]) -> None:
        self._node_registry = node_registry
        self._expected = frozenset(expected)
        self._deadline = time.monotonic() + RETURN_SECONDS
        self.started_at = node_registry.clock()

    @property
    def missing(self) -> list[str]:
        """Return the expected nodes that are not connected; empty once the time is up."""
        if time.monotonic() >= self._deadline:
            return []
        nodes = self._node_registry.nodes
        return sorted(one for one in self._expected if (node := nodes.get(one)) is not None and not node.online)

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when no node is missing or `stop` is set."""
        while self.missing and not stop.is_set():
            changed = asyncio.Event()
            self._node_registry.listeners.add(changed.set)
            waits = [asyncio.ensure_future(event.wait()) for event in (changed, stop)]
            try:
                left = max(0.0, self._deadline - time.monotonic())
                await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._node_registry.listeners.discard(changed.set)
                for one in waits:
                    one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*waits, return_exceptions=True)


def connected_at_the_end(store: Tx, nodes: Iterable[tuple[NodeCard, int, int]]) -> list[str]:
    """Return the nodes that were connected when the last gateway on this store stopped or was killed."""
    found = list(store.execute(LAST_EVENT))
    if not found:
        return []
    at, kind = int(found[0][0]), found[0][1]
    if kind == "gateway.stopped":
        return [card.node_id for card, _, seen in nodes if seen >= at - HEARD_MS]
    return [card.node_id for card, joined, seen in nodes if seen <= joined or seen >= at - LIKELY_MS]
