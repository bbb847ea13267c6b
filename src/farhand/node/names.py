"""What a node is called when nobody gave it a name."""

from __future__ import annotations

import re
import socket


def default_node_id() -> str:
    """The host name, in letters a node id may have."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.") or "this-machine"
