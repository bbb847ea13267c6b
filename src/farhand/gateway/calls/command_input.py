"""Input to a running command: a caller that may not run commands may not type them into a running shell either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.protocol.calls import ToolCall

SHELL: Final = "shell.exec"


class CommandInput(msgspec.Struct, frozen=True):
    """A text for a running command, and the tool that starts such commands."""

    tool: str
    text: str


def input_of(target: Target, arguments: Any) -> CommandInput | None:
    """Return what a call writes to a running command; None for any other call."""
    if target.capability != SHELL or target.tool.casefold() != "process" or not isinstance(arguments, Mapping):
        return None
    action = str(arguments.get("action")).strip().lower()
    if target.node is None:
        return CommandInput("exec", str(arguments.get("input") or "")) if action == "input" else None
    return CommandInput("Bash", str(arguments.get("data") or "")) if action in ("write", "submit") else None


def allow_input(target: Target, call: ToolCall, principal: Principal) -> None:
    """Raise Denied for input to a running command if the principal's limits exclude the tool that starts commands."""
    if target.capability != SHELL or not principal.narrowed:
        return
    given = input_of(target, read_arguments(call.args))
    if given is None:
        return
    node_id = None if target.node is None else target.node.card.node_id
    if not all(one.pinned or one.reaches(node_id, given.tool) for one in principal.credentials):
        raise Denied(f"input to a running command needs {given.tool!r} as well, which this credential lacks")
