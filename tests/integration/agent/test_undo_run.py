"""`farhand undo --run`: what a run changed is undone on every machine, newest first; what cannot be is named."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.cli.conftest import Command
from tests.support.harness import NodeProcess, wait_until
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
        preview = house.gateway.request("POST", f"/v1/runs/{run}/undo", {"dry_run": True}).json()
        older = [one for one in preview["calls"] if one["tool"] == "bench__Edit"]
        assert [one["undone"] for one in older] == [True, True] and older[1]["after"] == older[0]["call_id"]
        assert [one["tool"] for one in preview["calls"] if not one["undone"]] == ["bench__Bash"], "the preview is right"
        done = farhand("undo", "--run", run)
        assert done.status == 1, "a command could not be undone"
        assert "not undone: bench__Bash" in done.out and "run it as a trial" in done.out
        assert there.read_text() == "one\n" and not own.exists() and not (node.workspace / "tried.txt").exists()
        report = house.gateway.request("POST", f"/v1/runs/{run}/undo", {"dry_run": True}).json()
        assert report["calls"][0]["tool"] == "bench__Trial", "newest first"
        assert report["undone"] == 0 or all(one["reason"] for one in report["calls"] if not one["undone"])


def test_machines_that_are_away_and_files_that_changed_are_named(house: House, tmp_path: Path) -> None:
    """One undo does what can be done; a later one does the rest."""
    gateway, farhand = house.gateway, Command(house.gateway.home)
    roots = [tmp_path / name for name in ("left", "right")]
    for root in roots:
        root.mkdir()
        (root / "file").write_text("old\n")
    left = NodeProcess(gateway, tmp_path / "l", "left", "--root", str(roots[0]))
    right = NodeProcess(gateway, tmp_path / "r", "right", "--root", str(roots[1]))
    with left, right:
        run = house.session(
            calls(("left__Write", {"path": "file", "content": "new"})),
            calls(("right__Write", {"path": "file", "content": "new"})),
            calls(("left__Write", {"path": "other", "content": "new"})),
            calls(("right__Bash", {"command": "echo tried > tried", "trial": True})),
            calls(("left__Read", {"path": "file"})),
            text("done"),
        ).send()["run_id"]
        trial = gateway.get("/v1/calls?tool=right__Bash&limit=1")["calls"][0]["id"]
        assert gateway.request("POST", f"/v1/trials/{trial}/keep", {}).status == 200
        (roots[0] / "other").write_text("by hand")
        right.stop()
        wait_until(
            lambda: not any(one["online"] for one in gateway.get("/v1/nodes")["nodes"] if one["node_id"] == "right"),
            what="the node that is away",
        )
        first = farhand("undo", "--run", run)
        assert first.status == 1 and "1 call undone, 3 not" in first.err
        assert f"restored: left:{roots[0]}/file" in first.out
        lines = [line for line in first.out.splitlines() if line.startswith("not undone")]
        assert [line.split()[2] for line in lines] == ["right__Trial", "left__Write", "right__Write"], "newest first"
        assert "offline" in lines[0] and "offline" in lines[2] and "changed since" in lines[1]
        assert (roots[0] / "file").read_text() == "old\n" and (roots[0] / "other").read_text() == "by hand"
        assert (roots[1] / "file").read_text() == "new" and (roots[1] / "tried").exists()
        right.start()
        second = farhand("undo", "--run", run)
        assert second.status == 1 and "undone before: left__Write" in second.out, second
        assert [line.split()[2] for line in second.out.splitlines() if line.startswith("not undone")] == ["left__Write"]
        assert (roots[1] / "file").read_text() == "old\n" and not (roots[1] / "tried").exists()
        (roots[0] / "other").write_text("new")
        assert farhand("undo", "--run", run).status == 0 and not (roots[0] / "other").exists()


def test_a_keep_that_was_lost_is_undone(house: House, tmp_path: Path) -> None:
    """The first call applied the trial and its caller left; the second one only found it applied."""
    gateway = house.gateway
    with NodeProcess(gateway, tmp_path, "loft") as node:
        session = house.session(calls(("loft__Bash", {"command": "echo x > made", "trial": True})), text("done"))
        run = session.send()["run_id"]
        trial = gateway.get("/v1/calls?tool=loft__Bash&limit=1")["calls"][0]["id"]
        first, second = (gateway.request("POST", f"/v1/trials/{trial}/keep", {}).json() for _ in range(2))
        assert first["keptBy"] == second["keptBy"] and (node.workspace / "made").exists()
        report = gateway.request("POST", f"/v1/runs/{run}/undo", {}).json()
        assert (report["undone"], report["not_undone"]) == (1, 0), report
        assert report["calls"][0]["call_id"] == first["keptBy"] and not (node.workspace / "made").exists()


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


@pytest.mark.parametrize("killed", ["gateway", "node"])
def test_a_kill_in_the_middle_leaves_nothing_to_do_twice(house: House, tmp_path: Path, killed: str) -> None:
    """Some calls are undone before the kill; a second undo of the run does the rest."""
    gateway = house.gateway
    with NodeProcess(gateway, tmp_path, "shelf") as node:
        files = [node.workspace / f"{number}.txt" for number in range(6)]
        writes = [("shelf__Write", {"path": str(file), "content": "new"}) for file in files]
        run = house.session(calls(*writes), text("done")).send()["run_id"]
        newest = gateway.get("/v1/calls?tool=shelf__Write&limit=2")["calls"]
        for one in newest:
            assert gateway.request("POST", f"/v1/calls/{one['id']}/undo", {}).json()["ok"] is True
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            undoing = pool.submit(gateway.request, "POST", f"/v1/runs/{run}/undo", {})
            wait_until(lambda: sum(file.exists() for file in files) < 4, what="the undo of a third file")
            if killed == "gateway":
                gateway.kill()
                undoing.exception(60)  # it may have ended just before
                gateway.start()
                gateway.wait_for_node("shelf")
            else:
                node.restart()
                assert undoing.result(60).status == 200
        running = "/v1/calls?tool=shelf__Undo&state=running&limit=1"
        wait_until(lambda: not gateway.get(running)["calls"], what="the end of an undo that was open")
        report = gateway.request("POST", f"/v1/runs/{run}/undo", {}).json()
        assert not any(file.exists() for file in files), report
        assert report["not_undone"] == 0 and report["undone"] == 6, report
        assert sum("already undone" in one.get("reason", "") for one in report["calls"]) >= 2
        assert all(one["undone_by"] for one in report["calls"])
