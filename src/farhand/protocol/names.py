"""Names: of capabilities, of nodes, and of a tool on a node."""

from __future__ import annotations

import re

from farhand.protocol.version import MAX_NAME_LENGTH, MAX_NODE_ID_LENGTH

NATIVE = "gsv"
"""The gateway's own tools are named `gsv__…`, so no node may carry this id."""

SEPARATOR = "__"

FAMILY = ".*"
"""After a capability: this tool or any below it, of a node that does not list its tools."""

LONGEST_TOOL_NAME = 1024
"""A longer one names nothing: a node's id and a capability are much shorter."""

MAIN_AGENT = "main"
"""The agent that is meant when none is named."""

_AGENT_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_NODE_ID = re.compile(r"[^\W_](?:[\w.:@-]*[^\W_])?")


def validate_capability(name: str) -> str:
    """Return `name`, or raise ValueError saying which rule it breaks.

    Capabilities and dotted tool names are non-empty segments joined by single dots, without whitespace.
    """
    if not name:
        raise ValueError("a name must not be empty")
    if any(character.isspace() for character in name):
        raise ValueError(f"{name!r} contains whitespace")
    if name.startswith(".") or name.endswith("."):
        raise ValueError(f"{name!r} starts or ends with a dot")
    if ".." in name:
        raise ValueError(f"{name!r} has an empty segment ('..')")
    return name


def validate_node_id(node_id: str) -> str:
    """Return `node_id`, or raise ValueError saying why it cannot name a node."""
    if not node_id:
        raise ValueError("a node id must not be empty")
    if len(node_id) > MAX_NODE_ID_LENGTH:
        raise ValueError(f"a node id has at most {MAX_NODE_ID_LENGTH} characters, this one has {len(node_id)}")
    if node_id.lower() == NATIVE:
        raise ValueError(f"{node_id!r} is reserved for the gateway itself")
    if SEPARATOR in node_id:
        raise ValueError(f"{node_id!r} contains '__', which separates a node from its tool")
    if not _NODE_ID.fullmatch(node_id):
        raise ValueError(
            f"{node_id!r} is not a node id: letters, digits and . : @ _ - are allowed, "
            "beginning and ending with a letter or digit"
        )
    return node_id


def validate_agent_id(agent_id: str) -> str:
    """Return `agent_id`, or raise ValueError saying why it cannot name an agent: it is the name of a folder too."""
    if not _AGENT_ID.fullmatch(agent_id) or ".." in agent_id:
        raise ValueError(
            f"{agent_id[:100]!r} is not an agent id: at most 64 letters, digits and . _ - "
            "beginning and ending with a letter or digit"
        )
    return agent_id


def acceptable_name(name: str) -> bool:
    """Whether a capability a node announced may be listed: valid, and not absurdly long."""
    try:
        validate_capability(name)
    except ValueError:
        return False
    return len(name) <= MAX_NAME_LENGTH and name.isprintable()


def covers(capability: str, tool: str) -> bool:
    """Whether a node that announced `capability` serves `tool`: the same name, or one below it."""
    capability, tool = capability.casefold(), tool.casefold()
    return tool == capability or tool.startswith(capability + ".")


def join_tool(node_id: str, tool: str) -> str:
    return f"{node_id}{SEPARATOR}{tool}"


def split_tool(name: str) -> tuple[str, str] | None:
    """`laptop__Bash` -> (`laptop`, `Bash`); None for a name that does not say its node."""
    node_id, separator, tool = name.partition(SEPARATOR)
    return (node_id, tool) if separator and node_id and tool else None
