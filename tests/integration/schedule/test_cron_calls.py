"""Scheduled calls without a model: made by the scheduler, with the rights of their maker, each slot accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, text


class Place:
    def __init__(self, house: House, node: NodeProcess) -> None:
        self.house = house
        self.gateway: GatewayProcess = house.gateway
        self.node = node

    def cli(self, *words: str, status: int = 0) -> Any:
        command = [*FARHAND, *words, "--home", str(self.gateway.home), "--json"]
        ended = run_process(command, env=os.environ, timeout=120)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return json.loads(ended.stdout)

    def add(self, name: str, spec: dict[str, Any], **fields: Any) -> str:
        job = {"name": name, "schedule": "every day at 3:00", "spec": {"mode": "call", **spec}, **fields}
        answer = self.gateway.request("POST", "/v1/cron", job)
        assert answer.status == 201, answer
        return str(answer.json()["job"]["id"])

    def run(self, job_id: str) -> Any:
        answer = self.gateway.request("POST", f"/v1/cron/{job_id}/run", {"waitSeconds": 60}).json()
        return answer["results"][0]

    def made(self, **fields: Any) -> str:
        return str(self.gateway.request("POST", "/v1/tokens", {"label": "x", **fields}).json()["token"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("cron-calls")
    for house in open_house(folder / "home"):
        with NodeProcess(house.gateway, folder / "nas", "nas") as node:
            yield Place(house, node)


def test_the_command_line_adds_and_runs_a_call(place: Place) -> None:
    words = ("cron", "add", "disk", "every monday at 9", "--call", "nas__Bash", "command=echo seen-$((40+2))")
    job = place.cli(*words)["job"]
    assert job["spec"] == {"mode": "call", "tool": "nas__Bash", "args": {"command": "echo seen-$((40+2))"}}
    assert job["schedule"] == {"kind": "cron", "expr": "0 9 * * MON"}
    ran = place.cli("cron", "run", "disk")["results"][0]
    assert ran["status"] == "ok" and "seen-42" in ran["summary"]
    record = place.gateway.get("/v1/calls?limit=3")["calls"]
    made = next(call for call in record if call["tool"] == "nas__Bash")
    assert made["id"] in ran["summary"] and made["credential"] == "owner" and made["on_behalf_of"] is None
    runs = place.cli("cron", "runs", "disk")["runs"]
    assert [run["status"] for run in runs] == ["ok"]
    place.cli("cron", "add", "x", "every monday at 9", "--call", "nas__Bash", "command=true", "--task", status=2)
    place.cli("cron", "add", "x", "every monday at 9", status=2)


def test_a_command_that_fails_is_a_failed_run(place: Place) -> None:
    ran = place.run(place.add("fails", {"tool": "nas__Bash", "args": {"command": "echo why; exit 3"}}))
    assert (ran["status"], ran["error"]) == ("error", "exit code 3") and "why" in ran["summary"]
    ran = place.run(place.add("unknown", {"tool": "nowhere__Bash", "args": {"command": "true"}}))
    assert ran["status"] == "error" and ran["error"].startswith("not_found: there is no node 'nowhere'")
    ran = place.run(place.add("slow", {"tool": "nas__Bash", "args": {"command": "sleep 60"}, "timeoutSeconds": 1}))
    assert ran["status"] == "timeout"


def test_a_due_slot_is_run_by_the_scheduler(place: Place) -> None:
    mark = place.node.workspace / "due"
    job = place.add("soon", {"tool": "nas__Bash", "args": {"command": "echo once >> due"}}, schedule="in 1 second")
    wait_until(mark.exists, 60, "the slot")
    runs = wait_until(
        lambda: [run for run in place.gateway.get(f"/v1/cron/{job}/runs")["runs"] if run["status"] == "ok"],
        60,
        "its end",
    )
    assert len(runs) == 1 and mark.read_text() == "once\n"


def test_it_has_the_rights_of_its_maker(place: Place, tmp_path: Path) -> None:
    narrow = place.made(tools=["nas__Read", "gsv__Cron"], scopes=["tools.exec"])
    spec = {"mode": "call", "tool": "nas__Bash", "args": {"command": "touch forbidden"}}
    job = {"name": "narrow", "schedule": {"kind": "at", "at": "in 2 hours"}, "spec": spec}
    asked = {"tool": "gsv__Cron", "args": {"action": "add", "job": job}}
    added = place.gateway.request("POST", "/v1/tools/invoke", asked, token=narrow).json()
    ran = place.run(added["result"]["job"]["id"])
    assert ran["status"] == "error" and "does not include 'Bash'" in ran["error"]
    assert not (place.node.workspace / "forbidden").exists()
    pinned = place.add("pinned", {"tool": "Bash", "args": {"command": "pwd"}}, node="nas")
    assert place.run(pinned)["status"] == "ok"
    ends = {"source": "other:/etc/hostname", "destination": "nas:/tmp/x"}
    with NodeProcess(place.gateway, tmp_path / "other", "other"):
        elsewhere = place.add("elsewhere", {"tool": "gsv__Transfer", "args": ends}, node="nas")
        ran = place.run(elsewhere)
    assert ran["status"] == "error" and "out of its reach" in ran["error"], ran


def test_an_agent_s_call_stays_the_agent_s(place: Place) -> None:
    spec = {"mode": "call", "tool": "nas__Bash", "args": {"command": "echo agent-$((40+2))"}}
    job = {"name": "by the agent", "schedule": {"kind": "at", "at": "in 2 hours"}, "spec": spec}
    session = place.house.session(calls(("gsv__Cron", {"action": "add", "job": job})), text("done"))
    assert session.send()["reply"] == "done"
    listed = place.gateway.get("/v1/cron")["jobs"]
    ran = place.run(next(one["id"] for one in listed if one["name"] == "by the agent"))
    assert ran["status"] == "ok" and "agent-42" in ran["summary"]
    made = next(one for one in place.gateway.get("/v1/calls?limit=5")["calls"] if one["id"] in ran["summary"])
    assert (made["credential"], made["on_behalf_of"]) == ("agent:main", "owner")
