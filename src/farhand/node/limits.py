"""The limits a machine's owner sets; every entry point of a node checks them first."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.tools.undo import NAME as UNDO

TOOLS: Final = ("Glob", "Read", "Write", "Edit", "Grep", "Bash", "Process")
_CHANGING: Final = frozenset({"Write", "Edit", "Bash", UNDO})
# A tool is denied together with the one it depends on: Process manages what Bash started, and Undo writes.
_NEEDS: Final = {"Process": "Bash", UNDO: "Write"}


class ToolLimits(msgspec.Struct, frozen=True):
    """Which tools the owner of this machine allows, whatever the gateway asks for."""

    read_only: bool = False
    # Only some folders are allowed. A shell cannot be confined to them, so it is denied as well.
    confined: bool = False
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def refusal(self, tool: str) -> str | None:
        """Return why a tool is denied, naming the option responsible; None if it is allowed."""
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
        """Raise NotAllowed unless the tool is allowed; `action` names what was requested if not the tool itself."""
        if (refusal := self.refusal(tool)) is not None:
            raise NotAllowed(f"{action} needs {tool}: {refusal}" if action else refusal)
