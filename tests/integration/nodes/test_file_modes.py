"""What the gateway and a node store is for their owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(home: Path) -> list[str]:
    """Return what other users may read, write or enter in a home, apart from the content of workspaces and skills."""
    found = []
    for folder, folders, files in os.walk(home):
        if folder in (f"{home}/agents", f"{home}/skills", f"{home}/skill-files"):
            folders.clear()
            continue
        for name in (*folders, *files):
            path = Path(folder) / name
            status = path.lstat()
            if name != "skill-files" and not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077:
                found.append(f"{path.relative_to(home)} {stat.S_IMODE(status.st_mode):04o}")
    if home.stat().st_mode & 0o077:
        found.append(".")
    return sorted(found)


def use(gateway: GatewayProcess, node: NodeProcess) -> None:
    """A bit of everything that leaves files behind."""

    def ok(tool: str, arguments: Any = None) -> Any:
        answer = gateway.invoke(tool, arguments)
        assert answer["ok"], answer
        return answer["result"]

    ok("gsv__WriteFile", {"path": "memory/notes.md", "content": "remember the milk\n"})
    ok("gsv__WriteFile", {"path": "deep/er/notes.md", "content": "x"})
    ok("write", {"path": "new/er/file.txt", "content": "x"})
    ok("write", {"path": "new/er/file.txt", "content": "y"})
    ok("write", {"path": "patched.txt", "content": "old\n"})
    ok("apply_patch", {"patch": "*** Begin Patch\n*** Update File: patched.txt\n@@\n-old\n+new\n*** End Patch"})
    ok("exec", {"command": "echo out; echo err >&2"})
    ok("box__Bash", {"command": "echo out"})
    ok("box__Write", {"path": "a.txt", "content": "x"})
    ok("box__Write", {"path": "a.txt", "content": "y"})
    (node.workspace / "folder").mkdir(exist_ok=True)
    (node.workspace / "folder" / "in.txt").write_text("x")
    ok("gsv__Transfer", {"source": "box:folder", "destination": "gsv:moved"})
    ok("gsv__Transfer", {"source": "gsv:moved", "destination": "box:back"})
    put = gateway.request(
        "PUT", "/v1/workspace/main/typed.bin", b"x", headers={"Content-Type": "application/x-something"}
    )
    assert put.status == 200, put
    assert gateway.request("PUT", "/v1/skills/greet/SKILL.md", b"---\nname: greet\ndescription: x\n---\n").status == 200
    assert gateway.request("POST", "/v1/freeze", {"reason": "test"}).status in (200, 202)
    assert gateway.request("POST", "/v1/thaw", {}).status in (200, 202)
    ok("memory_search", {"query": "milk"})


def backed_up(home: Path, archive: Path) -> None:
    done = run_process([*FARHAND, "backup", str(archive)], env={**os.environ, "FARHAND_HOME": str(home)})
    assert done.returncode == 0, done.stderr


def test_a_used_home_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with open_umask(), GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "box", "box") as node:
        use(gateway, node)
        assert not (found := open_to_others(home)), found
        assert not (found := open_to_others(node.state)), found
        backed_up(home, tmp_path / "backup.tar.gz")
        assert stat.S_IMODE((tmp_path / "backup.tar.gz").stat().st_mode) == 0o600
        assert stat.S_IMODE((node.workspace / "a.txt").stat().st_mode) == 0o666, "what is lent keeps its modes"
        gateway.stop()
        gateway.start()
        gateway.wait_for_node("box")
        use(gateway, node)
        assert not (found := open_to_others(home)), found


def test_a_home_of_an_earlier_version_is_closed_at_the_start(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "box", "box") as node:
        use(gateway, node)
        script = home / "agents" / "main" / "run.sh"
        script.write_text("#!/bin/sh\n")
        gateway.stop()
        node.stop()
        for top in (home, node.state):
            for folder, folders, files in os.walk(top):
                for name in (*folders, *files):
                    path = Path(folder) / name
                    if not path.is_symlink():
                        path.chmod(0o755 if path.is_dir() or name == "run.sh" else 0o644)
        gateway.start()
        node.start()
        assert not (found := open_to_others(home)), found
        assert not (found := open_to_others(node.state)), found
        assert stat.S_IMODE(script.stat().st_mode) == 0o755, "a workspace keeps its modes"


def test_a_workspace_of_ones_own_keeps_normal_modes(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir(mode=0o755)
    (work / "mine.txt").write_text("x")
    (work / "mine.txt").chmod(0o644)
    before = os.umask(0o022)
    try:
        with GatewayProcess(home, "--workspace", str(work)) as gateway:
            assert gateway.invoke("write", {"path": "new/file.txt", "content": "x"})["ok"]
            assert gateway.invoke("write", {"path": "mine.txt", "content": "y"})["ok"]
            assert gateway.invoke("exec", {"command": "umask > umask.txt"})["ok"]
            modes = {
                name: stat.S_IMODE((work / name).stat().st_mode) for name in ("new", "new/file.txt", "mine.txt", ".")
            }
            assert modes == {"new": 0o755, "new/file.txt": 0o644, "mine.txt": 0o644, ".": 0o755}
            assert (work / "umask.txt").read_text() == "0022\n"
            assert not (found := open_to_others(home)), found
    finally:
        os.umask(before)
