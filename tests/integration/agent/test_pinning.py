"""A job that is pinned to a node or a tag reaches no other machine: one test for each possible way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House
from tests.integration.schedule.test_cron import YEARLY, Cron, opened, task, words
from tests.support.harness import NodeProcess, wait_until
from tests.support.model_server import calls, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("pinned")
    with (
        opened(folder / "home") as house,
        NodeProcess(house.gateway, folder / "near", "near", "--tag", "build") as near,
        NodeProcess(house.gateway, folder / "far", "far", "--tag", "office") as far,
    ):
        for node in (near, far):
            (node.workspace / "who.txt").write_text(f"I am {node.node_id}\n")
        yield house


class Pinned:
    def __init__(self, house: House, **pin: str) -> None:
        self.house = house
        self.cron = Cron(house)
        self.pin = pin

    def run(self, *uses: tuple[str, Any]) -> list[Any]:
        """What each tool answered that a pinned task called."""
        word = words()
        self.house.script(word, *[calls(use) for use in uses], text("done"))
        job = self.cron.add(YEARLY, task(word), **self.pin)
        ran = self.cron("run", id=job["id"], mode="force")["results"][0]
        assert ran["status"] == "ok", ran
        self.asked = self.house.asked(word)
        return [message["content"] for message in self.asked[-1].messages if message["role"] == "tool"]

    @property
    def offered(self) -> set[str]:
        return {one["function"]["name"] for one in json.loads(self.asked[0].body)["tools"]}


def test_plain_names_are_those_of_the_node(house: House) -> None:
    said = Pinned(house, node="near").run(("Bash", {"command": "cat who.txt"}), ("read", {"path": "who.txt"}))
    assert all("I am near" in one for one in said), said


def test_the_node_s_own_names_work(house: House) -> None:
    (said,) = Pinned(house, node="far").run(("far__Read", {"path": "who.txt"}))
    assert "I am far" in said


def test_another_node_is_refused_with_the_reason(house: House) -> None:
    (said,) = Pinned(house, node="near").run(("far__Bash", {"command": "cat who.txt"}))
    assert "pinned to the node 'near'" in said and "works on the node 'far'" in said and "I am far" not in said
    calls_made = house.gateway.get("/v1/calls?limit=20")["calls"]
    assert next(one["state"] for one in calls_made if one["tool"] == "far__Bash") == "denied"


def test_the_gateway_s_own_machine_is_another_one(house: House) -> None:
    (said,) = Pinned(house, node="near").run(("exec", {"command": "echo here"}))
    assert "pinned to the node 'near'" in said and "the gateway's own machine" in said, said


def test_a_tag_reaches_the_nodes_that_have_it(house: House) -> None:
    pinned = Pinned(house, tag="office")
    plain, own, other = pinned.run(
        ("Bash", {"command": "cat who.txt"}), ("far__Read", {"path": "who.txt"}), ("near__Read", {"path": "who.txt"})
    )
    assert "I am far" in plain and "I am far" in own
    assert "pinned to nodes with the tag 'office'" in other and "I am near" not in other


def test_only_what_is_within_reach_is_offered(house: House) -> None:
    pinned = Pinned(house, node="near")
    pinned.run()
    assert not any("far__" in name for name in pinned.offered) and "exec" not in pinned.offered
    assert any("near__" in name or name == "tool_search" for name in pinned.offered)


def test_tools_that_belong_to_no_machine_stay_available(house: House) -> None:
    written, found = Pinned(house, node="near").run(
        ("gsv__WriteFile", {"path": "pinned.txt", "content": "x"}), ("memory_search", {"query": "anything"})
    )
    assert "pinned to" not in written + found, (written, found)


@pytest.mark.parametrize(
    "use",
    [
        ("gsv__Transfer", {"source": "far:who.txt", "destination": "gsv:who.txt"}),
        ("gsv__Transfer", {"source": "near:who.txt", "destination": "far:copy.txt"}),
        ("gsv__LogsGet", {"nodeId": "far"}),
    ],
)
def test_tools_that_name_nodes_themselves_reach_no_other(house: House, use: tuple[str, Any]) -> None:
    (said,) = Pinned(house, node="near").run(use)
    assert "pinned to the node 'near'; 'far' is out of its reach" in said, said


def test_transfers_and_logs_of_the_node_work(house: House) -> None:
    moved, logs = Pinned(house, node="near").run(
        ("gsv__Transfer", {"source": "near:who.txt", "destination": "gsv:near.txt"}), ("gsv__LogsGet", {})
    )
    assert "bytesTransferred" in moved and '"near"' in logs, (moved, logs)


@pytest.mark.parametrize("tool", ["sessions_spawn", "gsv__SessionSend", "sessions_send"])
def test_sub_agents_and_other_sessions_are_pinned_alike(house: House, tool: str) -> None:
    word, other = words(), words()
    house.gateway.request("POST", "/v1/sessions/elsewhere/messages", {"message": "/status", "wait_seconds": 20})
    arguments = {
        "sessions_spawn": {"prompt": other},
        "gsv__SessionSend": {"sessionKey": "elsewhere", "message": other},
        "sessions_send": {"session_id": "elsewhere", "content": other},
    }[tool]
    reads = [(f"{node}__Read", {"path": "who.txt"}) for node in ("far", "near")]
    house.script(word, calls((tool, arguments)), text("done"))
    house.script(other, calls(*reads), text("done"))
    cron = Cron(house)
    job = cron.add(YEARLY, task(word), node="near")
    assert cron("run", id=job["id"], mode="force")["results"][0]["status"] == "ok"

    def of_the_other() -> list[str]:
        found = [request for request in house.asked(other) if word not in request.body.decode()]
        return [str(one["content"]) for one in found[-1].messages if one["role"] == "tool"] if found else []

    said = wait_until(of_the_other, 20, "the other run's calls")
    far, near = said[-2:]
    assert "I am near" in near and "I am far" not in far, said


def test_jobs_that_a_pinned_run_makes_are_pinned_alike(house: House) -> None:
    cron = Cron(house)
    name = words()
    job = {"name": name, "schedule": YEARLY, "spec": task("x")}
    free = cron.add(YEARLY, task("free"))
    made, elsewhere, changed = Pinned(house, node="near").run(
        ("gsv__Cron", {"action": "add", "job": job}),
        ("gsv__Cron", {"action": "add", "job": {**job, "node": "far"}}),
        ("gsv__Cron", {"action": "update", "id": free["id"], "patch": {"name": "mine"}}),
    )
    assert "the same pin" in elsewhere and "the same pin" in changed, (made, elsewhere, changed)
    assert [one.get("node") for one in cron("list")["jobs"] if one["name"] == name] == ["near"]


@pytest.mark.parametrize("tool", ["gsv__Cron", "cron", "gsv__SessionSend", "sessions_spawn"])
def test_work_that_a_call_of_a_pinned_job_starts_has_the_same_pin(house: House, tool: str) -> None:
    """A scheduled call has no session from whose run the pin could be taken."""
    cron, word, name = Cron(house), words(), words()
    house.script(word, calls(("far__Read", {"path": "who.txt"})), text("done"))
    args: dict[str, Any] = {
        "gsv__Cron": {"action": "add", "job": {"name": name, "schedule": YEARLY, "spec": task(word)}},
        "cron": {"action": "add", "schedule": "0 0 1 1 *", "prompt": word},
        "gsv__SessionSend": {"sessionKey": name, "message": word, "waitSeconds": 0},
        "sessions_spawn": {"prompt": word},
    }[tool]
    outer = {"name": words(), "schedule": YEARLY, "spec": {"mode": "call", "tool": tool, "args": args}}
    (made,) = Pinned(house, node="near").run(("gsv__Cron", {"action": "add", "job": outer}))
    before = {one["id"] for one in cron("list", limit=500)["jobs"]}
    (ran,) = cron("run", id=json.loads(made)["job"]["id"], mode="force")["results"]
    if tool in ("gsv__Cron", "cron"):
        assert ran["status"] == "ok", ran
        (inner,) = [one for one in cron("list", limit=500)["jobs"] if one["id"] not in before]
        assert inner.get("node") == "near", inner
        return

    def answers() -> list[str]:
        """What tools answered in the run that the call started; the run that made the job was asked before."""
        found = [str(one["content"]) for one in house.asked(word)[-1].messages if one["role"] == "tool"]
        return found if len(found) == 1 and "schedule" not in found[0] else []

    (said,) = wait_until(answers, 20, "what the started run read")
    assert "I am far" not in said, said


def test_a_message_of_a_person_meanwhile_is_not_pinned(house: House, tmp_path: Path) -> None:
    """A message that waits behind a pinned run of the main session is a run of its own."""
    word, person = words(), words()
    house.script(word, calls(("Bash", {"command": "sleep 1; echo slept"})), text("done"))
    house.script(person, calls(("far__Bash", {"command": "cat who.txt"})), text("done"))
    cron = Cron(house)
    job = cron.add(YEARLY, {"mode": "systemEvent", "text": word}, node="near")
    cron("run", id=job["id"], mode="force", waitSeconds=0)
    answer = house.gateway.request("POST", "/v1/sessions/main/messages", {"message": person, "wait_seconds": 20}).json()
    assert answer["reply"] == "done", answer
    assert "I am far" in json.dumps(house.asked(person)[-1].messages)
