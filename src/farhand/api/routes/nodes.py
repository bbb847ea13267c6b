"""Nodes: the inventory, their logs and programs, and the address of the node socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from farhand.api.node_socket.login import INVALID_TOKEN, node_grant
from farhand.api.server.http import Problem, Request, copied, refusing
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Credentials, Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.pinning import LOGS
from farhand.gateway.nodes.cards import LONGEST_NAME, LONGEST_TAG, MOST_TAGS
from farhand.gateway.nodes.inventory import NodeInventory
from farhand.gateway.nodes.logs_tool import DEFAULT_LINES, MOST_LINES, NodeLogs
from farhand.gateway.nodes.metrics import MetricsHistory, Sample
from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.protocol.errors import ErrorKind, FarhandError

# Statuses for requests that a node answered with an error, or not at all.
NODE_STATUSES = {ErrorKind.FAILED: 502, ErrorKind.TIMEOUT: 502, ErrorKind.CANCELLED: 502}


class NodeShown(msgspec.Struct):
    node_id: str
    # What the node calls itself, and what its owner calls it.
    name: str
    label: str
    node_type: str
    version: str
    # Those that the owner set, or else those that the node reports.
    tags: list[str]
    reported_tags: list[str]
    capabilities: list[str]
    # Announced, but bound to another node.
    refused_capabilities: list[str]
    tools: list[str]
    role: str
    online: bool
    # The node reported it, or was frozen and has not reported otherwise.
    frozen: bool
    connected_at: int | None
    last_seen: int | None
    running: int
    runtime: dict[str, Any]


class NodesAnswer(msgspec.Struct):
    nodes: list[NodeShown]
    count: int
    primary: str | None


class MetricsAnswer(msgspec.Struct):
    samples: list[Sample]


OwnerTag = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_TAG)]
OwnerTags = Annotated[list[OwnerTag], msgspec.Meta(max_length=MOST_TAGS)]


class DescribeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What the owner calls a node; fields that are left out stay unchanged."""

    # Empty: the name that the node reports is shown.
    label: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)] | UnsetType = UNSET
    # Instead of the tags that the node reports; null: those are used.
    tags: OwnerTags | UnsetType | None = UNSET


class ProbeRequest(msgspec.Struct, forbid_unknown_fields=True):
    bins: list[str]


@dataclass(frozen=True)
class NodeRoutes:
    node_registry: NodeRegistry
    inventory: NodeInventory
    credentials: Credentials
    node_logs: NodeLogs
    gate: Gate
    history: MetricsHistory

    @route("GET /v1/nodes", Scope.READ, "Every known node, connected or not.")
    async def nodes(self, _request: Request) -> NodesAnswer:
        shown = [_shown(node) for _, node in sorted(self.node_registry.nodes.items())]
        primary = self.node_registry.primary()
        return NodesAnswer(shown, len(shown), primary.card.node_id if primary else None)

    @route(
        "PATCH /v1/nodes/{node_id}",
        Scope.ADMIN,
        "Set the name and the tags that the owner gives a node.",
        errors=(404,),
    )
    async def describe(self, request: Request, wanted: DescribeRequest) -> NodeShown:
        node_id = request.params["node_id"]
        node = await self.inventory.describe(node_id, request.credential.id, label=wanted.label, tags=wanted.tags)
        if node is None:
            raise Problem(404, "not_found", self.node_registry.unknown(node_id))
        return _shown(node)

    @route("DELETE /v1/nodes/{node_id}", Scope.ADMIN, "Forget a node that is offline.", errors=(409,))
    async def forget(self, request: Request) -> dict[str, str]:
        node_id = request.params["node_id"]
        with refusing(FarhandError, status=409, code="conflict"):
            known = await self.inventory.forget(node_id)
        if not known:
            raise Problem(404, "not_found", self.node_registry.unknown(node_id))
        return {"forgotten": node_id}

    @route(
        "GET /v1/nodes/ws",
        None,
        "The node socket: connect with a WebSocket.",
        status=101,
        media=(),
        errors=(401,),
        code=True,
    )
    async def socket(self, request: Request) -> NoReturn:
        """Refuse a request that is not an upgrade; upgrades do not get here."""
        grant, _ = node_grant(self.credentials, list(request.headers.items()), request.query_string)
        if grant is None:
            raise Problem(401, "unauthorized", INVALID_TOKEN, headers=[(b"www-authenticate", b"Bearer")])
        raise Problem(400, "upgrade_required", "this is the node socket: connect to it with a WebSocket")

    @route(
        "POST /v1/nodes/{node_id}/probe",
        Scope.READ,
        "Ask a node which programs it has.",
        errors=(502,),
        statuses=NODE_STATUSES,
    )
    async def probe(self, request: Request, wanted: ProbeRequest) -> dict[str, Any]:
        # No tool does the same: a rule that stops reading the node's log stops this, too.
        self.gate.check_route(request.principal, LOGS, {"nodeId": request.params["node_id"]}, None)
        return await self.inventory.probe(request.params["node_id"], wanted.bins)

    @route(
        "GET /v1/nodes/{node_id}/logs",
        Scope.READ,
        "The newest lines of a node's log.",
        query=(Query("lines", f"How many: 1 to {MOST_LINES}, {DEFAULT_LINES} by default.", int),),
        errors=(500, 504),
    )
    async def logs(self, request: Request) -> Any:
        node_id = request.params["node_id"]
        self.gate.check_node(request.principal, node_id)
        self.gate.check_route(request.principal, LOGS, {"nodeId": node_id}, None)
        lines = request.query_int("lines", DEFAULT_LINES, 1, MOST_LINES)
        return await self.node_logs.fetch(node_id, lines)

    @route(
        "GET /v1/nodes/{node_id}/metrics",
        Scope.READ,
        "Load of a node: a sample every ten seconds, kept for a day.",
        query=(Query("since", "From this moment on, in milliseconds; by default all that is kept.", int),),
        errors=(404,),
    )
    async def metrics(self, request: Request) -> MetricsAnswer:
        node_id = request.params["node_id"]
        self.gate.check_node(request.principal, node_id)
        if node_id not in self.node_registry.nodes:
            raise Problem(404, "not_found", self.node_registry.unknown(node_id))
        return MetricsAnswer(self.history.since(node_id, request.query_int("since", 0, 0, 2**53)))


def _shown(node: Node) -> NodeShown:
    return copied(
        NodeShown,
        node.card,
        tags=node.tags,
        reported_tags=node.card.tags,
        refused_capabilities=node.card.refused,
        tools=[spec.name for spec in node.lent],
        online=node.online,
        frozen=node.connection is not None and node.connection.frozen is not None,
        connected_at=node.connected_at,
        last_seen=node.last_seen,
        running=node.running,
    )
