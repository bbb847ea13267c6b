"""The door of the nodes, made when the first of them knocks: what it is made of is a tenth of the gateway's start."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farhand.api.node_socket.upgrade import Admission, NodeDoor
    from farhand.gateway.hub import Hub


def node_door(hub: Hub, guard: Admission) -> Callable[..., asyncio.Protocol]:
    """What uvicorn calls for each connection that asks to become a WebSocket."""

    @functools.cache
    def door() -> NodeDoor:
        made: NodeDoor = importlib.import_module("farhand.api.node_socket.upgrade").NodeDoor(hub, guard)
        return made

    def open_door(**connection: Any) -> asyncio.Protocol:
        return door()(**connection)

    return open_door
