"""`farhand undo --run`: what a run changed is undone on every machine, newest first; what cannot be is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.cli.conftest import Command
from tests.support.harness import NodeProcess
from tests.support.model_server import calls, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("undo-run") / "home")


def test_everything_a_run_changed_is_undone(house: House, tmp_path: Path) -> None:
    own = house.gateway.home / "agents/main/own.txt"
    with NodeProcess(house.gateway, tmp_path, "bench") as node:
        there = node.workspace / "there.txt"
        there.write_text("one\n")
        session = house.session(
            calls(("bench__Edit", {"path": str(there), "oldString": "one", "newString": "two"})),
            calls(("bench__Edit", {"path": str(there), "oldString": "two", "newString": "three"})),
            calls(("write", {"file_path": "own.txt", "content": "mine"})),
            calls(("bench__Bash", {"command": "touch ran.txt"})),
            calls(("bench__Bash", {"command": "echo tried > tried.txt", "trial": True})),
            calls(("bench__Read", {"path": str(there)})),
            text("done"),
        )
        run = session.send()["run_id"]
        assert there.read_text() == "three\n" and own.read_text() == "mine"
        recorded = house.gateway.get("/v1/calls?tool=bench__Bash&limit=1")["calls"][0]
        assert house.gateway.request("POST", f"/v1/trials/{recorded['id']}/keep", {}).status == 200
        assert (node.workspace / "tried.txt").exists()
        farhand = Command(house.gateway.home)
        planned = farhand("undo", "--run", run, "--dry-run")
        assert "would be" in planned.out and there.read_text() == "three\n"
        done = farhand("undo", "--run", run)
        assert done.status == 1, "a command could not be undone"
        assert "not undone: bench__Bash" in done.out and "trial" in done.out
        assert there.read_text() == "one\n" and not own.exists() and not (node.workspace / "tried.txt").exists()
        report = house.gateway.request("POST", f"/v1/runs/{run}/undo", {"dry_run": True}).json()
        assert report["calls"][0]["tool"] == "bench__Trial", "newest first"
        assert report["undone"] == 0 or all(one["reason"] for one in report["calls"] if not one["undone"])


def test_what_is_not_a_run_is_refused(house: House) -> None:
    for name, status in (("nothing", 404), ("a:b", 400)):
        assert house.gateway.request("POST", f"/v1/runs/{name}/undo", {}).status == status
    farhand = Command(house.gateway.home)
    assert farhand("undo").status != 0
    assert farhand("undo", "x", "--run", "y").status != 0


def test_a_token_that_may_not_write_undoes_nothing(house: House) -> None:
    made = house.gateway.request("POST", "/v1/tokens", {"scopes": ["read", "chat", "tools.read"]}).json()
    answer = house.gateway.request("POST", "/v1/runs/some/undo", {}, token=made["token"])
    assert answer.status == 403
