"""The default name of a node."""

from __future__ import annotations

import re
import socket


def default_node_id() -> str:
    """Return the host name, reduced to the characters allowed in a node id."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.") or "this-machine"
