"""The declarations of node tools, and the limits that are derived from them."""

from __future__ import annotations

import inspect

import pytest

from farhand.node.limits import ToolLimits
from farhand.protocol.errors import NotAllowed
from farhand.protocol.node_tools import NODE_TOOLS, BuiltinTool
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import NodeShellTools
from farhand.tools.trial import TrialTool
from farhand.tools.undo import UndoTool

FAMILIES = (NodeFileTools, NodeShellTools, TrialTool, UndoTool)
METHODS = {
    name: method
    for family in FAMILIES
    for name, method in vars(family).items()
    if name[0].isupper() and callable(method)
}


def test_every_tool_is_declared_once_and_every_declaration_is_a_tool() -> None:
    assert set(METHODS) == set(NODE_TOOLS)


@pytest.mark.parametrize("tool", NODE_TOOLS.values(), ids=lambda tool: tool.name)
def test_a_declaration_says_what_the_tool_has(tool: BuiltinTool) -> None:
    parameters = inspect.signature(METHODS[tool.name]).parameters
    assert set(tool.paths) == {"path", "workdir", "folder", "cwd", "source", "destination"} & set(parameters)
    assert tool.previews is any(hasattr(family, f"preview_{tool.name}") for family in FAMILIES)
    assert not tool.harmless_actions or "action" in parameters
    assert tool.needs is None or tool.needs in NODE_TOOLS


def test_a_tool_changes_things_unless_it_is_declared_otherwise() -> None:
    assert BuiltinTool(name="New", capability="new").changes


@pytest.mark.parametrize("name", ["Forgotten", "read", "Terminal2"])
def test_a_read_only_node_refuses_a_tool_that_is_not_declared(name: str) -> None:
    limits = ToolLimits(read_only=True)
    assert "--read-only" in (limits.refusal(name) or "")
    with pytest.raises(NotAllowed):
        limits.check_action(name, {"action": "list"})


@pytest.mark.parametrize("action", ["write", "submit", "kill", " KILL ", "restart", "", None, 1])
def test_a_read_only_node_refuses_every_action_that_is_not_declared_harmless(action: object) -> None:
    with pytest.raises(NotAllowed):
        ToolLimits(read_only=True).check_action("Process", {"action": action})


@pytest.mark.parametrize("action", ["list", "poll", "log", " LOG "])
def test_a_read_only_node_allows_looking_at_processes(action: str) -> None:
    limits = ToolLimits(read_only=True)
    assert limits.refusal("Process") is None
    limits.check_action("Process", {"action": action})


def test_what_a_read_only_node_lends() -> None:
    limits = ToolLimits(read_only=True)
    assert {name for name in NODE_TOOLS if limits.refusal(name) is None} == {"Read", "Glob", "Grep", "Process"}
