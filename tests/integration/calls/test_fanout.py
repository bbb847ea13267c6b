"""Fan-out: one call to many nodes, each an ordinary call of its own, and one table back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, Plugin, wait_until

WEB = ("web1", "web2", "web3", "web4")


class Farm:
    """Four nodes tagged `web`, one tagged `db`, and one tagged `gone` that is offline."""

    def __init__(self, gateway: GatewayProcess, nodes: dict[str, NodeProcess]) -> None:
        self.gateway = gateway
        self.nodes = nodes

    def post(self, nodes: list[str], command: str | None = None, *, key: str | None = None, **more: Any) -> Any:
        body = {"tool": "Bash", "args": {"command": command}, "nodes": nodes, **more}
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.gateway.request("POST", "/v1/tools/fanout", body, headers=headers, timeout=60)

    def ok(self, nodes: list[str], command: str, **more: Any) -> Any:
        answer = self.post(nodes, command, **more)
        assert answer.status == 200, answer
        return answer.json()

    def ran(self, name: str) -> list[str]:
        """On which nodes a file was left."""
        return [node_id for node_id, node in self.nodes.items() if (node.workspace / name).exists()]

    def calls(self, group: str) -> list[Any]:
        return list(self.gateway.get(f"/v1/calls?group={group}&limit=1000")["calls"])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SA_", "FARHAND_"))}
        return run_process([*FARHAND, *arguments], env={**env, "FARHAND_HOME": str(self.gateway.home)})


@pytest.fixture(scope="module")
def farm(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    folder = tmp_path_factory.mktemp("farm")
    with contextlib.ExitStack() as stack:
        nodes = {}
        for node_id in (*WEB, "db1", "gone1"):
            tag = node_id.rstrip("0123456789")
            node = NodeProcess(shared_gateway, folder / node_id, node_id, "--tag", tag, "--tag", "all")
            nodes[node_id] = stack.enter_context(node)
        nodes["gone1"].stop()
        shared_gateway.wait_for_node("gone1", online=False)
        yield Farm(shared_gateway, nodes)


def states(answer: Any) -> dict[str, str]:
    return {row["node_id"]: row["state"] for row in answer["results"]}


def test_a_tag_means_every_node_that_carries_it_and_each_call_has_its_own_record(farm: Farm) -> None:
    answer = farm.ok(["tag:web"], "echo hello from $PWD; touch tagged")
    assert answer["ok"] is True and answer["tool"] == "Bash" and answer["counts"] == {"ok": 4}, answer
    assert [row["node_id"] for row in answer["results"]] == list(WEB)
    for row in answer["results"]:
        assert row["ok"] is True and row["exit_code"] == 0 and row["duration_ms"] >= 0
        assert row["output"] == f"hello from {farm.nodes[row['node_id']].workspace}"
        assert "result" not in row
    assert farm.ran("tagged") == list(WEB)
    made = {row["request_id"]: row["node_id"] for row in answer["results"]}
    records = farm.calls(answer["group_id"])
    assert {record["id"]: record["route"]["node_id"] for record in records} == made
    assert {record["tool"] for record in records} == {f"{node_id}__Bash" for node_id in WEB}
    assert farm.calls("nothing") == []
    failed = farm.gateway.get(f"/v1/calls?group={answer['group_id']}&state=error")
    assert failed["count"] == 0


def test_a_list_is_called_in_its_order_each_node_once_with_whole_results_for_who_asks(farm: Farm) -> None:
    answer = farm.ok(["db1", "tag:web", "web2"], "echo one; echo two", results=True)
    assert [row["node_id"] for row in answer["results"]] == ["db1", *WEB]
    assert all(row["result"]["output"] == "one\ntwo\n" and row["output"] == "one" for row in answer["results"])


def test_a_failing_canary_leaves_the_others_untouched(farm: Farm) -> None:
    command = 'touch canary; case "$PWD" in *web1*) exit 3;; esac'
    for canary in (1, True):
        answer = farm.ok(["tag:web"], command, canary=canary, concurrency=4)
        assert answer["ok"] is False
        assert states(answer) == {"web1": "failed", "web2": "skipped", "web3": "skipped", "web4": "skipped"}
        assert answer["results"][0]["exit_code"] == 3
        assert "the canary on web1 failed" in answer["results"][1]["error"]["message"]
        assert answer["results"][1]["request_id"] is None and len(farm.calls(answer["group_id"])) == 1
    assert farm.ran("canary") == ["web1"]
    well = farm.ok(["tag:web"], "touch fine", canary=2)
    assert well["ok"] is True and farm.ran("fine") == list(WEB)


def test_a_canary_comes_first(farm: Farm) -> None:
    place = farm.nodes["web1"].workspace
    command = f'case "$PWD" in *web1*) sleep 0.3; touch {place}/first;; *) test -e {place}/first;; esac'
    assert farm.ok(["tag:web"], command, canary=1)["ok"] is True


def test_stop_on_failure_begins_nothing_more(farm: Farm) -> None:
    command = 'touch stopping; case "$PWD" in *web2*) exit 1;; esac'
    answer = farm.ok(["tag:web"], command, concurrency=1, stop_on_failure=True)
    assert states(answer) == {"web1": "ok", "web2": "failed", "web3": "skipped", "web4": "skipped"}
    assert "the call on web2 failed" in answer["results"][2]["error"]["message"]
    assert farm.ran("stopping") == ["web1", "web2"]
    # Without it, all nodes are called.
    going_on = farm.ok(["tag:web"], command, concurrency=1)
    assert going_on["ok"] is False and going_on["counts"] == {"ok": 3, "failed": 1}


def test_no_more_run_at_once_than_was_said(farm: Farm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"echo + >> {log}; sleep 0.2; echo - >> {log}"
    assert farm.ok(["tag:web"], command, concurrency=2)["ok"] is True
    at_once = most = 0
    for line in log.read_text().split():
        at_once += 1 if line == "+" else -1
        most = max(most, at_once)
    assert most <= 2 and at_once == 0


def test_offline_nodes_are_failures_unless_they_may_be_skipped(farm: Farm) -> None:
    answer = farm.ok(["tag:all"], "true", stop_on_failure=True)
    assert answer["ok"] is False and states(answer)["gone1"] == "offline" and answer["counts"]["ok"] == 5
    assert farm.ok(["tag:all"], "true", skip_offline=True)["ok"] is True
    nobody = farm.ok(["gone1"], "true", skip_offline=True)
    assert nobody["ok"] is False and nobody["counts"] == {"offline": 1}


def test_an_invalid_request_is_refused_before_anything_is_called(farm: Farm) -> None:
    before = farm.gateway.get("/v1/calls?limit=1")["calls"][0]["id"]
    for status, nodes, more in (
        (404, ["tag:nobody"], {}),
        (404, ["web1", "nosuch"], {}),
        (400, [], {}),
        (400, ["web1"], {"tool": "web1__Bash"}),
        (400, ["web1"], {"tool": ""}),
        (400, ["web1"], {"concurrency": 0}),
        (400, ["web1"], {"canary": -1}),
        (400, ["web1"], {"timeout_ms": 0}),
        (400, "web1", {}),
    ):
        answer = farm.post(nodes, "true", **more)  # type: ignore[arg-type]
        assert answer.status == status and answer.json()["error"]["message"], (nodes, more, answer)
    assert farm.gateway.get("/v1/calls?limit=1")["calls"][0]["id"] == before


def test_each_child_passes_the_gate_as_its_caller(farm: Farm) -> None:
    made = {"scopes": ["tools.exec"], "nodes": ["web1"]}
    token = farm.gateway.request("POST", "/v1/tokens", made).json()["token"]
    body = {"tool": "Bash", "args": {"command": "touch narrow"}, "nodes": ["tag:web"]}
    answer = farm.gateway.request("POST", "/v1/tools/fanout", body, token=token)
    assert answer.status == 200, answer
    assert states(answer.json()) == {"web1": "ok"}, "a narrow token learns nothing about other machines"
    assert farm.ran("narrow") == ["web1"]
    missing = farm.ok(["tag:web"], "true", tool="NoSuch")
    assert {row["error"]["kind"] for row in missing["results"]} == {"not_found"}
    wrong = farm.ok(["web1"], 5)  # type: ignore[arg-type]
    assert wrong["results"][0]["error"]["kind"] == "invalid_args"
    late = farm.ok(["web1"], "sleep 60", timeout_ms=300)
    assert states(late) == {"web1": "timeout"}


def test_the_same_key_again_runs_nothing_twice_and_continues_where_it_was(farm: Farm) -> None:
    first = farm.ok(["tag:web"], "echo x >> keyed", key="fan-1", canary=1)
    again = farm.ok(["tag:web"], "echo x >> keyed", key="fan-1", canary=1, results=True)
    assert first["group_id"] == again["group_id"]
    assert [row["request_id"] for row in first["results"]] == [row["request_id"] for row in again["results"]]
    assert all((farm.nodes[node_id].workspace / "keyed").read_text() == "x\n" for node_id in WEB)
    assert len(farm.calls(first["group_id"])) == 4
    assert farm.post(["tag:web"], "other", key="fan-1", canary=1).status == 409
    # A node that was offline, and so never called, is called when it is there.
    offline = farm.ok(["gone1", "web1"], "echo x >> later", key="fan-2")
    assert states(offline) == {"gone1": "offline", "web1": "ok"}
    farm.nodes["gone1"].start()
    try:
        assert states(farm.ok(["gone1", "web1"], "echo x >> later", key="fan-2")) == {"gone1": "ok", "web1": "ok"}
        for node_id in ("gone1", "web1"):
            assert (farm.nodes[node_id].workspace / "later").read_text() == "x\n"
    finally:
        farm.nodes["gone1"].stop()
        farm.gateway.wait_for_node("gone1", online=False)


def test_the_same_key_with_arguments_written_otherwise_is_the_same(farm: Farm) -> None:
    def begun(args: str) -> Any:
        body = f'{{"tool":"Bash","nodes":["web1"],"args":{args}}}'.encode()
        headers = {"Idempotency-Key": "written", "Content-Type": "application/json"}
        return farm.gateway.request("POST", "/v1/tools/fanout", body, headers=headers).json()

    first, again = (
        begun('{"command":"echo x >> written","timeout":9000}'),
        begun('{ "timeout": 9000, "command": "echo x >> written" }'),
    )
    assert first["results"][0]["request_id"] == again["results"][0]["request_id"] and states(again) == {"web1": "ok"}
    assert (farm.nodes["web1"].workspace / "written").read_text() == "x\n"


def test_a_client_that_leaves_ends_it(farm: Farm) -> None:
    body = {"tool": "Bash", "args": {"command": "touch leaving; sleep 60"}, "nodes": ["tag:web"], "concurrency": 2}
    connection = http.client.HTTPConnection("127.0.0.1", farm.gateway.port)
    connection.request(
        "POST",
        "/v1/tools/fanout",
        json.dumps(body),
        {"Authorization": f"Bearer {farm.gateway.token}", "Content-Type": "application/json"},
    )
    wait_until(lambda: len(farm.ran("leaving")) == 2, 20, "the first two")
    running = [call["id"] for call in farm.gateway.get("/v1/calls?state=running")["calls"]]
    connection.close()
    for call_id in running:
        record = farm.nodes["web1"].end_of(call_id)
        assert record["state"] == "cancelled", record
    assert farm.ok(["tag:web"], "true")["ok"] is True
    assert len(farm.ran("leaving")) == 2


def test_progress_is_streamed(farm: Farm) -> None:
    answer = farm.post(["tag:web", "gone1"], "echo hi", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    reported = [
        json.loads(line.removeprefix("data: ")) for line in answer.body.decode().split("\n") if line.startswith("data:")
    ]
    assert reported[0]["type"] == "planned" and states(reported[0]["answer"])["gone1"] == "offline"
    assert sorted(event["type"] for event in reported[1:-1]) == ["ended"] * 4 + ["started"] * 4
    assert reported[-1]["type"] == "done" and reported[-1]["answer"]["counts"] == {"ok": 4, "offline": 1}


def test_a_plug_ins_tool_is_called_on_each_node_by_its_dotted_name(farm: Farm, tmp_path: Path) -> None:
    with Plugin(farm.gateway, tmp_path, "plug", SA_NODE_TAGS="plugs"):
        body = {"tool": "plug.echo", "args": {"text": "hi"}, "nodes": ["tag:plugs"], "results": True}
        answer = farm.gateway.request("POST", "/v1/tools/fanout", body).json()
        assert answer["ok"] is True and answer["results"][0]["result"]["text"] == "hi", answer


def test_the_command_prints_one_table_and_its_status_is_0_only_when_all_succeeded(farm: Farm) -> None:
    done = farm.command("call", "--on", "tag:web,db1", "--concurrency", "2", "Bash", "command=echo hi there")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NODE", "STATE", "TOOK", "EXIT", "OUTPUT"] and len(lines) == 6
    assert all(line.split()[1] == "ok" and line.endswith("hi there") for line in lines[1:])
    group = done.stderr.split("--group ")[1].split("`")[0]
    assert len(json.loads(farm.command("calls", "--group", group, "--json").stdout)["calls"]) == 5
    command = 'case "$PWD" in *web1*) exit 7;; esac'
    failed = farm.command("call", "--on", "tag:web", "--canary", "1", "Bash", f"command={command}")
    assert failed.returncode == 1 and "web1" in failed.stdout and " 7" in failed.stdout, failed
    assert failed.stdout.count("skipped") == 3 and "1 failed, 3 skipped" in failed.stderr
    document = json.loads(farm.command("call", "--on", "tag:all", "--json", "Bash", "command=echo hi").stdout)
    assert document["ok"] is False and states(document)["gone1"] == "offline"
    assert next(row for row in document["results"] if row["node_id"] == "db1")["result"]["output"] == "hi\n"
    assert farm.command("call", "--on", "tag:all", "--skip-offline", "Bash", "command=echo").returncode == 0
    assert farm.command("call", "--on", "nosuch", "Bash", "command=echo").returncode == 1
    assert farm.command("call", "--canary", "1", "web1__Bash", "command=echo").returncode == 2
    assert farm.command("call", "--on", "web1", "--background", "Bash", "command=echo").returncode == 2


def test_a_freeze_stops_it(farm: Farm) -> None:
    frozen = farm.gateway.request("POST", "/v1/freeze", {"reason": "test"}).json()
    assert frozen["frozen"] is True
    try:
        answer = farm.ok(["tag:web"], "touch frozen", canary=1)
        assert states(answer) == {"web1": "denied", "web2": "skipped", "web3": "skipped", "web4": "skipped"}
        assert farm.ran("frozen") == []
    finally:
        farm.gateway.request("POST", "/v1/thaw", {})
