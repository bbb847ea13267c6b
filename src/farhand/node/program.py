"""`farhand node`: the sdk client with the node family of tools."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from farhand import __version__
from farhand.protocol.calls import ToolSpec
from farhand.protocol.messages import NodeInfo
from farhand.protocol.version import MIB
from farhand.sdk import NodeClient, ReconnectBackoff, Shutdown, ToolContext, ToolRegistry
from farhand.sdk.registry import Registered

MAX_BYTES = 32 * MIB
"""A Farhand node and gateway agree on more than the plug-in guide's limits: whole files and images come through."""


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    gateway_ws_url: str
    node_id: str
    token: str | None
    workspace: Path
    home: Path
    roots: tuple[Path, ...] = ()
    read_only: bool = False
    role: str = "execution"
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    ca_file: str | None = None


async def run_node(options: NodeOptions, shutdown: asyncio.Event) -> None:
    """Serve until `shutdown`. Raises NodeSdkError when the gateway refuses this node for good."""
    client = NodeClient(
        options.gateway_ws_url,
        options.token,
        node_info=NodeInfo(options.node_id, options.node_id, host_os(), __version__, list(options.tags)),
        max_request_bytes=MAX_BYTES,
        max_response_bytes=MAX_BYTES,
        reconnect_backoff=ReconnectBackoff(initial_delay=0.5, max_delay=30.0),
        role=options.role,
        runtime={"hostOs": host_os(), "hostEnv": sorted(os.environ)},
        ca_file=options.ca_file,
        token_in_query=False,
    )
    with contextlib.suppress(Shutdown):
        await client.run(node_registry(options), shutdown)


def node_registry(options: NodeOptions) -> ToolRegistry:
    registry = ToolRegistry()

    async def ping(_ctx: ToolContext, _args: msgspec.Raw) -> dict[str, Any]:
        return {"pong": True, "node": options.node_id, "workspace": str(options.workspace)}

    spec = ToolSpec(
        name="Ping",
        description="Answer with this node's name: shows that the way to it works.",
        parameters={"type": "object", "properties": {}},
        read_only=True,
        capability="node.ping",
    )
    return registry.add(Registered(spec, ping, ping))


def default_node_id() -> str:
    """The host name, in letters a node id may have."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.") or "this-machine"


def host_os() -> str:
    return {"linux": "linux", "darwin": "darwin", "win32": "windows"}.get(sys.platform, sys.platform)
