"""Attempts of an attacker that the gateway and its nodes withstand: lent folders, agents, restarts and nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, free_port, wait_until

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

# -- programs in a lent folder ------------------------------------------------------------------------------------


@needs_bubblewrap
def test_no_program_of_a_lent_folder_runs_outside(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    """The virtual environment of a project is often on PATH."""
    root, escaped = tmp_path / "root", tmp_path / "escaped"
    programs = root / "venv" / "bin"
    programs.mkdir(parents=True)
    path = f"{programs}:{os.environ['PATH']}"
    with NodeProcess(shared_gateway, tmp_path, "onpath", "--root", str(root), env={"PATH": path}):
        false = f'#!/bin/sh\ntouch {escaped}\nexec {shutil.which("bwrap")} "$@"\n'
        for name in ("bwrap", "env", "python3", "sh"):
            command = f"cat > {programs}/{name} <<'END'\n{false}END\nchmod 755 {programs}/{name}"
            assert shared_gateway.invoke("onpath__Bash", {"command": command})["ok"] is True
        for tool, args in (("Bash", {"command": "true"}), ("Grep", {"pattern": "x"}), ("Process", {"action": "list"})):
            assert shared_gateway.invoke(f"onpath__{tool}", args)["ok"] is True
        assert not escaped.exists()


@pytest.mark.parametrize("option", [(), ("--sandbox", "none"), ("--sandbox", "landlock"), ("--read-only",)])
def test_a_node_does_not_lend_what_it_runs_from(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A node that is started in the folder that it lends would find modules there."""
    command = [sys.executable, "-m", "farhand", "node", "--gateway", "http://127.0.0.1:9", "--token", "x"]
    command += ["--home", str(tmp_path / "state"), "--root", str(tmp_path / "root"), *option]
    (tmp_path / "root").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}/root/lib:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        try:
            said = node.stderr.readline()
            refused = "cannot start: Farhand itself would run from" in said
            assert refused is (option != ("--read-only",)), said
        finally:
            node.kill()


def test_the_node_of_up_takes_no_program_of_its_current_folder(tmp_path: Path) -> None:
    workspace, escaped = tmp_path / "workspace", tmp_path / "escaped"
    (workspace / "farhand").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        (workspace / "farhand" / name).write_text(f"open({str(escaped)!r}, 'w')\n")
    port = free_port()
    command = [sys.executable, "-P", "-m", "farhand", "up", "--port", str(port), "--home", str(tmp_path / "home")]
    with subprocess.Popen([*command, "--workspace", "."], cwd=workspace, stdout=subprocess.PIPE) as up:
        try:
            gateway = GatewayProcess(tmp_path / "home", port=port)
            assert up.stdout is not None and b"ready" in up.stdout.readline()
            wait_until(lambda: escaped.exists() or any(one["online"] for one in gateway.get("/v1/nodes")["nodes"]))
            assert not escaped.exists()
        finally:
            up.terminate()
            up.wait(60)
