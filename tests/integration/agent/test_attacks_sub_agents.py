"""Attacks by sub-agents: they only read, also when their run is pinned to a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from farhand.gateway.access.credentials import OWNER, Scope
from farhand.gateway.access.principal import decode_credential, encode_credential, limited
from tests.integration.agent.test_agent import House
from tests.integration.schedule.test_cron import YEARLY, Cron, opened, task, words
from tests.support.harness import NodeProcess
from tests.support.model_server import calls, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("spawned")
    with opened(folder / "home") as house, NodeProcess(house.gateway, folder / "near", "near"):
        yield house


def test_a_limited_owner_stays_limited_in_the_store() -> None:
    reader = limited(OWNER, Scope.READ, Scope.TOOLS_READ)
    assert decode_credential(encode_credential(reader)).scopes == reader.scopes


@pytest.mark.parametrize(
    "use", [("near__Bash", {"command": "touch spawned"}), ("near__Write", {"path": "spawned", "content": "x"})]
)
def test_a_sub_agent_of_a_pinned_run_only_reads(house: House, use: tuple[str, Any]) -> None:
    parent, child = words(), words()
    house.script(parent, calls(("sessions_spawn", {"prompt": child})), text("done"))
    house.script(child, calls(use), text("done"))
    cron = Cron(house)
    job = cron.add(YEARLY, task(parent), node="near")
    ran = cron("run", id=job["id"], mode="force")["results"][0]
    assert ran["status"] == "ok", ran
    made = [one for one in house.gateway.get("/v1/calls?limit=50")["calls"] if one["tool"] == use[0]]
    assert all(one["state"] != "ok" for one in made), made[0]


@pytest.mark.parametrize(
    "use", [("near__Bash", {"command": "true"}), ("near__Read", {"path": "x"}), ("exec", {"command": "true"})]
)
def test_a_sub_agent_of_a_run_that_is_not_pinned_has_no_other_tools(house: House, use: tuple[str, Any]) -> None:
    def made() -> int:
        return sum(one["tool"] == use[0] for one in house.gateway.get("/v1/calls?limit=500")["calls"])

    before = made()
    parent, child = words(), words()
    house.script(parent, calls(("sessions_spawn", {"prompt": child})), text("done"))
    house.script(child, calls(use), text("done"))
    answer = house.gateway.request("POST", "/v1/sessions/x/messages", {"message": parent, "wait_seconds": 30})
    assert answer.json()["state"] == "ok", answer
    assert made() == before


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("cron", {"action": "remove"}),
        ("gsv__Cron", {"action": "remove"}),
        ("gsv__Cron", {"action": "run", "mode": "force", "waitSeconds": 20}),
    ],
)
def test_a_pinned_run_uses_no_job_without_its_pin(house: House, tool: str, given: dict[str, Any]) -> None:
    """Another job works on other machines, and is not the run's to remove."""
    cron, other, pinned = Cron(house), words(), words()
    victim = cron.add(YEARLY, task(other))
    house.script(pinned, calls((tool, {**given, "id": victim["id"]})), text("done"))
    job = cron.add(YEARLY, task(pinned), node="near")
    assert cron("run", id=job["id"], mode="force")["results"][0]["status"] == "ok"
    assert victim["id"] in [one["id"] for one in cron("list")["jobs"]] and house.asked(other) == []
    assert b"pinned to" in house.asked(pinned)[-1].body
