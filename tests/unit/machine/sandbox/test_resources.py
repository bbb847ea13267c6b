"""Limits of resources: read, compared, given by a control group or by rlimits, or refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from farhand.machine.sandbox.confinement import SandboxError
from farhand.machine.sandbox.launch import Launch
from farhand.machine.sandbox.lent import lent_sandbox
from farhand.machine.sandbox.resources import CGROUP, RLIMITS, LimitedSandbox, ResourceLimits, apply_limits
from tests.integration.nodes.test_lent_folder_shell import LEVELS

GIB = 1024**3


def test_settings_are_read() -> None:
    assert ResourceLimits.read("2G", "1.5", "200", "512M") == ResourceLimits(2 * GIB, 1.5, 200, 512 * 1024**2)
    assert ResourceLimits.read("", "", "", "") == ResourceLimits()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("2 GB of", "", "", ""), "is not a size"),
        (("-1", "", "", ""), "is not a size"),
        (("1K", "", "", ""), "too little"),
        (("", "0", "", ""), "above 0"),
        (("", "1e9", "", ""), "above 0"),
        (("", "", "1.5", ""), "whole number"),
        (("", "", "", "lots"), "is not a size"),
        (("9" * 40, "", "", ""), "is not a size"),
    ],
)
def test_what_is_not_a_limit_is_refused(given: tuple[str, str, str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ResourceLimits.read(*given)


def test_limits_are_compared() -> None:
    most = ResourceLimits(memory=GIB, processes=10)
    assert ResourceLimits(memory=GIB, processes=9, cpus=1).is_within(most)
    assert not ResourceLimits(memory=2 * GIB, processes=9).is_within(most)
    assert not ResourceLimits(memory=GIB).is_within(most), "none is more than any"


def groups(folder: Path, controllers: str = "cpu memory pids") -> tuple[Path, Path]:
    """Files as the kernel shows them in a control group that a program may change."""
    base = folder / "mount" / "service"
    base.mkdir(parents=True)
    (base / "cgroup.controllers").write_text(controllers)
    own = folder / "own"
    own.write_text("0::/service\n")
    return folder / "mount", own


def test_a_control_group_holds_the_commands(tmp_path: Path) -> None:
    mount, own = groups(tmp_path)
    limits = ResourceLimits(memory=GIB, cpus=1.5, processes=20, disk=1000)
    level, group, each = apply_limits(limits, "my node", mount=mount, own=own)
    assert level == CGROUP and each == {"file_size": 1000}
    assert group == str(mount / "service" / "farhand-my_node")
    written = {path.name: path.read_text() for path in Path(group).iterdir()}
    assert written["memory.max"] == str(GIB) and written["memory.swap.max"] == "0"
    assert written["cpu.max"] == "150000 100000" and written["pids.max"] == "20"
    assert (mount / "service" / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert (mount / "service" / "farhand-program" / "cgroup.procs").read_text() == str(os.getpid())
    # Started again, it is in the group that it made.
    own.write_text("0::/service/farhand-program\n")
    assert apply_limits(limits, "my node", mount=mount, own=own)[1] == group


def test_a_command_joins_the_group_before_it_starts(tmp_path: Path) -> None:
    words = Launch(cgroup=str(tmp_path)).words()
    done = subprocess.run([*words, "/bin/echo", "ran"], capture_output=True, text=True, check=False)
    assert done.stdout == "ran\n" and (tmp_path / "cgroup.procs").read_text() == "0"
    words = Launch(cgroup=str(tmp_path / "gone")).words()
    lost = subprocess.run([*words, "/bin/echo", "ran"], capture_output=True, text=True, check=False)
    assert lost.returncode == 126 and "the command did not run" in lost.stderr and lost.stdout == ""


def test_what_cannot_be_given_is_refused(tmp_path: Path) -> None:
    mount, own = groups(tmp_path, controllers="cpuset")
    with pytest.raises(SandboxError, match=r"--cpus needs a control group.*no controller for cpu"):
        apply_limits(ResourceLimits(cpus=1), "n", mount=mount, own=own)
    if os.geteuid() == 0:
        with pytest.raises(SandboxError, match="--processes needs a control group"):
            apply_limits(ResourceLimits(processes=9), "n", mount=mount, own=own)
    level, group, each = apply_limits(ResourceLimits(memory=GIB, disk=10), "n", mount=mount, own=own)
    assert (level, group, each) == (RLIMITS, "", {"memory": GIB, "file_size": 10})
    assert apply_limits(ResourceLimits(), "n", mount=mount, own=own) == ("", "", {})


@pytest.mark.parametrize("level", LEVELS)
def test_a_memory_bomb_and_a_full_disk_are_stopped(tmp_path: Path, level: str) -> None:
    limits = ResourceLimits(memory=512 * 1024**2, disk=1024**2)
    _, _, each = apply_limits(limits, "n", mount=tmp_path, own=groups(tmp_path, "cpuset")[1])
    _, sandbox, reason = lent_sandbox(level, [str(tmp_path)], tmp_path, limits=each)
    assert sandbox is not None, reason

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*sandbox.words(str(tmp_path)), command], capture_output=True, text=True, check=False, timeout=60
        )

    bomb = run("/usr/bin/python3 -c 'x = bytearray(2 * 1024**3)'")
    assert bomb.returncode != 0 and "MemoryError" in bomb.stderr, bomb
    run("head -c 5000000 /dev/zero > file")
    assert (tmp_path / "file").stat().st_size == 1024**2
    assert run("ulimit -v unlimited || echo cannot; ulimit -f unlimited || echo cannot").stdout.count("cannot") >= 1


def test_a_limited_sandbox_prefixes_commands(tmp_path: Path) -> None:
    _, sandbox, reason = lent_sandbox("auto", [str(tmp_path)], tmp_path)
    assert sandbox is not None, reason
    group = tmp_path / "group"
    group.mkdir()
    limited = LimitedSandbox(sandbox, str(group))
    limited.check()
    done = subprocess.run([*limited.words(str(tmp_path)), "echo in"], capture_output=True, text=True, check=False)
    assert done.stdout == "in\n" and (group / "cgroup.procs").read_text() == "0"
