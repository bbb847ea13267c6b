"""The agent's file tools, where a gateway adds nothing: pages, limits, hostile names, the two lists."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farhand.machine.files.local_paths import local_files
from farhand.protocol.errors import ToolError
from farhand.tools.agent_files import AgentFileTools
from farhand.tools.agent_tools import MAIN_AGENT, SUB_AGENT, main_agent_tools, sub_agent_tools
from farhand.tools.tool import CallContext, tool


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def tools_of(workspace: Path) -> AgentFileTools:
    return AgentFileTools(local_files(workspace, workspace.parent / "home", list))


def run(workspace: Path, name: str, **arguments: Any) -> str:
    (tool,) = [tool for tool in tools_of(workspace).tools() if tool.name == name]
    content = asyncio.run(tool.run(arguments, CallContext("call")))["content"]
    content.encode()  # it can be sent
    return str(content)


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINE, max_size=40), times=st.integers(1, 400), step=st.integers(1, 500))
def test_any_text_is_reproduced_page_by_page(workspace: Path, lines: list[str], times: int, step: int) -> None:
    (workspace / "a.txt").write_text("".join(f"{line}\n" for line in lines * times), newline="")
    tools = tools_of(workspace)
    found: list[str] = []
    while page := tools.read("a.txt", offset=len(found)):
        body, notice, offset = page.rpartition("[read output truncated at 50KB] continue with offset=")
        found += [line.partition("\t")[2] for line in (body if notice else page).split("\n")[:-1]]
        if notice:
            assert int(offset) == len(found)
    assert found == lines * times
    paged = [line for at in range(0, len(found), step) for line in tools.read("a.txt", at, step).split("\n")[:-1]]
    assert [line.partition("\t")[2] for line in paged] == found


def test_names_that_are_not_text_can_be_shown(workspace: Path) -> None:
    with open(os.fsencode(workspace) + b"/bad-\xff.txt", "w") as file:
        file.write("needle\n")
    for name, arguments in (("ls", {"path": "."}), ("glob", {"pattern": "*"}), ("grep", {"pattern": "needle"})):
        assert "bad-�.txt" in run(workspace, name, **arguments)


def test_an_unreadable_folder_is_reported_in_a_tree(workspace: Path) -> None:
    (workspace / "a" / "b").mkdir(parents=True)
    (workspace / "a" / "b" / "c.txt").write_text("x")
    assert run(workspace, "ls", path=".", depth=5).splitlines()[-1] == "        └── c.txt (file, 1)"


def test_a_file_is_not_listed_and_a_folder_not_read(workspace: Path) -> None:
    (workspace / "a.txt").write_text("x")
    for name, arguments in (("ls", {"path": "a.txt"}), ("read", {"path": "."}), ("edit", {"path": "."})):
        with pytest.raises(ToolError):
            run(workspace, name, old_text="x", new_text="y", **arguments)


def test_the_schemas_cost_little(workspace: Path) -> None:
    import msgspec

    text = msgspec.json.encode([tool.spec for tool in tools_of(workspace).tools()])
    assert len(text) < 4500


def test_the_two_lists(workspace: Path) -> None:
    def nothing() -> str:
        """Nothing."""
        return ""

    files = tools_of(workspace).tools()
    others = [tool(nothing, name=name, read_only=True) for name in MAIN_AGENT[len(files) :]]
    assert len(set(MAIN_AGENT)) == 20
    assert set(SUB_AGENT) < set(MAIN_AGENT)
    assert [one.name for one in main_agent_tools(others, reversed(files))] == list(MAIN_AGENT)
    assert [one.name for one in sub_agent_tools(files, others)] == list(SUB_AGENT)
    assert all(one.spec.read_only for one in sub_agent_tools(files, others))
    with pytest.raises(KeyError):
        main_agent_tools(files)
