"""`--memory`, `--cpus`, `--processes` and `--disk` of a node: given, shown, stored, or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess


def shown(gateway: GatewayProcess, name: str) -> dict[str, Any]:
    nodes = gateway.get("/v1/nodes")["nodes"]
    return dict(next(node for node in nodes if node["node_id"] == name)["runtime"]["limits"])


def refused(gateway: GatewayProcess, state: Path, *options: str) -> str:
    command = [*FARHAND, "node", "--gateway", gateway.url, "--id", "limited", "--token", "x"]
    done = run_process([*command, "--home", str(state), *options], env=os.environ)
    assert done.returncode != 0
    return done.stderr


def test_limits_hold_are_shown_and_stay(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "node"
    root.mkdir()
    options = ["--root", str(root), "--memory", "512M", "--disk", "1M"]
    with NodeProcess(shared_gateway, folder, "limited", *options) as node:
        limits = shown(shared_gateway, "limited")
        assert limits["memory"] == "512M" and limits["disk"] == "1M" and limits["limits"] in ("cgroup", "rlimits")
        listed = Command(shared_gateway.home)("nodes").out
        assert "memory 512M" in listed and f"by {limits['limits']}" in listed, listed
        bomb = node.ok("Bash", {"command": "/usr/bin/python3 -c 'x = bytearray(2 * 1024**3)'"})
        assert bomb["status"] == "failed"
        node.ok("Bash", {"command": "head -c 5000000 /dev/zero > file"})
        assert (root / "file").stat().st_size == 1024**2
        fill = {"command": "for i in 1 2 3 4 5; do head -c 900000 /dev/zero > f$i; done; sleep 100"}
        full = node.ok("Bash", fill)
        assert full["status"] == "failed" and "its limit (disk) is 1048576" in full["output"], full
        tried = node.fails("Bash", {**fill, "trial": True}, "failed")
        assert "a trial has at most 1048576" in tried, tried
        node.stop()
        assert "allows more than before" in refused(shared_gateway, folder / "state", "--memory", "1G")
        if limits["limits"] == "rlimits":
            assert "cpus 1 needs a control group" in refused(shared_gateway, folder / "state", "--cpus", "1")
    with NodeProcess(shared_gateway, folder, "limited") as node:
        assert shown(shared_gateway, "limited")["memory"] == "512M", "stored"
    assert "is not a size" in refused(shared_gateway, tmp_path / "new", "--root", str(root), "--memory", "much")
    assert "needs --root" in refused(shared_gateway, tmp_path / "new", "--memory", "1G")
