"""The common names of the tools of all machines, and what a model reads of a result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farhand.llm.tool_names import ToolNames
from farhand.protocol.calls import ToolCall, ToolSpec
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.tools.model_view import without_repeats
from farhand.tools.node_family import bounded_list, families, family_of, resolved

SEVEN = [ToolSpec(tool.name, capability=tool.capability) for tool in NODE_TOOLS.values() if tool.listed]


def call(tool: str, args: Any) -> ToolCall:
    return ToolCall("1", tool, msgspec.Raw(msgspec.json.encode(args)))


def test_each_of_the_seven_has_a_common_name_with_a_node() -> None:
    found = {spec.name: spec for spec in families(SEVEN)}
    assert found.keys() == {f"node_{name.lower()}" for name in (spec.name for spec in SEVEN)}
    bash = found["node_bash"]
    assert list(bash.parameters["properties"])[:2] == ["node", "command"]
    assert bash.parameters["required"] == ["node", "command"] and bash.capability == "shell.exec"
    assert found["node_read"].read_only and "the machine `node`" in found["node_read"].description
    assert families([]) == [] and [spec.name for spec in families(SEVEN[:1])] == ["node_glob"]


def test_ids_are_named_as_far_as_they_fit() -> None:
    (glob,) = families(SEVEN[:1], [f"machine-{number:02}" for number in range(50)])
    reported = glob.parameters["properties"]["node"]["description"]
    assert (
        reported.startswith("Id of the machine: machine-00, machine-01")
        and reported.endswith(" more.")
        and len(reported) < 140
    )
    assert bounded_list(["a" * 200, "b"], 90) == "a" * 200 + " and 1 more"


def test_only_the_known_tools_are_members() -> None:
    assert family_of(ToolSpec("Bash", capability="shell.exec")) == "node_bash"
    for other in (
        ToolSpec("Bash"),
        ToolSpec("Bash", capability="door.open"),
        ToolSpec("bash", capability="shell.exec"),
    ):
        assert family_of(other) is None


def test_a_call_becomes_one_of_the_machine() -> None:
    made = resolved(call("node_bash", {"command": "true", "node": "nas"}))
    assert (made.tool, msgspec.json.decode(made.args)) == ("nas__Bash", {"command": "true"})
    for other in ("nas__Bash", "Node_bash", "node_undo", "node_", "exec"):
        assert resolved(call(other, {"node": "nas"})).tool == other


@pytest.mark.parametrize("args", [None, {}, [], "nas", {"node": None}, {"node": ""}, {"node": 7}, {"node": "a__Read"}])
def test_a_call_without_a_machine_is_refused(args: Any) -> None:
    with pytest.raises(InvalidArgs):
        resolved(call("node_read", args))


def test_a_repeated_name_is_read_once() -> None:
    given = ToolCall("1", "node_bash", msgspec.Raw(b'{"node":"a","node":"b","command":"x","command":"y"}'))
    made = resolved(given)
    assert (made.tool, bytes(made.args)) == ("b__Bash", b'{"command":"y"}')


def test_a_plug_in_cannot_pass_for_a_common_name() -> None:
    assert ToolNames(["node.bash"]).sent("node.bash").startswith("node_bash_")


def test_each_text_is_read_once() -> None:
    ended = {"status": "completed", "output": "a\nb\n", "tail": "b\n", "exitCode": 0}
    assert without_repeats(ended) == {"status": "completed", "output": "a\nb\n", "exitCode": 0}
    listed = {"status": "completed", "sessions": [{"tail": "x"}], "text": "1 running"}
    assert without_repeats(listed) == {"status": "completed", "sessions": [{"tail": "x"}]}
    for same in (
        {"tail": "x"},
        {"output": "a", "tail": "b"},
        {"output": 1, "tail": "b"},
        {"text": "x"},
        [1],
        "x",
        None,
    ):
        assert without_repeats(same) is same
