"""What the owner of a machine lends: the limits that every way into a node asks before it does anything."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.tools.undo import NAME as UNDO

TOOLS: Final = ("Glob", "Read", "Write", "Edit", "Grep", "Bash", "Process")
_CHANGING: Final = frozenset({"Write", "Edit", "Bash", UNDO})
# A tool is not lent when one that does the same or more is not: Process manages what Bash started, and an undo writes.
_NEEDS: Final = {"Process": "Bash", UNDO: "Write"}


class ToolLimits(msgspec.Struct, frozen=True):
    """What the owner of this machine allows, whatever the gateway asks."""

    read_only: bool = False
    # Only some folders are lent. A shell cannot be kept inside them, so it is not lent either.
    confined: bool = False
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def refusal(self, tool: str) -> str | None:
        """Return why a tool is not lent, naming the option that says so; None if it is lent."""
        needed = _NEEDS.get(tool, tool)
        for name in (tool, needed):
            if name in self.denied:
                return f"{tool} is not allowed: the owner of this node does not lend {name} (--deny-tool {name})"
        if self.read_only and tool in _CHANGING:
            return f"{tool} is not allowed: this node is lent read-only (--read-only)"
        if self.confined and needed == "Bash" and not {tool, needed} & set(self.allowed):
            return f"{tool} is not allowed: this node lends only some folders (--root; --allow-tool Bash lifts it)"
        return None

    def require(self, tool: str, action: str = "") -> None:
        """Raise NotAllowed unless the tool is lent; `action` names what was asked for when it was not the tool."""
        if (refusal := self.refusal(tool)) is not None:
            raise NotAllowed(f"{action} needs {tool}: {refusal}" if action else refusal)
