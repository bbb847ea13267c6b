"""Limits given to `farhand join` also apply when the node is started again without options."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_"))}


@contextlib.contextmanager
def running(gateway: GatewayProcess, *words: str) -> Iterator[None]:
    """`farhand …` until the block ends, with the node `borrowed` online."""
    process = start_process([*FARHAND, *words], CLEAN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        gateway.wait_for_node("borrowed")
        yield
    finally:
        process.terminate()
        process.wait(60)
        gateway.wait_for_node("borrowed", online=False)


def test_a_second_start_lends_no_more_than_the_join(gateway: GatewayProcess, tmp_path: Path) -> None:
    """U1: limits and tags were silently gone, and Bash ran."""
    root, home = tmp_path / "lent", tmp_path / "other"
    root.mkdir()
    (tmp_path / "outside.txt").write_text("kept\n")
    code = Command(gateway.home)("node", "pair", "--json").json()["code"]
    joined = ["join", code, "--id", "borrowed", "--home", str(home), "--root", str(root), "--tag", "web"]
    for words in (joined, ["node", "--home", str(home)]):
        with running(gateway, *words):
            look = gateway.invoke("borrowed__Bash", {"command": f"cat {tmp_path}/outside.txt"})
            assert "kept" not in str(look), (words[0], look)
            read = gateway.invoke("borrowed__Read", {"path": f"{tmp_path}/outside.txt"})
            assert read["error"]["kind"] == "not_allowed", (words[0], read)
            assert gateway.wait_for_node("borrowed")["tags"] == ["web"]
            assert gateway.invoke("borrowed__Write", {"path": "new.txt", "content": "x"})["ok"] is True
