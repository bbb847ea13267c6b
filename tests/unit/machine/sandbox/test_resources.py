"""Limits of resources: read, compared, given by a control group or by rlimits, or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farhand.machine.sandbox.confinement import SandboxError
from farhand.machine.sandbox.launch import Launch
from farhand.machine.sandbox.levels import ChosenSandbox, SandboxPlan
from farhand.machine.sandbox.resources import CGROUP, RLIMITS, AppliedLimits, ResourceLimits, apply_limits
from tests.integration.nodes.test_lent_folder_shell import LEVELS
from tests.unit.machine.sandbox.test_escapes import words_as

MIB, GIB = 1024**2, 1024**3


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="farhand-disk-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


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
    applied = apply_limits(limits, "my node", mount=mount, own=own)
    group = str(mount / "service" / "farhand-my_node")
    assert applied == AppliedLimits(CGROUP, group, {"file_size": 1000}, disk=1000, temporary=1000)
    written = {path.name: path.read_text() for path in Path(group).iterdir()}
    assert written["memory.max"] == str(GIB) and written["memory.swap.max"] == "0"
    assert written["cpu.max"] == "150000 100000" and written["pids.max"] == "20"
    assert (mount / "service" / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert (mount / "service" / "farhand-program" / "cgroup.procs").read_text() == str(os.getpid())
    # Started again, it is in the group that it made.
    own.write_text("0::/service/farhand-program\n")
    assert apply_limits(limits, "my node", mount=mount, own=own).cgroup == group


def test_a_command_joins_the_group_before_it_starts(tmp_path: Path) -> None:
    words = Launch(cgroup=str(tmp_path)).words()
    done = subprocess.run([*words, "/bin/echo", "ran"], capture_output=True, text=True, check=False)
    assert done.stdout == "ran\n" and (tmp_path / "cgroup.procs").read_text() == "0"
    words = Launch(cgroup=str(tmp_path / "gone")).words()
    lost = subprocess.run([*words, "/bin/echo", "ran"], capture_output=True, text=True, check=False)
    assert lost.returncode == 126 and "the command did not run" in lost.stderr and lost.stdout == ""


def test_a_limit_that_cannot_be_enforced_is_refused(tmp_path: Path) -> None:
    mount, own = groups(tmp_path, controllers="cpuset")
    with pytest.raises(SandboxError, match=r"cpus 1 needs a control group.*no controller for cpu"):
        apply_limits(ResourceLimits(cpus=1), "n", mount=mount, own=own)
    if os.geteuid() == 0:
        with pytest.raises(SandboxError, match="processes 9 needs a control group"):
            apply_limits(ResourceLimits(processes=9), "n", mount=mount, own=own)
    applied = apply_limits(ResourceLimits(memory=GIB, disk=10), "n", mount=mount, own=own)
    assert applied == AppliedLimits(RLIMITS, "", {"memory": GIB, "file_size": 10}, disk=10, temporary=10)
    assert apply_limits(ResourceLimits(), "n", mount=mount, own=own) == AppliedLimits()


Run = Callable[[str], subprocess.CompletedProcess[str]]


def confined(folder: Path, level: str, limits: ResourceLimits, uid: int = os.geteuid()) -> Run:
    """Return a way to run commands in a folder with limits, which no control group enforces."""
    applied = apply_limits(limits, "n", mount=folder, own=Path("/dev/null"))
    sandbox = ChosenSandbox(SandboxPlan(workspace=str(folder), level=level, limits=applied))
    sandbox.check()
    words = words_as(uid, sandbox, folder)
    os.chown(folder, uid, uid)

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, command], capture_output=True, text=True, check=False, timeout=120)

    return run


@pytest.mark.parametrize("level", LEVELS)
def test_too_much_memory_and_a_large_file_are_stopped(tmp_path: Path, level: str) -> None:
    run = confined(tmp_path, level, ResourceLimits(memory=512 * MIB, disk=MIB))
    bomb = run("/usr/bin/python3 -c 'x = bytearray(2 * 1024**3)'")
    assert bomb.returncode != 0 and "MemoryError" in bomb.stderr, bomb
    run("head -c 5000000 /dev/zero > file")
    assert (tmp_path / "file").stat().st_size == MIB
    assert run("ulimit -v unlimited || echo cannot; ulimit -f unlimited || echo cannot").stdout.count("cannot") >= 1
    assert "No space left" in run("for i in 1 2 3; do head -c 1000000 /dev/zero > /tmp/$i; done").stderr


REMOVED = """
import os
for number in range(20):
    file = os.open("gone", os.O_CREAT | os.O_WRONLY)
    os.write(file, bytes(1048576))
    os.unlink("gone")
os.system("sleep 100")
"""
NEST = "for i in $(seq 500); do mkdir d; cd d; done"
# Each adds 1 MiB twenty times, and does not end by itself.
FILLING = {
    "files": "for i in $(seq 20); do head -c 1048576 /dev/zero > f$i; done",
    "removed files": f"/usr/bin/python3 -c '{REMOVED}'",
    "closed folders": "for i in $(seq 20); do mkdir d$i; head -c 1048576 /dev/zero > d$i/f; chmod 0 d$i; done",
    "deep folders": f"{NEST}; for i in $(seq 20); do head -c 1048576 /dev/zero > f$i; done",
    "space without data": "for i in $(seq 20); do fallocate -l 1048576 f$i; done",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")
@pytest.mark.parametrize("uid", [0, 65534])
@pytest.mark.parametrize("how", FILLING)
@pytest.mark.parametrize("level", LEVELS)
def test_the_total_that_a_command_adds_is_limited(open_folder: Path, level: str, how: str, uid: int) -> None:
    (open_folder / "old").write_bytes(bytes(20 * MIB))  # counts for nothing
    run = confined(open_folder, level, ResourceLimits(disk=8 * MIB), uid)
    fine = run("head -c 4000000 /dev/zero > fine; cat old > /dev/null; echo done; exit 3")
    assert (fine.returncode, fine.stdout, fine.stderr) == (3, "done\n", "")
    full = run(f"{FILLING[how]}; sleep 100; : {open_folder.name}")
    assert full.returncode == 122 and "its limit (disk) is 8388608" in full.stderr, full
    running = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
    assert open_folder.name not in running
    subprocess.run(["chmod", "-R", "u+rwX", str(open_folder)], check=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_limited_command_ends_as_it_would_without(tmp_path: Path, level: str) -> None:
    run = confined(tmp_path, level, ResourceLimits(disk=8 * MIB))
    assert run("exit 7").returncode == 7
    plain = confined(tmp_path, level, ResourceLimits())
    assert run("kill -9 $$").returncode == plain("kill -9 $$").returncode
    assert run("kill -TERM $$").returncode == plain("kill -TERM $$").returncode


def test_a_command_with_limits_joins_its_group(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    for disk in (0, MIB):
        limits = AppliedLimits(CGROUP, str(group), disk=disk)
        sandbox = ChosenSandbox(SandboxPlan(workspace=str(tmp_path), limits=limits))
        (group / "cgroup.procs").write_text("")
        done = subprocess.run([*sandbox.words(str(tmp_path)), "echo in"], capture_output=True, text=True, check=False)
        assert done.stdout == "in\n" and (group / "cgroup.procs").read_text() == "0"
