"""The gateways that share the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from farhand.api.server.http import Request, copied
from farhand.api.server.router import route
from farhand.gateway.access.credentials import Scope
from farhand.store.tables.fleet import Replica


class ReplicaShown(msgspec.Struct):
    id: str
    version: str
    started_at: int
    # When it last showed that it is alive, by the database's clock.
    beat_at: int
    epoch: int
    # How many nodes are connected to it.
    nodes: int
    self: bool
    # A digest of the settings that all should have alike.
    settings: str


class FleetShown(msgspec.Struct):
    replicas: list[ReplicaShown]
    count: int


class FleetRoutes:
    def __init__(self, own_id: str, replicas: Callable[[], Awaitable[list[Replica]]]) -> None:
        """`replicas` returns the gateways that are alive."""
        self._own_id = own_id
        self._replicas = replicas

    @route("GET /v1/fleet", Scope.READ, "The gateways that serve together.")
    async def fleet(self, _request: Request) -> FleetShown:
        shown = [copied(ReplicaShown, one, self=one.id == self._own_id) for one in await self._replicas()]
        return FleetShown(shown, len(shown))
