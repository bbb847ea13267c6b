"""Commands under Landlock: variables of the caller act inside only."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farhand.machine.sandbox.landlock import LandlockSandbox
from farhand.machine.sandbox.launcher import landlock_version
from farhand.protocol.errors import Failed


@pytest.mark.skipif(landlock_version() < 1, reason="no Landlock")
def test_variables_of_the_caller_do_not_reach_the_launcher(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "work", tmp_path / "outside"
    workspace.mkdir()
    outside.mkdir()
    sandbox = LandlockSandbox(workspace)
    try:
        sandbox.check()
    except Failed as error:
        pytest.skip(error.message)
    # The loader of a program writes this file before the program begins.
    environment = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"{outside}/trace", "WHO": "you and me"}
    words = sandbox.words(str(workspace), environment)
    done = subprocess.run([*words, 'echo "$WHO"'], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "you and me\n" in done.stdout, done
    assert list(outside.iterdir()) == []
