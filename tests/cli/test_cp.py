"""`farhand cp` against a real gateway and node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import GatewayProcess, NodeProcess


@pytest.fixture(scope="module")
def node(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("node"), "box") as process:
        yield process


def cp(node: NodeProcess, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farhand", "cp", *arguments]
    environment = {**os.environ, "FARHAND_HOME": str(node.gateway.home)}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def done(node: NodeProcess, *arguments: str, cwd: Path | None = None) -> Any:
    finished = cp(node, *arguments, "--json", cwd=cwd)
    assert finished.returncode == 0, finished
    return json.loads(finished.stdout)


def test_from_node_to_node(node: NodeProcess) -> None:
    (node.workspace / "a").write_bytes(b"a" * 3_000_000)
    answer = done(node, "box:a", "box:b/")
    assert answer["bytesTransferred"] == 3_000_000 and answer["state"] == "ok"
    assert (node.workspace / "b" / "a").read_bytes() == b"a" * 3_000_000


def test_from_here_to_a_node_and_back(node: NodeProcess, tmp_path: Path) -> None:
    content = os.urandom(20_000_000)
    (tmp_path / "local.bin").write_bytes(content)
    assert done(node, "./local.bin", "box:up/", cwd=tmp_path)["bytesTransferred"] == len(content)
    assert (node.workspace / "up" / "local.bin").read_bytes() == content
    assert done(node, "box:up/local.bin", "back.bin", cwd=tmp_path)["bytesTransferred"] == len(content)
    assert (tmp_path / "back.bin").read_bytes() == content
    (tmp_path / "empty").touch()
    done(node, "empty", "box:empty", cwd=tmp_path)
    done(node, "box:empty", "empty-back", cwd=tmp_path)
    assert (node.workspace / "empty").read_bytes() == (tmp_path / "empty-back").read_bytes() == b""


def test_folders_both_ways(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "tree" / "in").mkdir(parents=True)
    (tmp_path / "tree" / "in" / "x").write_text("x")
    (tmp_path / "tree" / "y").write_text("y")
    assert done(node, "tree", "box:tree", cwd=tmp_path)["files"] == 2
    assert done(node, "box:tree", "./", cwd=tmp_path / "tree" / "in")["bytesTransferred"] == 2
    assert (tmp_path / "tree" / "in" / "tree" / "in" / "x").read_text() == "x"


def test_a_folder_goes_into_one_that_is_there_and_its_programs_can_be_run(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "kit" / "run").chmod(0o755)
    (node.workspace / "place").mkdir()
    done(node, "kit", "box:place", cwd=tmp_path)
    assert [path.name for path in (node.workspace / "place").iterdir()] == ["kit"]
    assert os.access(node.workspace / "place" / "kit" / "run", os.X_OK)


def test_what_a_folder_holds_that_is_not_copied_is_said(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "odd" / "hollow").mkdir(parents=True)
    (tmp_path / "odd" / "file").write_text("x")
    (tmp_path / "odd" / "away").symlink_to("hollow")
    os.mkfifo(tmp_path / "odd" / "pipe")
    finished = cp(node, "odd", "box:odd", cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stderr.splitlines()[:-1] == [
        "left out: away is a link",
        "left out: hollow is an empty folder",
        "left out: pipe is not a file",
    ]


def test_what_is_said_without_json(node: NodeProcess) -> None:
    (node.workspace / "said").write_text("said")
    finished = cp(node, "box:said", "box:said-again")
    assert finished.returncode == 0 and finished.stdout == "" and "4 bytes copied" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("box:missing", "box:x"), 1, "not_found"),
        (("box:missing", "here"), 1, "not_found"),
        (("missing-here", "box:x"), 1, "not_found"),
        (("ghost:/x", "box:x"), 1, "not_found"),
        (("a", "b"), 2, "usage"),
        (("gsv:a", "gsv:b"), 1, "invalid_args"),
    ],
)
def test_failures(node: NodeProcess, tmp_path: Path, arguments: tuple[str, ...], status: int, code: str) -> None:
    finished = cp(node, *arguments, "--json", cwd=tmp_path)
    assert finished.returncode == status, finished
    assert json.loads(finished.stdout)["error"]["code"] == code
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_is_refused_says_why(node: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(30_000_000))
    (node.workspace / "folder.d" / "large").mkdir(parents=True)
    finished = cp(node, "large", "box:folder.d/", "--json", cwd=tmp_path)
    assert finished.returncode == 1 and "directory" in finished.stdout, finished
