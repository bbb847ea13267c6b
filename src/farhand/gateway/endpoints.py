"""What a source or destination of a transfer means."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farhand.protocol.errors import InvalidArgs, NotFound

WORKSPACE = "gsv"


class Endpoint(msgspec.Struct, frozen=True):
    """A path on a node, or of the workspace when `node_id` is `gsv`."""

    node_id: str
    path: str

    @property
    def in_workspace(self) -> bool:
        return self.node_id == WORKSPACE


def read_endpoint(raw: str, role: str, known: Iterable[str]) -> Endpoint:
    """The id is the longest known one followed by `:`, since an id may contain colons itself.

    Raises InvalidArgs for text that is no endpoint, NotFound for a node nobody has heard of.
    """
    shown = raw[:300]
    ids = [node_id for node_id in (*known, WORKSPACE) if raw.startswith(f"{node_id}:")]
    node_id = max(ids, key=len, default="")
    if not node_id:
        claimed, colon, _ = raw.partition(":")
        if not colon or not claimed or "/" in claimed or claimed.isspace():
            raise InvalidArgs(f'Invalid transfer endpoint "{shown}": expected format nodeId:/path or gsv:path')
        raise NotFound(f"{role} node not connected: {claimed}; `farhand nodes` lists the known ones")
    path = raw[len(node_id) + 1 :]
    if not path.strip():
        raise InvalidArgs(f'Invalid transfer endpoint "{shown}": path cannot be empty')
    if "\0" in path:
        raise InvalidArgs(f'Invalid transfer endpoint "{shown!r}": the path holds a NUL character')
    return Endpoint(node_id, path)
