"""The declarations of node tools, and the limits that are derived from them."""

from __future__ import annotations

import asyncio
import inspect

import msgspec
import pytest

from farhand.node.limits import ToolLimits
from farhand.node.tools import node_tools
from farhand.protocol.errors import NotAllowed
from farhand.protocol.node_tools import NODE_TOOLS, BuiltinTool
from farhand.sdk.context import CancelToken, ToolContext
from farhand.sdk.registry import ToolRegistry
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
    assert [name for name, tool in NODE_TOOLS.items() if tool.name != name] == []
    offering = [name for family in FAMILIES for name in vars(family) if name in NODE_TOOLS]
    assert sorted(offering) == sorted(NODE_TOOLS), "no tool has two methods"


@pytest.mark.parametrize("tool", NODE_TOOLS.values(), ids=lambda tool: tool.name)
def test_a_declaration_says_what_the_tool_has(tool: BuiltinTool) -> None:
    parameters = inspect.signature(METHODS[tool.name]).parameters
    assert set(tool.paths) == {"path", "workdir", "folder", "cwd", "source", "destination"} & set(parameters)
    assert tool.previews is any(hasattr(family, f"preview_{tool.name}") for family in FAMILIES)
    assert not tool.harmless_actions or "action" in parameters
    assert tool.needs is None or tool.needs in NODE_TOOLS
    assert tool.timeout_parameter is None or tool.timeout_parameter in parameters
    assert set(tool.unlisted) <= set(parameters)
    assert not tool.announced_if_refused or not tool.listed


class NewTools:
    """A tool whose declaration is as short as it can be."""

    def __init__(self) -> None:
        self.calls = 0

    def New(self, *, action: str = "list") -> str:  # noqa: N802
        self.calls += 1
        return action


NEW = BuiltinTool(name="New", capability="new.tool")


def call(tools: ToolRegistry) -> str:
    new = tools.find("New")
    assert new is not None
    result: str = asyncio.run(new.run(ToolContext("call-1", "New", None, CancelToken()), msgspec.Raw(b"{}")))
    return result


@pytest.mark.parametrize(
    ("limits", "option"), [(ToolLimits(read_only=True), "--read-only"), (ToolLimits(confined=True), "--root")]
)
def test_a_tool_that_declares_only_its_name_is_refused(limits: ToolLimits, option: str) -> None:
    family = NewTools()
    tools = node_tools([family], limits, [NEW])
    with pytest.raises(NotAllowed, match=option):
        call(tools)
    assert [spec.withheld for spec in tools.specs()] == [True]
    assert family.calls == 0
    assert call(node_tools([family], ToolLimits(), [NEW])) == "list"


def test_a_tool_that_declares_that_it_changes_nothing_is_lent_read_only() -> None:
    harmless = msgspec.structs.replace(NEW, changes=False)
    assert call(node_tools([NewTools()], ToolLimits(read_only=True), [harmless])) == "list"


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


def test_what_a_node_with_roots_and_without_a_sandbox_lends() -> None:
    limits = ToolLimits(confined=True)
    assert set(NODE_TOOLS) - {name for name in NODE_TOOLS if limits.refusal(name) is None} == {
        "Bash",
        "Process",
        "Trial",
    }


def test_what_a_read_only_node_lends() -> None:
    limits = ToolLimits(read_only=True)
    assert {name for name in NODE_TOOLS if limits.refusal(name) is None} == {"Read", "Glob", "Grep", "Process"}
