"""What the node socket uses of the gateway: passes the messages of nodes to the services they are for.

The socket itself is loaded with the first connection: with its libraries, it takes a tenth of the gateway's start time.
"""

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
from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.gateway.transfers.transfers import Transfers
from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import ProtocolError
from farhand.protocol.messages import (
    FreezeReport,
    Message,
    NodeAnswer,
    ToolProgress,
    ToolResponse,
    TransferCredit,
    TransferDone,
    TransferReady,
    decode,
    may_be_response,
    readable_request_id,
)
from farhand.protocol.version import MAX_TOOL_RESPONSE_BYTES

if TYPE_CHECKING:
    from farhand.api.node_socket.upgrade import NodeSockets, OtherSocket
    from farhand.api.server.guard import Guard
    from farhand.gateway.fleet.links import FleetLinks


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
    # Passes messages to other gateways, if there are any.
    relay: FleetLinks | None = None
    # When the next long hello with a token is handled, by the loop's clock; under None, without a token.
    next_long_hello: dict[str | None, float] = {}

    def handle(self, connection: Connection, message: Message) -> bool:
        """Process what a node reports to this gateway; return False for any other message."""
        if isinstance(message, ToolResponse):
            self.end_orders.answered(connection, message)
            self.gate.node_calls.answered(connection, _bounded(message) if connection.plain else message)
        elif isinstance(message, ToolProgress):
            if not connection.plain:
                self.gate.node_calls.progressed(connection, message)
        elif isinstance(message, NodeAnswer):
            self.queries.answered(connection, message)
        elif isinstance(message, FreezeReport):
            self.freeze.answered(connection, message)
        elif isinstance(message, TransferCredit | TransferReady | TransferDone):
            if connection.can_transfer:
                self.transfers.on_message(connection, message)
        else:
            return False
        return True

    def handle_text(self, connection: Connection, text: bytes) -> None:
        """Process what a node reported to this gateway through another one."""
        try:
            message = decode(text)
        except ProtocolError as error:
            request_id = readable_request_id(text) if may_be_response(text) else None
            if request_id is not None:
                self.gate.node_calls.answered_unreadably(connection, request_id, str(error))
        else:
            self.handle(connection, message)


def _bounded(response: ToolResponse) -> ToolResponse:
    """Return the response of a plain node, or an error if it exceeds the limits of the plug-in guide."""
    if isinstance(response.result, msgspec.Raw):
        size = memoryview(response.result).nbytes
    else:
        size = len(response.error.message) if isinstance(response.error, ToolFailure) else 0
    if size <= MAX_TOOL_RESPONSE_BYTES:
        return response
    message = (
        f"the node's response has {size} bytes; the plug-in protocol allows at most {MAX_TOOL_RESPONSE_BYTES}: "
        "ask for less, or have the plug-in truncate its results"
    )
    return ToolResponse(response.request_id, False, error=ToolFailure("failed", message))


def node_socket_factory(
    services: NodeServices, guard: Guard, others: Mapping[str, OtherSocket]
) -> Callable[..., asyncio.Protocol]:
    """Return the protocol factory that uvicorn calls for each WebSocket upgrade.

    `others`: further sockets, by the beginning of their paths.
    """

    @functools.cache
    def sockets() -> NodeSockets:
        made: NodeSockets = importlib.import_module("farhand.api.node_socket.upgrade").NodeSockets(
            services, guard, others
        )
        return made

    def open_socket(**connection: Any) -> asyncio.Protocol:
        return sockets()(**connection)

    return open_socket
