"""The node tools as a gateway knows them: names, schemas, capabilities, roles and what a node tells of its machine.

What the tools do is in `test_node_bash.py`, `test_node_process.py`, `test_node_files.py`, `test_node_search.py`; what
survives in `test_node_kills.py`; what an owner forbids in `test_node_limits.py`; live output and cancelling in
`test_node_output.py`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess

# Tool -> parameter -> type, whether it is required, its default. GSV's node tools have the same.
PARAMETERS: dict[str, dict[str, tuple[str, bool, Any]]] = {
    "Bash": {
        "command": ("string", True, None),
        "workdir": ("string", False, None),
        "timeout": ("number", False, 300_000),
        "background": ("boolean", False, False),
        "yieldMs": ("number", False, None),
    },
    "Process": {
        "action": ("string", True, None),
        "sessionId": ("string", False, None),
        "data": ("string", False, ""),
        "offset": ("integer", False, 0),
        "limit": ("integer", False, 200),
    },
    "Read": {"path": ("string", True, None), "offset": ("integer", False, 0), "limit": ("integer", False, None)},
    "Write": {"path": ("string", True, None), "content": ("string", True, None)},
    "Edit": {
        "path": ("string", True, None),
        "oldString": ("string", True, None),
        "newString": ("string", True, None),
        "replaceAll": ("boolean", False, False),
    },
    "Glob": {"pattern": ("string", True, None), "path": ("string", False, None)},
    "Grep": {"pattern": ("string", True, None), "path": ("string", False, None), "include": ("string", False, None)},
}

CAPABILITIES = {
    "Glob": "filesystem.list",
    "Read": "filesystem.read",
    "Write": "filesystem.write",
    "Edit": "filesystem.edit",
    "Grep": "text.search",
    "Bash": "shell.exec",
    "Process": "shell.exec",
}


def offers(gateway: GatewayProcess, node_id: str) -> dict[str, Any]:
    """The tools of one node by their bare names."""
    prefix = f"{node_id}__"
    tools = gateway.get("/v1/tools")["tools"]
    return {tool["name"].removeprefix(prefix): tool for tool in tools if tool["name"].startswith(prefix)}


def entry(gateway: GatewayProcess, node_id: str) -> Any:
    return next(node for node in gateway.get("/v1/nodes")["nodes"] if node["node_id"] == node_id)


# -- names ---------------------------------------------------------------------------------------------------------


def test_every_tool_is_offered_under_the_node_id(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    offered = offers(shared_gateway, "hands")
    assert set(offered) == set(PARAMETERS)
    assert {tool["host"] for tool in offered.values()} == {"hands"}
    assert set(entry(shared_gateway, "hands")["tools"]) == set(PARAMETERS)


def test_several_nodes_keep_their_tools_and_files_apart(
    shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path: Path
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "server-2.example") as other:
        assert (
            set(offers(shared_gateway, "server-2.example")) == set(offers(shared_gateway, "hands")) == set(PARAMETERS)
        )
        hands.ok("Write", {"path": "whose.txt", "content": "of hands"})
        other.ok("Write", {"path": "whose.txt", "content": "of the other"})
        assert hands.ok("Read", {"path": "whose.txt"})["content"] == "1\tof hands"
        assert other.ok("Read", {"path": "whose.txt"})["content"] == "1\tof the other"
        answer = shared_gateway.invoke("server-2.example__Bash", {"command": "pwd"})
        assert answer["route"]["node_id"] == "server-2.example"
        assert answer["result"]["output"].strip() == str(other.workspace)
    shared_gateway.wait_for_node("server-2.example", online=False)
    assert not offers(shared_gateway, "server-2.example")
    assert "offline" in other.fails("Bash", {"command": "true"}, "failed")


def test_a_session_of_one_node_is_unknown_to_another(
    shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path: Path
) -> None:
    session = hands.ok("Bash", {"command": "sleep 60", "background": True})["sessionId"]
    with NodeProcess(shared_gateway, tmp_path, "stranger") as other:
        assert session in other.fails("Process", {"action": "poll", "sessionId": session}, "not_found")
    assert hands.ok("Process", {"action": "poll", "sessionId": session})["running"] is True


def test_an_unknown_tool_is_not_found(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    assert "Nope" in hands.fails("Nope", {}, "not_found")
    answer = shared_gateway.invoke("nobody__Bash", {"command": "true"})
    assert answer["error"]["kind"] == "not_found" and "nobody" in answer["error"]["message"]


# -- schemas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", PARAMETERS)
def test_the_schema_has_these_parameters(shared_gateway: GatewayProcess, hands: NodeProcess, tool: str) -> None:
    schema = offers(shared_gateway, "hands")[tool]["parameters"]
    assert schema["type"] == "object"
    own = {"trial"} if tool == "Bash" else set()
    assert set(schema["properties"]) == set(PARAMETERS[tool]) | own
    assert set(schema.get("required", ())) == {name for name, (_, required, _) in PARAMETERS[tool].items() if required}
    for name, (kind, _, default) in PARAMETERS[tool].items():
        described = schema["properties"][name]
        kinds = [described["type"]] if "type" in described else [option["type"] for option in described["anyOf"]]
        assert kind in kinds, name
        assert described.get("default") == default, name


@pytest.mark.parametrize("tool", PARAMETERS)
def test_the_tool_and_each_parameter_is_described(
    shared_gateway: GatewayProcess, hands: NodeProcess, tool: str
) -> None:
    offer = offers(shared_gateway, "hands")[tool]
    assert len(offer["description"]) > 20
    assert all(len(described["description"]) > 10 for described in offer["parameters"]["properties"].values())


def test_the_actions_of_process_are_in_its_schema(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    action = offers(shared_gateway, "hands")["Process"]["parameters"]["properties"]["action"]
    assert sorted(action["enum"]) == sorted(["list", "poll", "log", "write", "submit", "kill"])


@pytest.mark.parametrize(
    ("tool", "args"),
    [(tool, parameter) for tool, parameters in PARAMETERS.items() for parameter in parameters],
)
def test_a_mistyped_parameter_is_refused_by_name(hands: NodeProcess, tool: str, args: str) -> None:
    good = {"command": "true", "action": "list", "path": "x", "content": "", "oldString": "a", "newString": "b"}
    needed = {name: good.get(name, "x") for name, (_, required, _) in PARAMETERS[tool].items() if required}
    assert args in hands.fails(tool, {**needed, args: {"an": "object"}}, "invalid_args")


@pytest.mark.parametrize(
    ("tool", "parameter"),
    [
        (tool, name)
        for tool, parameters in PARAMETERS.items()
        for name, (_, required, _) in parameters.items()
        if required
    ],
)
def test_a_missing_parameter_is_refused_by_name(hands: NodeProcess, tool: str, parameter: str) -> None:
    others = {name: "list" for name, (_, required, _) in PARAMETERS[tool].items() if required and name != parameter}
    assert parameter in hands.fails(tool, others, "invalid_args")


@pytest.mark.parametrize("args", [[], "text", 5, True])
def test_arguments_that_are_not_object_are_refused(hands: NodeProcess, args: Any) -> None:
    assert "object" in hands.fails("Read", args, "invalid_args")


# -- capabilities and roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", CAPABILITIES)
def test_a_tool_carries_the_capability_of_the_seed(
    shared_gateway: GatewayProcess, hands: NodeProcess, tool: str
) -> None:
    assert CAPABILITIES[tool] in entry(shared_gateway, "hands")["capabilities"]
    answer = shared_gateway.invoke(f"hands__{tool}", {"action": "list", "pattern": "x", "command": "true"})
    assert answer["route"] == {"kind": "node", "node_id": "hands", "capability": CAPABILITIES[tool]}


def test_a_node_is_an_execution_host_unless_it_says_otherwise(
    shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path: Path
) -> None:
    assert entry(shared_gateway, "hands")["role"] == "execution"
    with NodeProcess(shared_gateway, tmp_path, "camera", "--role", "specialized"):
        assert entry(shared_gateway, "camera")["role"] == "specialized"


def test_the_primary_host_is_an_execution_host_and_never_a_specialized_one(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with NodeProcess(gateway, tmp_path, "camera", "--role", "specialized"):
        assert gateway.get("/v1/nodes")["primary"] is None
        with NodeProcess(gateway, tmp_path, "zulu"), NodeProcess(gateway, tmp_path, "alpha"):
            assert gateway.get("/v1/nodes")["primary"] == "zulu"  # it joined first
        gateway.wait_for_node("zulu", online=False)
        gateway.wait_for_node("alpha", online=False)
        assert gateway.get("/v1/nodes")["primary"] is None


# -- runtime information -------------------------------------------------------------------------------------------


def test_the_operating_system_is_reported(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    assert entry(shared_gateway, "hands")["runtime"]["hostOs"] == "linux"


def test_names_of_variables_are_reported_without_values(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    env: dict[str, str | None] = {"MY_API_KEY": "value-that-stays-home"}
    with NodeProcess(shared_gateway, tmp_path, "discreet", env=env):
        shared_gateway.request("POST", "/v1/nodes/discreet/probe", {"bins": ["sh"]})
        names = entry(shared_gateway, "discreet")["runtime"]["hostEnv"]
        assert all(isinstance(name, str) for name in names) and {"PATH", "HOME", "MY_API_KEY"} <= set(names)
        assert b"value-that-stays-home" not in shared_gateway.request("GET", "/v1/nodes").body
        for job in shared_gateway.get("/v1/jobs?node_id=discreet")["jobs"]:
            output = shared_gateway.request("GET", f"/v1/nodes/discreet/jobs/{job['job_id']}/output?wait=0").body
            assert b"value-that-stays-home" not in output, job


def test_the_node_token_is_not_passed_on(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    assert "SA_NODE_TOKEN" not in entry(shared_gateway, "hands")["runtime"]["hostEnv"]
    assert SHARED_TOKEN not in hands.ok("Bash", {"command": "env"})["output"]


def test_programs_are_probed_on_demand(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    before = time.time() * 1000
    answer = shared_gateway.request("POST", "/v1/nodes/hands/probe", {"bins": ["sh", "no-such-program"]})
    assert answer.status == 200
    assert answer.json()["hostBinStatus"] == {"sh": True, "no-such-program": False}
    assert before - 1000 <= answer.json()["hostBinStatusUpdatedAt"] <= time.time() * 1000 + 1000
    shared_gateway.request("POST", "/v1/nodes/hands/probe", {"bins": ["cat"]})
    runtime = entry(shared_gateway, "hands")["runtime"]
    assert runtime["hostBinStatus"] == {"sh": True, "no-such-program": False, "cat": True}
    assert runtime["hostBinStatusUpdatedAt"] >= answer.json()["hostBinStatusUpdatedAt"]


def test_a_probe_looks_on_the_path_of_the_nodes_start(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    tools = tmp_path / "my tools"
    tools.mkdir()
    (tools / "mytool").write_text("#!/bin/sh\n")
    (tools / "mytool").chmod(0o755)
    (tools / "notes").write_text("not a program\n")
    with NodeProcess(shared_gateway, tmp_path, "pathfinder", env={"PATH": f"{os.environ['PATH']}:{tools}"}) as node:
        (node.user_home / ".bash_profile").write_text("touch profile-ran\nPATH=/nowhere\n")
        answer = shared_gateway.request("POST", "/v1/nodes/pathfinder/probe", {"bins": ["mytool", "notes", "sh"]})
        assert answer.json()["hostBinStatus"] == {"mytool": True, "notes": False, "sh": True}
        assert shared_gateway.get("/v1/jobs?node_id=pathfinder")["jobs"] == []


@pytest.mark.parametrize("bins", [["a/b"], ["$(reboot)"], [""], ["x"] * 501, "sh", [1]])
def test_a_probe_for_an_invalid_program_name_is_refused(
    shared_gateway: GatewayProcess, hands: NodeProcess, bins: Any
) -> None:
    assert shared_gateway.request("POST", "/v1/nodes/hands/probe", {"bins": bins}).status == 400


def test_a_probe_of_an_unknown_node_is_not_found(shared_gateway: GatewayProcess) -> None:
    answer = shared_gateway.request("POST", "/v1/nodes/nobody/probe", {"bins": ["sh"]})
    assert answer.status == 404 and "nobody" in answer.json()["error"]["message"]
