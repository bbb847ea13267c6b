"""The limits a machine's owner sets; every entry point of a node checks them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.protocol.node_tools import NODE_TOOLS, BuiltinTool


class ToolLimits(msgspec.Struct, frozen=True):
    """Which tools the owner of this machine allows, whatever the gateway asks for."""

    read_only: bool = False
    # Only some folders are allowed, and no sandbox confines commands to them, so the shell is denied as well.
    confined: bool = False
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def refusal(self, tool: str | BuiltinTool) -> str | None:
        """Return why a tool is denied, naming the option responsible; None if it is allowed."""
        declared = _declaration(tool)
        name, needed = declared.name, declared.needs or declared.name
        for one in (name, needed):
            if one in self.denied:
                return f"{name} is not allowed: the owner of this node does not lend {one} (--deny-tool {one})"
        if self.read_only and declared.changes and not declared.harmless_actions:
            return f"{name} is not allowed: this node is lent read-only (--read-only)"
        if self.confined and declared.runs_commands and not {name, needed} & set(self.allowed):
            return (
                f"{name} is not allowed: this node lends only some folders (--root), and has no sandbox that confines "
                "commands to them; install bubblewrap on its machine, or start it with --allow-tool Bash"
            )
        return None

    def check_action(self, tool: str | BuiltinTool, arguments: Mapping[str, Any]) -> None:
        """Raise NotAllowed if the arguments make an allowed tool change something on a read-only node."""
        declared = _declaration(tool)
        action = str(arguments.get("action")).strip().lower()
        if self.read_only and declared.changes and action not in declared.harmless_actions:
            raise NotAllowed(f"{declared.name} {action} is not allowed: this node is lent read-only (--read-only)")

    def require(self, tool: str, action: str = "") -> None:
        """Raise NotAllowed unless the tool is allowed; `action` names what was requested if not the tool itself."""
        if (refusal := self.refusal(tool)) is not None:
            raise NotAllowed(f"{action} needs {tool}: {refusal}" if action else refusal)


def _declaration(tool: str | BuiltinTool) -> BuiltinTool:
    """Return the declaration of a tool; one that is not declared gets the strict defaults."""
    return tool if isinstance(tool, BuiltinTool) else NODE_TOOLS.get(tool, BuiltinTool(name=tool, capability=""))
