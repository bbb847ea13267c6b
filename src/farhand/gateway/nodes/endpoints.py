"""Parse the source or destination of a transfer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.errors import InvalidArgs, NotFound

WORKSPACE = "gsv"


class Endpoint(msgspec.Struct, frozen=True):
    """Represent a path on a node, or in the workspace if `node_id` is `gsv`."""

    node_id: str
    path: str

    @property
    def in_workspace(self) -> bool:
        return self.node_id == WORKSPACE


def longest_id(raw: str, known: Iterable[str]) -> str:
    """Return the longest known id, or `gsv`, with which an endpoint starts; empty if there is none."""
    return max((one for one in (*known, WORKSPACE) if raw.startswith(f"{one}:")), key=len, default="")


def read_endpoint(raw: str, role: str, node_registry: NodeRegistry) -> Endpoint:
    """Parse `nodeId:/path` or `gsv:path`. Ids may contain colons, so the longest known id before a `:` is used.

    Raises InvalidArgs for text that is not an endpoint, NotFound for an unknown node.
    """
    shown = raw[:300]
    node_id = longest_id(raw, node_registry.nodes)
    if not node_id:
        claimed, colon, _ = raw.partition(":")
        if not colon or not claimed or "/" in claimed or claimed.isspace():
            raise InvalidArgs(f'Invalid transfer endpoint "{shown}": expected format nodeId:/path or gsv:path')
        raise NotFound(f"{role} node not connected: {claimed[:300]}; {node_registry.unknown(claimed)}")
    path = raw[len(node_id) + 1 :]
    if not path.strip():
        raise InvalidArgs(f'Invalid transfer endpoint "{shown}": path cannot be empty')
    if "\0" in path:
        raise InvalidArgs(f'Invalid transfer endpoint "{shown!r}": the path contains a NUL character')
    return Endpoint(node_id, path)
