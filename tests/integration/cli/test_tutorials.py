"""The tutorial of the SDK with a token; `tests/docs` runs the other commands of the tutorials."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.harness import ROOT, GatewayProcess, PluginProcess

TUTORIAL = ROOT / "docs" / "tutorial"
Run = Callable[[str], subprocess.CompletedProcess[str]]


def section(page: str, number: int) -> str:
    """Return the part of a page below the heading with this number."""
    return re.split(r"^## ", (TUTORIAL / page).read_text(), flags=re.MULTILINE)[number]


def commands(text: str) -> list[str]:
    return re.findall(r"^\$ (.*)$", text, re.MULTILINE)


@pytest.fixture
def run(gateway: GatewayProcess, tmp_path: Path) -> Run:
    environ = {
        **os.environ,
        "FARHAND_HOME": str(gateway.home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        command = command.replace("/tmp/", f"{tmp_path}/")
        return subprocess.run(
            ["bash", "-c", command], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_first_plug_in(gateway: GatewayProcess, run: Run, tmp_path: Path) -> None:
    page = "first-plug-in.md"
    source = re.search(r"```python\n(.*?)```", section(page, 1), re.DOTALL)
    assert source is not None
    _dev, create, _start = commands(section(page, 2))
    token = re.search(r"fhn_\S+", run(create).stdout)
    assert token is not None
    environ = {"SA_NODE_ID": "notes", "SA_NODE_TOKEN": token[0], "SA_GATEWAY_WS_URL": gateway.url}
    script = source[1].replace('Path("notes")', f"Path({str(tmp_path / 'notes')!r})")
    with PluginProcess(script, tmp_path, environ):
        gateway.wait_for_node("notes")
        shown = [run(command) for command in commands(section(page, 3))]
    assert "Write a note" in shown[0].stdout
    assert shown[2].stdout.strip() == "Green, 80 degrees."
    assert shown[3].stderr.strip() in section(page, 3)
