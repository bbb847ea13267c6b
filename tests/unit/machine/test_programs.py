"""Programs that run outside of a sandbox are not taken from folders that commands inside may change."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from farhand.machine.programs import find_program
from farhand.machine.sandbox.confinement import SandboxError
from farhand.machine.sandbox.host_commands import HostCommands
from farhand.machine.sandbox.levels import refuse_own_program


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_lent_and_relative_folders_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent, linked = tmp_path / "lent", tmp_path / "linked"
    program(lent / "bin" / "tool")
    own = program(tmp_path / "own" / "tool")
    linked.mkdir()
    (linked / "tool").symlink_to(lent / "bin" / "tool")
    monkeypatch.chdir(lent / "bin")
    monkeypatch.setenv("PATH", f"{lent}/bin::.:{tmp_path}/own/../lent/bin:{linked}:{tmp_path}/own")
    assert find_program("tool", [str(lent)]) == own
    assert find_program("tool", [str(lent), str(tmp_path)]) is None
    assert find_program("tool") == f"{lent}/bin/tool"
    with pytest.raises(Exception, match="'ssh' is missing"):
        program(lent / "bin" / "ssh")
        HostCommands(frozenset(), "", 22, "", "", "", (str(lent),)).words()


@pytest.mark.parametrize("place", [sys.prefix, sys.base_prefix, Path(sys.executable).parent, Path(__file__).parents[3]])
def test_no_sandbox_holds_the_program_itself(place: str | os.PathLike[str]) -> None:
    """The sources of this test are on the path of modules."""
    with pytest.raises(SandboxError, match="Farhand itself would run from"):
        refuse_own_program([str(place)])


def test_a_folder_in_which_modules_would_be_looked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_own_program([str(tmp_path)])
    (tmp_path / "link").symlink_to(tmp_path.parent)
    for entry in (tmp_path, tmp_path / "not-yet", tmp_path / "link" / "lib"):
        monkeypatch.setattr(sys, "path", [*sys.path, str(entry)])
        with pytest.raises(SandboxError):
            refuse_own_program([str(tmp_path)])
        monkeypatch.undo()
