"""The limits a machine's owner sets; every entry point of a node checks them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.protocol.node_tools import NODE_TOOLS


class ToolLimits(msgspec.Struct, frozen=True):
    """Which tools the owner of this machine allows, whatever the gateway asks for."""

    read_only: bool = False
    # Only some folders are allowed, and no sandbox confines commands to them, so the shell is denied as well.
    confined: bool = False
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def refusal(self, tool: str) -> str | None:
        """Return why a tool is denied, naming the option responsible; None if it is allowed."""
        known = NODE_TOOLS.get(tool)
        needed = tool if known is None or known.needs is None else known.needs
        for name in (tool, needed):
            if name in self.denied:
                return f"{tool} is not allowed: the owner of this node does not lend {name} (--deny-tool {name})"
        if self.read_only and (known is None or (known.changes and not known.harmless_actions)):
            return f"{tool} is not allowed: this node is lent read-only (--read-only)"
        if self.confined and needed == "Bash" and not {tool, needed} & set(self.allowed):
            return (
                f"{tool} is not allowed: this node lends only some folders (--root), and has no sandbox that confines "
                "commands to them; install bubblewrap there, or start it with --allow-tool Bash"
            )
        return None

    def check_action(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """Raise NotAllowed if the arguments make an allowed tool change something on a read-only node."""
        known = NODE_TOOLS.get(tool)
        if not self.read_only or (known is not None and not known.changes):
            return
        action = str(arguments.get("action")).strip().lower()
        if known is None or action not in known.harmless_actions:
            raise NotAllowed(f"{tool} {action} is not allowed: this node is lent read-only (--read-only)")

    def require(self, tool: str, action: str = "") -> None:
        """Raise NotAllowed unless the tool is allowed; `action` names what was requested if not the tool itself."""
        if (refusal := self.refusal(tool)) is not None:
            raise NotAllowed(f"{action} needs {tool}: {refusal}" if action else refusal)
