"""Commands under bubblewrap: what they see, what they cannot reach, and what is refused rather than given up."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from farhand.machine.sandbox.bubblewrap import Sandbox
from farhand.machine.sandbox.confinement import Mount, SandboxError
from farhand.protocol.errors import Failed, NotAllowed

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def run(sandbox: Sandbox, command: str, workdir: Path | None = None, **environment: str) -> tuple[int, str]:
    sandbox.check()
    words = sandbox.words(str(workdir or sandbox.workspace), environment)
    done = subprocess.run([*words, command], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_workspace_is_writable_and_the_rest_of_the_computer_is_not_there(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    sandbox = Sandbox(workspace)
    assert run(sandbox, "echo made > a.txt; pwd") == (0, f"{workspace}\n")
    assert (workspace / "a.txt").read_text() == "made\n"
    assert run(sandbox, f"cat {tmp_path}/secret")[0] != 0
    assert run(sandbox, "cat /etc/shadow")[0] != 0
    assert run(sandbox, "ls -A /home 2>/dev/null")[1] == ""
    assert run(sandbox, "touch /usr/farhand-test")[0] != 0
    assert run(sandbox, f"touch {tmp_path}/x")[0] == 0 and not (tmp_path / "x").exists()
    assert run(sandbox, "mount -t tmpfs none /mnt")[0] != 0


def test_processes_and_capabilities_of_the_computer_are_not_there(workspace: Path) -> None:
    sandbox = Sandbox(workspace)
    assert run(sandbox, f"kill -0 {os.getpid()}")[0] != 0
    assert run(sandbox, "grep CapEff /proc/self/status")[1].split() == ["CapEff:", "0" * 16]


def test_the_environment_is_the_callers_and_not_the_gateways(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    status, said = run(Sandbox(workspace), "env", WHO="you")
    assert status == 0 and "WHO=you" in said and "secret" not in said
    assert f"HOME={workspace}" in said


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_available_only_if_it_is_chosen(workspace: Path, network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close() if network else None, daemon=True).start()
        command = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        status, _ = run(Sandbox(workspace, network=network), f"bash -c '{command}'")
    assert (status == 0) is network


def test_mounts_are_read_only_unless_they_are_writable(workspace: Path, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    sandbox = Sandbox(
        workspace,
        mounts=[Mount(str(tmp_path / "ro"), "/data/ro"), Mount(str(tmp_path / "rw"), "/data/rw", writable=True)],
    )
    assert run(sandbox, "cat /data/ro/a.txt /data/rw/a.txt") == (0, "rorw")
    assert run(sandbox, "echo x > /data/ro/b.txt")[0] != 0
    assert run(sandbox, "echo x > /data/rw/b.txt")[0] == 0
    assert (tmp_path / "rw" / "b.txt").exists() and not (tmp_path / "ro" / "b.txt").exists()
    assert run(sandbox, "pwd", tmp_path / "rw") == (0, "/data/rw\n")
    with pytest.raises(NotAllowed, match="not in the sandbox"):
        run(sandbox, "pwd", tmp_path)


@root_only
def test_another_user_is_really_another_user(workspace: Path) -> None:
    os.chown(workspace, 1234, 4321)
    workspace.chmod(0o700)  # closed to root without capabilities
    sandbox = Sandbox(workspace, user="1234:4321")
    assert run(sandbox, "id -u; id -g; touch mine; grep CapEff /proc/self/status")[1].split()[:2] == ["1234", "4321"]
    made = (workspace / "mine").stat()
    assert (made.st_uid, made.st_gid) == (1234, 4321)


@root_only
def test_a_workspace_the_user_cannot_write_is_refused(workspace: Path) -> None:
    with pytest.raises(Failed, match="not writable for user 1234"):
        run(Sandbox(workspace, user="1234"), "true")


def test_a_sandbox_that_the_machine_does_not_support_is_refused_and_nothing_runs(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Failed, match="does not exist; the command did not run"):
        Sandbox(workspace, mounts=[Mount(str(tmp_path / "nowhere"), "/data")]).check()
    with pytest.raises(SandboxError, match="neither a known name"):
        Sandbox(workspace, user="no such person")
    with pytest.raises(SandboxError, match="absolute"):
        Sandbox(workspace, mounts=[Mount("relative", "/data")])
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    (broken / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(broken))
    with pytest.raises(
        Failed, match=r"does not work on this machine: bwrap: No permissions .*; the command did not run"
    ):
        Sandbox(workspace).check()
    (broken / "bwrap").unlink()
    with pytest.raises(Failed, match="'bwrap' is missing"):
        Sandbox(workspace).check()
