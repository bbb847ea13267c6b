"""Order nodes to end processes left by calls; orders survive restarts until the node confirms them.

A node that is offline, or whose program has died, receives its orders when it connects again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.gateway.repeating import BackgroundTasks
from farhand.protocol.errors import ErrorKind
from farhand.protocol.messages import ToolCancel, ToolResponse, encode
from farhand.store.ports import Store, StoreError, log_failure
from farhand.store.tables.end_orders import add_end_orders, drop_end_order, end_orders_of

log = logging.getLogger(__name__)

CONFIRM_SECONDS = 30.0


class EndOrders:
    """Send the orders, and drop each one that its node has confirmed. The owner calls `close`."""

    def __init__(self, database: Store, node_registry: NodeRegistry, clock: Callable[[], int]) -> None:
        self._database = database
        self._node_registry = node_registry
        self._clock = clock
        self._given: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._tasks = BackgroundTasks()

    async def end(self, node_id: str, call_ids: Collection[str], reason: str) -> None:
        """Make a node end everything that these calls started.

        Returns once the node has confirmed, immediately if it is offline, and after 30 seconds at most; the orders
        remain until the node confirms. Raises StoreError if they cannot be stored.
        """
        wanted, now = list(call_ids), self._clock()
        await self._database.write(lambda store: add_end_orders(store, node_id, wanted, reason, now))
        connection = self._node_registry.connection(node_id)
        if connection is not None:
            given = self._give(connection, dict.fromkeys(call_ids, reason))
            if given:
                await asyncio.wait(given, timeout=CONFIRM_SECONDS)

    def node_joined(self, connection: Connection) -> None:
        self._tasks.start(self._repeat(connection))

    def node_left(self, connection: Connection) -> None:
        for node_id, call_id in [key for key in self._given if key[0] == connection.node_id]:
            self._given.pop((node_id, call_id)).cancel()

    def answered(self, connection: Connection, response: ToolResponse) -> None:
        """Drop the order that a node confirms with a cancelled call."""
        given = self._given.get((connection.node_id, response.request_id))
        if given is None or response.ok or not response.error or response.error.kind != ErrorKind.CANCELLED:
            return
        del self._given[connection.node_id, response.request_id]
        if not given.done():
            given.set_result(None)
        node_id, call_id = connection.node_id, response.request_id
        # If this fails, the node receives the order again when it next connects and finds nothing to end.
        dropped = self._database.write(lambda store: drop_end_order(store, node_id, call_id), durable=False)
        log_failure(dropped, log, f"drop an order of node {node_id}")

    def close(self) -> None:
        self._tasks.cancel()

    async def _repeat(self, connection: Connection) -> None:
        try:
            orders = await self._database.read(lambda store: end_orders_of(store, connection.node_id))
        except StoreError as error:
            log.warning("failed to read the orders of node %s: %s", connection.node_id, error)
            return
        self._give(connection, orders)

    def _give(self, connection: Connection, orders: dict[str, str]) -> list[asyncio.Future[None]]:
        if not connection.can_cancel or connection.resume is None:
            return []
        given = []
        for call_id, reason in orders.items():
            key = connection.node_id, call_id
            if key not in self._given:
                self._given[key] = asyncio.get_running_loop().create_future()
            given.append(self._given[key])
            connection.link.send(encode(ToolCancel(call_id, reason, all=True)))
        return given
