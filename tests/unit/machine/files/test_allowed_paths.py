"""The path check: spellings, links, and folders that are recognised by what they are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from farhand.machine.files.allowed_paths import MOST_LINKS, AllowedPaths
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.refused_paths import ForbiddenPath, as_raised
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note").write_text("note")
    return folder


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("a", "{work}/a"),
        ("", "{work}"),
        ("a/", "{work}/a"),
        ("./a//b/.", "{work}/a/b"),
        ("/etc", "/etc"),
        ("//etc", "/etc"),
        ("///etc", "/etc"),
        ("//./etc//x", "/etc/x"),
        ("/..//etc", "/etc"),
        ("//..//etc", "/etc"),
        ("//", "/"),
        ("a/../../b", "{work}/../b"),
        ("a.", "{work}/a."),
        ("a ", "{work}/a "),
    ],
)
def test_spellings_of_the_same_path_are_one_path(work: Path, path: str, meant: str) -> None:
    assert AllowedPaths(work).normalise(path) == os.path.normpath(meant.format(work=work))


def test_a_workspace_that_is_spelled_oddly_is_the_same_workspace(work: Path) -> None:
    assert AllowedPaths(f"/{work}").check("note").real == str(work / "note")


@pytest.mark.parametrize("path", ["/proc/self/root/etc", "/proc/self/cwd", "/proc/1/root", "/dev/fd/0", "/dev/stdin"])
def test_links_of_processes_are_never_followed(work: Path, path: str) -> None:
    """Also where everything is allowed: their text is no path, or one of another process's world."""
    (work / "way").symlink_to(path)
    for spelled in (path, "way", "way/x"):
        with pytest.raises(ForbiddenPath, match="link of a process") as refused:
            AllowedPaths(work).check(spelled)
        assert type(as_raised(refused.value.kind, refused.value.message)) is ForbiddenPath


def test_the_plain_links_in_proc_are_links(work: Path) -> None:
    assert AllowedPaths(work).check("/proc/self/status").real == f"/proc/{os.getpid()}/status"


def test_a_link_that_lies_in_a_protected_folder_is_not_followed_even_back_into_a_root(
    work: Path, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "back").symlink_to(work)
    (work / "way").symlink_to(closed / "back")
    paths = AllowedPaths(work, roots=[ConfinedRoot(work)], hidden=[closed])
    for spelled in ("way/note", "way"):
        with pytest.raises(ForbiddenPath, match="protected"):
            paths.check(spelled)


def test_a_read_only_root_is_not_writable_through_another_root(work: Path) -> None:
    (work / "shown" / "inner").mkdir(parents=True)
    shown = ConfinedRoot(work / "shown", writable=False)
    others = [
        ConfinedRoot("/"),
        ConfinedRoot(work),
        ConfinedRoot(work / "shown"),
        ConfinedRoot(work / "shown" / "inner"),
    ]
    for roots in ([shown, *others], [*others, shown]):
        files = Files(work, roots=roots)
        files.write("note", b"written")
        for path in ("shown/x", "shown/inner/x"):
            with pytest.raises(NotAllowed, match="read-only"):
                files.write(path, b"x")


def test_a_circle_is_an_error_within_the_roots_and_outside_of_them_merely_outside(work: Path, tmp_path: Path) -> None:
    for folder in (work, tmp_path):
        (folder / "round").symlink_to("round")
    files = Files(work, roots=[ConfinedRoot(work)])
    with pytest.raises(Failed, match="round"):
        files.place("round/x")
    with pytest.raises(ForbiddenPath, match="outside"):
        files.place(str(tmp_path / "round" / "x"))


def test_a_chain_may_have_as_many_links_as_the_kernel_follows(work: Path) -> None:
    (work / "l0").symlink_to("note")
    for number in range(1, MOST_LINKS + 1):
        (work / f"l{number}").symlink_to(f"l{number - 1}")
    files = Files(work)
    files.open(f"l{MOST_LINKS - 1}").close()
    (work / f"l{MOST_LINKS - 1}").read_text()
    with pytest.raises(OSError):
        (work / f"l{MOST_LINKS}").read_text()
    with pytest.raises(Failed):
        files.open(f"l{MOST_LINKS}")


def test_a_path_that_is_too_long_is_refused_quickly(work: Path) -> None:
    for path in ("a/" * 1_000_000, "./" * 1_000_000 + "x" * 5000, "x" * 10_000_000):
        with pytest.raises(InvalidArgs):
            Files(work).open(path)


def test_a_protected_folder_is_recognised_under_another_name(tmp_path: Path) -> None:
    """A second mount of it, as a container or a bind mount has; on other systems, another case of its letters."""
    script = f"""
        import os, subprocess, sys
        from pathlib import Path
        from farhand.machine.files.files import Files
        from farhand.machine.search.glob import glob_files
        from farhand.machine.files.listing import list_folder
        from farhand.machine.files.refused_paths import ForbiddenPath
        from farhand.machine.files.confined_root import ConfinedRoot

        top = Path({str(tmp_path)!r})
        for name in ("work/again", "work/agents", "home/agents/main"):
            (top / name).mkdir(parents=True)
        (top / "home" / "token").write_text("secret")
        (top / "home" / "agents" / "main" / "note").write_text("note")
        for source, target in (("home", "work/again"), ("home/agents", "work/agents")):
            if subprocess.run(["mount", "--bind", top / source, top / target], stderr=subprocess.DEVNULL).returncode:
                print("no mounts here")
                sys.exit()
        files = Files(top / "work", roots=[ConfinedRoot(top)], hidden=[top / "home"], exposed=[top / "home" / "agents"])
        for act in (
            lambda: files.open("again/token"),
            lambda: files.write("again/token", b"x"),
            lambda: files.write("again/new", b"x"),
            lambda: files.remove("again/token"),
            lambda: files.place("again"),
            lambda: list_folder(files, "again"),
        ):
            try:
                act()
            except ForbiddenPath:
                continue
            raise AssertionError("a second mount of a protected folder was used")
        assert files.open("again/agents/main/note").read() == files.open("agents/main/note").read() == b"note"
        assert [os.path.basename(path) for path in glob_files(files, "**/*", ".")] == ["note"]
        assert (top / "home" / "token").read_text() == "secret"
        print("held")
    """
    ran = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    if (ran.returncode and "unshare" in ran.stderr) or "no mounts here" in ran.stdout:
        pytest.skip("no mounts can be made here")
    assert (ran.returncode, ran.stdout) == (0, "held\n"), ran.stderr
