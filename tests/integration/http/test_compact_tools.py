"""The compact profile: one family of tools for all machines, results once, and nothing that is not lent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.harness import GatewayProcess, NodeProcess
from tests.support.model_server import calls, text

MODERN = {
    "Accept": "application/json, text/event-stream",
    "Content-Type": "application/json",
    "MCP-Protocol-Version": "2025-06-18",
}


class Machines:
    """`laptop`, which lends everything, and `vault`, which lends reading in one folder."""

    def __init__(self, house: House, laptop: NodeProcess) -> None:
        self.house = house
        self.gateway: GatewayProcess = house.gateway
        self.laptop = laptop
        self.compact = self.made()
        self.full = self.made(profile="full")

    def made(self, **more: Any) -> str:
        return str(self.gateway.request("POST", "/v1/tokens", {"label": "mcp", **more}).json()["token"])

    def ask(self, token: str, method: str, **params: Any) -> Any:
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        begun = self._post(token, {"id": 0, "method": "initialize", "params": hello})
        session = {"Mcp-Session-Id": {name.lower(): value for name, value in begun.headers.items()}["mcp-session-id"]}
        answer = self._post(token, {"id": 1, "method": method, "params": params}, session).body.decode()
        line = next(one for one in answer.splitlines()[::-1] if one.startswith(("data: {", "{")))
        return json.loads(line.removeprefix("data: "))["result"]

    def _post(self, token: str, message: dict[str, Any], more: dict[str, str] | None = None) -> Any:
        body = {"jsonrpc": "2.0", **message}
        return self.gateway.request("POST", "/mcp", body, headers=MODERN | (more or {}), token=token)

    def names(self, token: str) -> set[str]:
        return {tool["name"] for tool in self.ask(token, "tools/list")["tools"]}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("compact")
    (folder / "lent").mkdir()
    for house in open_house(folder / "home"):
        with (
            NodeProcess(house.gateway, folder / "laptop", "laptop") as laptop,
            NodeProcess(house.gateway, folder / "vault", "vault", "--root", str(folder / "lent"), "--read-only"),
        ):
            yield Machines(house, laptop)


def test_new_tokens_see_one_family_and_older_ones_every_machine(machines: Machines) -> None:
    compact, full = machines.names(machines.compact), machines.names(machines.full)
    assert {"node_bash", "node_read", "node_write", "node_edit", "node_glob", "node_grep", "node_list"} <= compact
    assert not any(name.startswith(("laptop__", "vault__")) for name in compact)
    assert "laptop__Bash" in full and not any(name.startswith("node_") for name in full)
    assert machines.names(machines.gateway.token) == full
    tokens = machines.gateway.get("/v1/tokens")["tokens"]
    assert {token["profile"] for token in tokens if token["label"] == "mcp"} == {"compact", "full"}
    answer = machines.gateway.request("POST", "/v1/tokens", {"profile": "tiny"})
    assert answer.status == 400 and "profile" in answer.body.decode()


def test_a_tool_that_a_machine_does_not_lend_is_not_offered_and_refused(machines: Machines) -> None:
    full = machines.names(machines.full)
    lent = {name.removeprefix("vault__") for name in full if name.startswith("vault__")}
    assert {"Read", "Glob", "Grep"} <= lent and lent.isdisjoint({"Bash", "Write", "Edit"})
    offered = {tool["name"] for tool in machines.gateway.get("/v1/tools")["tools"]}
    assert "vault__Bash" not in offered and "vault__Read" in offered
    node = next(one for one in machines.gateway.get("/v1/nodes")["nodes"] if one["node_id"] == "vault")
    assert set(node["tools"]) == lent
    answer = machines.gateway.invoke("vault__Bash", {"command": "true"})
    assert answer["error"]["kind"] == "not_allowed" and "--read-only" in answer["error"]["message"]
    reported = machines.ask(machines.compact, "tools/call", name="node_write", arguments={"node": "vault", "path": "x"})
    assert reported["isError"] and reported["content"][0]["text"].startswith(("not_allowed", "invalid_args"))


def test_a_result_is_read_once_and_the_record_names_the_machine_s_tool(machines: Machines) -> None:
    run = {"node": "laptop", "command": "echo o-$((40+2))-o"}
    reported = machines.ask(machines.compact, "tools/call", name="node_bash", arguments=run)
    assert json.dumps(reported).count("o-42-o") == 1
    record = machines.gateway.get(f"/v1/calls/{reported['_meta']['farhand/call_id']}")
    assert (record["tool"], record["args"]) == ("laptop__Bash", {"command": run["command"]})
    assert record["result"]["output"] == record["result"]["tail"] == "o-42-o\n"
    reported = machines.ask(
        machines.gateway.token, "tools/call", name="laptop__Bash", arguments={"command": "echo o-$((6*7))-o"}
    )
    assert json.dumps(reported).count("o-42-o") == 1


def test_rights_decide_on_the_machine_s_tool(machines: Machines) -> None:
    narrow = machines.made(tools=["laptop__Read"])
    assert machines.names(narrow) == {"laptop__Read"}
    (machines.laptop.workspace / "n.txt").write_text("narrow\n")
    reported = machines.ask(narrow, "tools/call", name="node_read", arguments={"node": "laptop", "path": "n.txt"})
    assert "narrow" in reported["content"][0]["text"]
    for name, arguments in (
        ("node_bash", {"node": "laptop", "command": "true"}),
        ("node_read", {"node": "vault", "path": "n.txt"}),
        ("node_list", {}),
    ):
        reported = machines.ask(narrow, "tools/call", name=name, arguments=arguments)
        assert reported["isError"] and reported["content"][0]["text"].startswith("not_allowed"), reported


def test_an_unknown_machine_is_named_and_known_ones_are_listed(machines: Machines) -> None:
    reported = machines.ask(machines.compact, "tools/list")["tools"]
    bash = next(tool for tool in reported if tool["name"] == "node_bash")
    assert bash["inputSchema"]["properties"]["node"]["description"] == "Id of the machine: laptop, vault."
    text_ = machines.ask(machines.compact, "tools/call", name="node_list", arguments={})["content"][0]["text"]
    assert [(one["node"], one["online"]) for one in json.loads(text_)["machines"]] == [
        ("laptop", True),
        ("vault", True),
    ]
    for arguments, kind in (
        ({"node": "labtop", "command": "true"}, "not_found"),
        ({"command": "true"}, "invalid_args"),
    ):
        answer = machines.gateway.invoke("node_bash", arguments)
        assert answer["error"]["kind"] == kind, answer
    answer = machines.gateway.invoke("node_bash", {"node": "Laptop", "command": "true"})
    assert "did you mean 'laptop'" in answer["error"]["message"], answer


def test_the_agent_uses_the_family_too_and_reads_results_once(machines: Machines) -> None:
    session = machines.house.session(
        calls(("node_bash", {"node": "laptop", "command": "echo a-$((40+2))-a"})), text("done")
    )
    assert session.send()["reply"] == "done"
    first, second = session.asked()[:2]
    assert "node_bash" in first.messages[0]["content"] and "node_bash" in second.tools
    assert str(second.messages[-1]["content"]).count("a-42-a") == 1
    made = machines.gateway.get("/v1/calls?limit=5")["calls"]
    assert any(call["tool"] == "laptop__Bash" and call["args"]["command"] == "echo a-$((40+2))-a" for call in made)
