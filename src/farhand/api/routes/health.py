"""Health and version of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from farhand import __version__
from farhand.api.server.http import Reply, Request, json_reply
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.upkeep.backups import Backups
from farhand.protocol.freeze import FreezeOrder
from farhand.store.ports import Store
from farhand.store.sqlite.snapshots import Recovery


class Alive(msgspec.Struct):
    ok: bool


class Version(msgspec.Struct):
    version: str


class NodeCounts(msgspec.Struct):
    known: int
    online: int


class CallCounts(msgspec.Struct):
    open: int


class StoreHealth(msgspec.Struct):
    """Time of the last backup of the store, and any repairs at this start."""

    backup_at: int | None
    backup_failure: str | None
    recovery: Recovery | None


class Health(msgspec.Struct):
    status: str
    version: str
    gateway_id: str
    nodes: NodeCounts
    calls: CallCounts
    frozen: FreezeOrder | None
    store: StoreHealth
    # Settings that were changed since the start and apply after a restart.
    restart_needed: list[str]


@dataclass(frozen=True)
class HealthRoutes:
    gateway_id: str
    database: Store
    node_registry: NodeRegistry
    gate: Gate
    backups: Backups
    recovery: Recovery | None
    frozen: Callable[[], FreezeOrder | None]
    restart_needed: Callable[[], list[str]]

    @route("GET /healthz", None, "The gateway answers.")
    async def healthz(self, _request: Request) -> Alive:
        return Alive(True)

    @route("GET /readyz", None, "The gateway can take calls.", answer=Alive, also={503: "It cannot."})
    async def readyz(self, _request: Request) -> Reply:
        healthy = self.database.healthy and not self.gate.closing
        return json_reply(Alive(healthy), 200 if healthy else 503)

    @route("GET /version", None, "The version of the gateway.")
    async def version(self, _request: Request) -> Version:
        return Version(__version__)

    @route("GET /v1/health", Scope.READ, "The status of the gateway.")
    async def health(self, _request: Request) -> Health:
        nodes = self.node_registry.nodes.values()
        return Health(
            status="ok" if self.database.healthy else "failing",
            version=__version__,
            gateway_id=self.gateway_id,
            nodes=NodeCounts(len(nodes), sum(node.online for node in nodes)),
            calls=CallCounts(len(self.gate.open_records())),
            frozen=self.frozen(),
            store=StoreHealth(self.backups.taken_at, self.backups.failure, self.recovery),
            restart_needed=self.restart_needed(),
        )
