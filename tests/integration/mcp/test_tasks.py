"""Tasks of MCP, in the shapes of both generations: they are recorded calls and outlive everything but the machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from tests.integration.http.test_mcp import BOTH, connected, run, text_of
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

LEGACY, MODERN = "2025-11-25", "2026-07-28"
EXTENSION = "io.modelcontextprotocol/tasks"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {"extensions": {EXTENSION: {}}, "elicitation": {}},
}


class Client:
    """Requests by hand; the official client has no tasks yet."""

    def __init__(self, gateway: GatewayProcess, version: str, token: str = "owner", **capabilities: Any) -> None:
        self.gateway, self.version, self.token = gateway, version, token
        self.headers: dict[str, str] = {**BOTH, "MCP-Protocol-Version": version}
        self._number = 0
        if version == LEGACY:
            params = {
                "protocolVersion": LEGACY,
                "capabilities": capabilities,
                "clientInfo": {"name": "t", "version": "1"},
            }
            answer = self._post("initialize", params)
            self.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
            self.introduction = answer.json()["result"]

    def _post(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        headers = dict(self.headers)
        if self.version == MODERN:
            params = {**params, "_meta": META}
            headers["Mcp-Method"] = method
            name = params.get("name") or params.get("taskId") or params.get("uri")
            headers |= {"Mcp-Name": name} if name else {}
        body = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        return self.gateway.request("POST", "/mcp", body, headers=headers, token=self.token)

    def ask(self, method: str, **params: Any) -> Any:
        answer = self._post(method, params)
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
            return json.loads(lines[-1])
        return answer.json()

    def result(self, method: str, **params: Any) -> Any:
        answer = self.ask(method, **params)
        assert "result" in answer, answer
        return answer["result"]

    def error(self, method: str, **params: Any) -> int:
        return int(self.ask(method, **params)["error"]["code"])

    def start(self, name: str, arguments: Any, **task: Any) -> Any:
        """Call a tool as a task, and return the task."""
        if self.version == LEGACY:
            return self.result("tools/call", name=name, arguments=arguments, task=task)["task"]
        found = self.result("tools/call", name=name, arguments=arguments)
        assert found["resultType"] == "task", found
        return found

    def status(self, task: Any) -> str:
        return str(self.result("tasks/get", taskId=task["taskId"])["status"])


@pytest.fixture(params=[LEGACY, MODERN])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_task_runs_is_found_and_has_a_result(
    shared_gateway: GatewayProcess, hands: NodeProcess, version: str
) -> None:
    client = Client(shared_gateway, version)
    task = client.start("hands__Bash", {"command": "sleep 3; echo over"})
    assert task["status"] == "working" and task["createdAt"].endswith("Z")
    assert (task["ttl"] if version == LEGACY else task["ttlMs"]) > 0
    assert shared_gateway.get(f"/v1/calls/{task['taskId']}")["tool"] == "hands__Bash"
    if version == LEGACY:
        assert "tasks" in client.introduction["capabilities"]
        assert client.status(task) == "working"
        result = client.result("tasks/result", taskId=task["taskId"])
        related = result["_meta"]["io.modelcontextprotocol/related-task"]
        assert related == {"taskId": task["taskId"]} and "over" in result["content"][0]["text"]
        assert client.status(task) == "completed"
        assert task["taskId"] in [one["taskId"] for one in client.result("tasks/list")["tasks"]]
        tool = next(one for one in client.result("tools/list")["tools"] if one["name"] == "hands__Bash")
        assert tool["execution"] == {"taskSupport": "optional"}
    else:
        wait_until(lambda: client.status(task) == "completed", what="the task")
        found = client.result("tasks/get", taskId=task["taskId"])
        assert "over" in found["result"]["content"][0]["text"] and found["resultType"] == "complete"
        assert client.error("tasks/list") == -32601 and client.error("tasks/result", taskId=task["taskId"]) == -32601


def test_a_tool_that_fails_and_one_that_does_not_exist(
    shared_gateway: GatewayProcess, hands: NodeProcess, version: str
) -> None:
    client = Client(shared_gateway, version)
    if version == LEGACY:
        task = client.start("hands__Read", {"path": "missing.txt"})
        wait_until(lambda: client.status(task) == "failed", what="the failure")
        assert client.result("tasks/result", taskId=task["taskId"])["isError"] is True
        assert client.error("tools/call", name="nowhere__Read", arguments={}, task={}) == -32602
        assert client.error("tools/call", name="hands__Read", arguments={}, task={"ttl": "long"}) == -32602
    else:  # what ends soon is no task
        found = client.result("tools/call", name="hands__Read", arguments={"path": "missing.txt"})
        assert found["isError"] is True and found["resultType"] == "complete"
        assert client.error("tools/call", name="nowhere__Read", arguments={}) == -32602


def test_a_task_is_cancelled_with_its_processes(
    shared_gateway: GatewayProcess, hands: NodeProcess, version: str
) -> None:
    client = Client(shared_gateway, version)
    task = client.start("hands__Bash", {"command": "sleep 600"})
    client.result("tasks/cancel", taskId=task["taskId"])
    wait_until(lambda: client.status(task) == "cancelled", what="the cancelled task")
    assert shared_gateway.get(f"/v1/calls/{task['taskId']}")["state"] == "cancelled"
    if version == LEGACY:
        assert client.error("tasks/cancel", taskId=task["taskId"]) == -32602


def test_a_task_belongs_to_its_credential_and_expires(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    client = Client(shared_gateway, LEGACY)
    task = client.start("hands__Bash", {"command": "true"}, ttl=60_000)
    other = shared_gateway.request("POST", "/v1/tokens", {}).json()["token"]
    stranger = Client(shared_gateway, LEGACY, other)
    for method in ("tasks/get", "tasks/result", "tasks/cancel"):
        assert stranger.error(method, taskId=task["taskId"]) == -32602
    assert stranger.result("tasks/list")["tasks"] == []
    call = shared_gateway.invoke("hands__Bash", {"command": "true"})["request_id"]
    assert client.error("tasks/get", taskId=call) == -32602  # a call, but no task
    assert client.error("tasks/get") == -32602
    short = client.start("hands__Bash", {"command": "true"}, ttl=1)
    time.sleep(0.01)  # its time to live
    assert client.error("tasks/get", taskId=short["taskId"]) == -32602


def test_a_task_outlives_the_gateway_and_the_node(tmp_path: Path, version: str) -> None:
    with (
        GatewayProcess(tmp_path / "home") as gateway,
        NodeProcess(gateway, tmp_path / "hands", "hands") as node,
    ):
        client = Client(gateway, version)
        command = "until [ -e go ]; do sleep 0.1; done; echo survived"
        task = client.start("hands__Bash", {"command": command})
        wait_until(lambda: client.status(task) == "working", what="the task")
        gateway.kill()
        node.kill()
        gateway.start()
        node.start()
        (node.workspace / "go").touch()
        wait_until(lambda: client.status(task) == "completed", what="the task")
        if version == LEGACY:
            result = client.result("tasks/result", taskId=task["taskId"])
        else:
            result = client.result("tasks/get", taskId=task["taskId"])["result"]
        assert "survived" in result["content"][0]["text"]


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("asking") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(
        '[[policy.rules]]\nname = "writes"\ndecision = "ask"\ntool = ["hands__Write"]\nreason = "be careful"\n'
    )
    with (
        GatewayProcess(home) as gateway,
        NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node,
    ):
        yield node


def test_a_task_that_waits_for_approval_shows_the_diff_and_takes_the_answer(asking: NodeProcess) -> None:
    gateway = asking.gateway
    (asking.workspace / "a.txt").write_text("old line\n")
    write = {"path": "a.txt", "content": "new line\n"}
    client = Client(gateway, MODERN)
    task = client.start("hands__Write", write)
    wait_until(lambda: client.status(task) == "input_required", what="the question")
    found = client.result("tasks/get", taskId=task["taskId"])
    ((key, form),) = found["inputRequests"].items()
    assert form["method"] == "elicitation/create"
    assert "-old line" in form["params"]["message"] and "+new line" in form["params"]["message"]
    assert "be careful" in found["statusMessage"]
    assert (asking.workspace / "a.txt").read_text() == "old line\n"
    answer = {key: {"action": "accept", "content": {"decision": "approve"}}}
    assert client.result("tasks/update", taskId=task["taskId"], inputResponses=answer)["resultType"] == "complete"
    wait_until(lambda: client.status(task) == "completed", what="the approved task")
    assert (asking.workspace / "a.txt").read_text() == "new line\n"

    # A token cannot approve its own calls this way.
    secret = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec", "approve"]}).json()["token"]
    own = Client(gateway, MODERN, secret)
    task = own.start("hands__Write", {**write, "content": "by itself\n"})
    wait_until(lambda: own.status(task) == "input_required", what="the question")
    ((key, form),) = own.result("tasks/get", taskId=task["taskId"])["inputRequests"].items()
    assert form["params"]["requestedSchema"]["properties"]["decision"]["enum"] == ["deny"]
    for decision, code in (("approve", -32602), ("perhaps", -32602)):
        answer = {key: {"action": "accept", "content": {"decision": decision}}}
        assert own.error("tasks/update", taskId=task["taskId"], inputResponses=answer) == code
    assert own.status(task) == "input_required"
    own.result("tasks/cancel", taskId=task["taskId"])
    assert (asking.workspace / "a.txt").read_text() == "new line\n"


def test_a_call_that_the_form_cannot_show_completely_cannot_be_approved_in_it(asking: NodeProcess) -> None:
    client = Client(asking.gateway, MODERN)
    task = client.start("hands__Write", {"path": "long.txt", "content": "x\n" * 5000 + "the end\n"})
    wait_until(lambda: client.status(task) == "input_required", what="the question")
    ((key, form),) = client.result("tasks/get", taskId=task["taskId"])["inputRequests"].items()
    assert form["params"]["requestedSchema"]["properties"]["decision"]["enum"] == ["deny"]
    answer = {key: {"action": "accept", "content": {"decision": "approve"}}}
    assert client.error("tasks/update", taskId=task["taskId"], inputResponses=answer) == -32602
    client.result("tasks/cancel", taskId=task["taskId"])
    assert not (asking.workspace / "long.txt").exists()


def test_the_shape_with_sessions_shows_the_diff_too(asking: NodeProcess) -> None:
    (asking.workspace / "b.txt").write_text("before\n")
    client = Client(asking.gateway, LEGACY)
    task = client.start("hands__Write", {"path": "b.txt", "content": "after\n"})
    wait_until(lambda: client.status(task) == "input_required", what="the question")
    found = client.result("tasks/get", taskId=task["taskId"])
    assert "-before" in found["statusMessage"] and "+after" in found["statusMessage"]
    client.result("tasks/cancel", taskId=task["taskId"])


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_a_client_that_can_ask_its_user_is_asked(asking: NodeProcess, mode: str, decision: str) -> None:
    """The official client answers questions about approvals in both generations."""
    asked: list[types.ElicitRequestFormParams] = []

    async def answer(context: Any, params: Any) -> types.ElicitResult:
        asked.append(params)
        return types.ElicitResult(action="accept", content={"decision": decision})

    async def act() -> types.CallToolResult:
        async with connected(asking.gateway, mode, elicitation_callback=answer) as client:
            return await client.call_tool("hands__Write", {"path": f"{mode}-{decision}.txt", "content": "hello\n"})

    result = run(act())
    assert len(asked) == 1 and "+hello" in asked[0].message
    assert result.is_error is (decision == "deny"), text_of(result)
    assert (asking.workspace / f"{mode}-{decision}.txt").exists() is (decision == "approve")
