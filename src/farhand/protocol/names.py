"""Names of capabilities, nodes, agents, tools on a node, and hosts."""

from __future__ import annotations

import ipaddress
import posixpath
import re
import unicodedata

from farhand.protocol.untrusted import one_line
from farhand.protocol.version import MAX_NAME_LENGTH, MAX_NODE_ID_LENGTH

# The gateway's own tools are named `gsv__…`, so no node may use this id.
NATIVE = "gsv"

SEPARATOR = "__"

# Names with this prefix call a tool on the machine that an argument names, such as `node_bash`.
COMMON_PREFIX = "node_"

# Suffix of a capability: the tool itself or any below it, on a node that does not list its tools.
ANY_BELOW = ".*"

# No valid name is longer: a node id and a capability are much shorter.
MAX_TOOL_NAME_CHARS = 1024

# For suggestions of a similar name, which take time with the square of a name's length.
MAX_COMPARED_NAMES = 200
MAX_COMPARED_LENGTH = 64

# The default agent.
MAIN_AGENT = "main"

_AGENT_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_NODE_ID = re.compile(r"[^\W_](?:[\w.:@-]*[^\W_])?")


def validate_capability(name: str) -> str:
    """Return `name`, or raise ValueError naming the rule it breaks.

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
    """Return `node_id`, or raise ValueError saying why it is not a valid node id."""
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
    """Return `agent_id`, or raise ValueError saying why it is not a valid agent id, which is also a folder name."""
    if not _AGENT_ID.fullmatch(agent_id) or ".." in agent_id:
        raise ValueError(
            f"{agent_id[:100]!r} is not an agent id: at most 64 letters, digits and . _ - "
            "beginning and ending with a letter or digit"
        )
    return agent_id


def acceptable_name(name: str) -> bool:
    """Return whether a capability that a node announced may be listed."""
    try:
        validate_capability(name)
    except ValueError:
        return False
    return len(name) <= MAX_NAME_LENGTH and one_line(name, MAX_NAME_LENGTH) == name


# Cyrillic and Greek letters, and digits, that look like a Latin letter (a selection of Unicode's confusables).
_LOOK_ALIKE = {
    ord(other): latin
    for latin, others in {
        "a": "\u0430\u03b1\u0251",
        "b": "\u0432",
        "c": "\u0441\u03f2",
        "d": "\u0501",
        "e": "\u0435",
        "g": "\u0261\u0581",
        "h": "\u04bb\u043d",
        "i": "\u0456\u03b9\u0131",
        "j": "\u0458\u03f3",
        "k": "\u043a\u03ba",
        "l": "1I|\u04cf\u0406\u0399\u01c0",
        "m": "\u043c",
        "n": "\u0578",
        "o": "0\u043e\u03bf\u0585",
        "p": "\u0440\u03c1",
        "q": "\u051b",
        "r": "\u0433",
        "s": "\u0455",
        "t": "\u0442\u03c4",
        "u": "\u03c5\u057d",
        "v": "\u03bd\u0475",
        "w": "\u051d\u0461",
        "x": "\u0445\u03c7",
        "y": "\u0443\u03b3\u04af",
        "z": "\u1d22",
    }.items()
    for other in others
}


def look_alike(name: str, other: str) -> bool:
    """Return whether two names differ only in case, form or similar letters."""
    return not spellings(name).isdisjoint(spellings(other))


def spellings(name: str) -> set[str]:
    """Return the forms a name may be mistaken for; two names are `look_alike` if these overlap."""
    plain = unicodedata.normalize("NFKC", name)
    return {plain.casefold(), plain.translate(_LOOK_ALIKE).casefold().translate(_LOOK_ALIKE)}


def same_letters(name: str, other: str) -> bool:
    """Return whether two names differ only in case, punctuation or similar letters, as `Lap-Top` and `laptop`."""
    return not letter_spellings(name).isdisjoint(letter_spellings(other))


def letter_spellings(name: str) -> set[str]:
    """Return the forms shared by names that differ only in case, punctuation or similar letters."""
    return spellings(_letters(name))


def _letters(name: str) -> str:
    return "".join(character for character in unicodedata.normalize("NFKC", name) if character.isalnum())


def source_name(path: str) -> str:
    """Return the name that a copy of `path` gets in a folder: its last part, as the caller spelled it.

    Empty for a path that ends in no name of its own (`/`, `.`, `..`, `~`). The sender is never asked for this name: it
    could replace any file of the folder.
    """
    name = posixpath.basename(posixpath.normpath(path)) if path else ""
    return "" if name in (".", "..", "~") else name


def covers(capability: str, tool: str) -> bool:
    """Return whether `capability` includes `tool`: the same name, or one below it."""
    capability, tool = capability.casefold(), tool.casefold()
    return tool == capability or tool.startswith(capability + ".")


def join_tool(node_id: str, tool: str) -> str:
    return f"{node_id}{SEPARATOR}{tool}"


def split_tool(name: str) -> tuple[str, str] | None:
    """Split `laptop__Bash` into (`laptop`, `Bash`); return None for a name without a node."""
    node_id, separator, tool = name.partition(SEPARATOR)
    return (node_id, tool) if separator and node_id and tool else None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is that of this machine alone; an IPv6 address may have brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
