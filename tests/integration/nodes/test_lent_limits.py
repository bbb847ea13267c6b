"""Limits and tags of a node are stored with it: they hold for later starts, and loosening them is explicit."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.node.names import default_node_id
from farhand.node.program import node_folder
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, run_process, start_process
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}


@contextlib.contextmanager
def running(gateway: GatewayProcess, node_id: str, *words: str, log: Path) -> Iterator[None]:
    with log.open("ab") as file:
        process = start_process([*FARHAND, *words], CLEAN, stdout=file, stderr=file)
    try:
        gateway.wait_for_node(node_id)
        yield
    finally:
        process.terminate()
        process.wait(60)
        gateway.wait_for_node(node_id, online=False)


def kind(answer: Any) -> str | None:
    return None if answer["ok"] else str(answer["error"]["kind"])


def start(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start a node that is expected to refuse to start."""
    command = [*FARHAND, "node", "--gateway", "http://127.0.0.1:9", "--id", "n", "--home", str(home), *options]
    return run_process(command, env={**CLEAN, "SA_NODE_TOKEN": SHARED_TOKEN})


def stored(home: Path) -> Any:
    return json.loads(next((home / "nodes").glob("*/lent.json")).read_text())


def test_limits_of_a_join_stay_in_force(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    root, home, log = tmp_path / "lent", tmp_path / "other", tmp_path / "log"
    root.mkdir()
    (tmp_path / "outside.txt").write_text("kept\n")
    code = Command(shared_gateway.home)("node", "pair", "--json").json()["code"]
    limits = ["--root", str(root), "--tag", "web", "--deny-tool", "Edit"]
    joined = ["join", code, "--id", "borrowed", "--home", str(home), *limits]
    for words in (joined, ["node", "--home", str(home)], ["node", "--home", str(home), "--deny-tool", "Glob"]):
        with running(shared_gateway, "borrowed", *words, log=log):
            entry = shared_gateway.wait_for_node("borrowed")
            assert entry["tags"] == ["web"]
            assert entry["runtime"]["limits"]["root"] == [str(root)]
            look = shared_gateway.invoke("borrowed__Bash", {"command": f"cat {tmp_path}/outside.txt"})
            assert "kept" not in str(look)
            assert kind(shared_gateway.invoke("borrowed__Read", {"path": f"{tmp_path}/outside.txt"})) == "not_allowed"
            edit = {"path": "x", "oldString": "a", "newString": "b"}
            assert kind(shared_gateway.invoke("borrowed__Edit", edit)) == "not_allowed"
            assert kind(shared_gateway.invoke("borrowed__Write", {"path": "new.txt", "content": "x"})) is None
            listed = Command(shared_gateway.home)("nodes").out
            assert "LIMITS" in listed and "no Edit" in " ".join(listed.split())
    assert stored(home)["deny_tools"] == ["Edit", "Glob"], "a further limit is stored, too"
    assert f"--root {root}" in log.read_text(), "what holds is printed at each start"
    path = next((home / "nodes").glob("*/lent.json"))
    assert path.stat().st_mode & 0o777 == 0o600
    wide = ["node", "--home", str(home), "--reset-limits"]
    with running(shared_gateway, "borrowed", *wide, log=log):
        assert kind(shared_gateway.invoke("borrowed__Bash", {"command": "true"})) is None
        assert shared_gateway.wait_for_node("borrowed")["tags"] == []
    with running(shared_gateway, "borrowed", "node", "--home", str(home), log=log):
        assert kind(shared_gateway.invoke("borrowed__Bash", {"command": "true"})) is None


def test_a_join_that_does_not_run_stores_the_limits(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    code = Command(shared_gateway.home)("node", "pair", "--json").json()["code"]
    home = tmp_path / "other"
    options = ["--id", "later", "--home", str(home), "--no-run", "--read-only", "--tag", "db"]
    Command(home)("join", code, *options)
    assert stored(home) == {"read_only": True, "tags": ["db"]}
    with running(shared_gateway, "later", "node", "--home", str(home), log=tmp_path / "log"):
        assert kind(shared_gateway.invoke("later__Write", {"path": "a", "content": "x"})) == "not_allowed"


def test_a_second_join_does_not_loosen_and_keeps_its_code(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    home, inner, outer = tmp_path / "other", tmp_path / "outer/inner", tmp_path / "outer"
    inner.mkdir(parents=True)
    owner, other = Command(shared_gateway.home), Command(tmp_path / "other")
    options = ["--id", "again", "--home", str(home), "--no-run"]
    other("join", owner("node", "pair", "--json").json()["code"], *options, "--root", str(inner))
    code = owner("node", "pair", "--id", "again", "--json").json()["code"]
    refused = other("join", code, *options, "--root", str(outer))
    assert refused.status == 1 and "--reset-limits" in refused.err
    assert stored(home)["root"] == [str(inner)]
    assert other("join", code, *options).status == 0, "the refused try has not used the code"
    assert stored(home)["root"] == [str(inner)]


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        (["--root", "{a}"], ["--root", "{b}"], "{b}"),
        (["--root", "{a}"], ["--root", "{a}", "--root", "{b}"], "{b}"),
        (["--root", "{a}"], ["--root", "{a}/link"], "{a}/link"),
        (["--root", "{a}"], ["--root", "/"], "--root /"),
        (["--root", "{a}"], ["--allow-tool", "Bash"], "Bash"),
    ],
)
def test_lending_more_than_before_is_refused(tmp_path: Path, first: list[str], second: list[str], wrong: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    (a / "link").symlink_to(b)
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        given = [word.format(a=a, b=b) for word in first]
        command = [*FARHAND, "node", "--id", "n", "--home", str(home), *given]
        env = {**CLEAN, "SA_NODE_TOKEN": SHARED_TOKEN}
        node = start_process(
            [*command, "--gateway", f"http://127.0.0.1:{busy.getsockname()[1]}"], env, stderr=subprocess.DEVNULL
        )
        busy.settimeout(60)
        busy.accept()[0].close()  # it connects once its limits are stored
        node.terminate()
        node.wait(20)
    before = stored(home)
    done = start(home, *(word.format(a=a, b=b) for word in second))
    assert done.returncode == 1 and "--reset-limits" in done.stderr and "Traceback" not in done.stderr
    assert wrong.format(a=a, b=b) in done.stderr
    assert stored(home) == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"root": 1}', '{"roots": ["/srv"]}', '{"read_only": "yes"}'])
def test_limits_that_cannot_be_read_lend_nothing(tmp_path: Path, content: str) -> None:
    folder = node_folder(tmp_path, "n")
    folder.mkdir(parents=True)
    (folder / "lent.json").write_text(content)
    done = start(tmp_path)
    assert done.returncode == 1 and "lent.json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ("read_only = 1", "read_only"),
        ('deny_tools = ["Bsah"]', "Bsah"),
        ('root = "relative"', "relative"),
        ('roots = ["/srv"]', "roots"),
    ],
)
def test_a_node_table_that_cannot_be_read_lends_nothing(tmp_path: Path, table: str, word: str) -> None:
    (tmp_path / "farhand.toml").write_text(f"[node]\n{table}\n")
    done = start(tmp_path)
    assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr


def test_the_node_table_cannot_be_widened_by_options(tmp_path: Path) -> None:
    (tmp_path / "farhand.toml").write_text(f'[node]\nroot = "{tmp_path}"\n')
    done = start(tmp_path, "--reset-limits", "--root", "/")
    assert done.returncode == 1 and "farhand.toml" in done.stderr
    done = start(tmp_path, "--allow-tool", "Bash")
    assert done.returncode == 1 and "Bash" in done.stderr


def test_the_node_table_holds_for_the_node_beside_the_gateway(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "farhand.toml").write_text('[node]\nread_only = true\ntags = ["mine"]\n')
    env = {"FARHAND_NODE_DENY_TOOLS": "Grep"}
    with GatewayProcess(home, command="up", env=env) as gateway:
        node_id = default_node_id()
        entry = gateway.wait_for_node(node_id, seconds=30)
        assert entry["tags"] == ["mine"]
        assert entry["runtime"]["limits"] == {"read_only": True, "deny_tools": ["Grep"]}
        assert kind(gateway.invoke(f"{node_id}__Bash", {"command": "true"})) == "not_allowed"
        assert kind(gateway.invoke(f"{node_id}__Grep", {"pattern": "x"})) == "not_allowed"


def test_the_limits_survive_a_kill(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(shared_gateway, tmp_path, "killed", "--read-only") as node:
        node.kill()
        with NodeProcess(shared_gateway, tmp_path, "killed") as later:
            later.fails("Write", {"path": "a", "content": "x"}, "not_allowed")
