"""The node socket, loaded with the first connection: it and its libraries take a tenth of the gateway's start time."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.calls.gate import Gate
from farhand.gateway.control.freeze import Freeze
from farhand.gateway.nodes.end_orders import EndOrders
from farhand.gateway.nodes.inventory import NodeInventory
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.transfers.transfers import Transfers

if TYPE_CHECKING:
    from farhand.api.node_socket.upgrade import Admission, NodeDoor, OtherSocket


class NodeServices(msgspec.Struct, frozen=True):
    """The services of the gateway that node connections use."""

    gateway_id: str
    credentials: Credentials
    node_registry: NodeRegistry
    inventory: NodeInventory
    gate: Gate
    end_orders: EndOrders
    queries: Queries
    freeze: Freeze
    transfers: Transfers
    # When the next long hello with a token is handled, by the loop's clock; under None, without a token.
    next_long_hello: dict[str | None, float] = {}


def node_door(
    services: NodeServices, guard: Admission, others: Mapping[str, OtherSocket]
) -> Callable[..., asyncio.Protocol]:
    """Return the protocol factory that uvicorn calls for each WebSocket upgrade.

    `others`: further sockets, by the beginning of their paths.
    """

    @functools.cache
    def door() -> NodeDoor:
        made: NodeDoor = importlib.import_module("farhand.api.node_socket.upgrade").NodeDoor(services, guard, others)
        return made

    def open_door(**connection: Any) -> asyncio.Protocol:
        return door()(**connection)

    return open_door
