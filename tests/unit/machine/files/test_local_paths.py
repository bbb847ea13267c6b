"""Which files the tools of the gateway's machine may use, and attempts to reach others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.local_paths import SYSTEM_FOLDERS, local_files
from farhand.machine.files.refused_paths import AlreadyExists, ForbiddenPath, as_raised
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError


class Ground:
    """A home with its secrets, a workspace, a folder that can be allowed, and one that never is."""

    def __init__(self, top: Path) -> None:
        self.home = top / "home"
        self.workspace = self.home / "agents" / "main"
        self.other = top / "other"
        self.outside = top / "outside"
        for folder in (self.workspace, self.other, self.outside):
            folder.mkdir(parents=True)
            (folder / "note.txt").write_text(folder.name)
        for secret in ("token", "farhand.db", "farhand.toml", "gateway.json"):
            (self.home / secret).write_text("secret")
        self.allowed: list[str] = []
        self.files = local_files(self.workspace, self.home, lambda: self.allowed)

    def read(self, path: str | Path) -> str:
        with self.files.open(str(path)) as file:
            return file.read().decode()


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def test_relative_and_absolute_paths_of_the_workspace_are_allowed(ground: Ground) -> None:
    assert ground.read("note.txt") == ground.read(ground.workspace / "note.txt") == ground.read("./note.txt") == "main"


def test_an_allowed_folder_is_allowed_at_once_and_no_longer_than_that(ground: Ground) -> None:
    with pytest.raises(ForbiddenPath, match="outside the allowed folders"):
        ground.read(ground.other / "note.txt")
    ground.allowed = [str(ground.other)]
    assert ground.read(ground.other / "note.txt") == "other"
    assert ground.read("note.txt") == "main"
    ground.allowed = []
    with pytest.raises(ForbiddenPath):
        ground.read(ground.other / "note.txt")


def test_an_allowed_folder_may_come_later(ground: Ground) -> None:
    ground.allowed = [str(ground.other / "later"), str(ground.other)]
    assert ground.read(ground.other / "note.txt") == "other"
    (ground.other / "later").mkdir()
    ground.files.create(str(ground.other / "later" / "x"), b"x")


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../note.txt",
        "folder/../note.txt",
        "folder/..",
        "./..//./../x",
        "{workspace}/../main/note.txt",
        "/../etc/passwd",
        "..\\..\\note.txt",
        "folder\\..\\note.txt",
        "%2e%2e/note.txt",
        "..%2Fnote.txt",
        "%2E%2E%2fnote.txt",
        "%252e%252e%252fnote.txt",
        ".%2e/note.txt",
        "..%5cnote.txt",
    ],
)
def test_no_spelling_of_dot_dot_is_taken(ground: Ground, path: str) -> None:
    (ground.workspace / "folder").mkdir()
    with pytest.raises(ForbiddenPath, match=r"part '\.\.'"):
        ground.read(path.format(workspace=ground.workspace))


@pytest.mark.parametrize("name", ["...", "..a", "a..", "a..b", ".hidden", "~", "%2e", "a%2e%2eb"])
def test_names_that_only_look_like_dot_dot_are_names(ground: Ground, name: str) -> None:
    ground.files.create(name, b"fine")
    assert ground.read(name) == "fine"


@pytest.mark.parametrize("folder", SYSTEM_FOLDERS)
def test_system_folders_are_closed_whatever_is_allowed(ground: Ground, folder: str) -> None:
    ground.allowed = ["/"]
    os.symlink(folder, ground.workspace / "way")
    os.symlink(ground.workspace / "way", ground.workspace / "way2")
    for path in (folder, f"{folder}/x", f"/{folder}/x", f"/.{folder}//x", "way/x", "way2/x", "way"):
        with pytest.raises(ForbiddenPath):
            ground.files.place(path)
        with pytest.raises(ForbiddenPath):
            ground.files.create(path, b"")
    assert ground.read(ground.outside / "note.txt") == "outside"


@pytest.mark.parametrize("way", ["root", "task/{pid}/root", "fd/{fd}"])
def test_proc_leads_nowhere(ground: Ground, way: str) -> None:
    """Neither out of the allowed folders nor back into them."""
    ground.allowed = ["/"]
    folder = os.open("/", os.O_RDONLY)
    try:
        start = f"/proc/self/{way.format(pid=os.getpid(), fd=folder)}"
        (ground.workspace / "way").symlink_to(start)
        for path in (f"{start}{ground.workspace}/note.txt", f"{start}/etc/passwd", "way/etc/passwd", start):
            with pytest.raises(ForbiddenPath):
                ground.read(path)
    finally:
        os.close(folder)


@pytest.mark.parametrize("secret", ["token", "farhand.db", "farhand.toml", "gateway.json", "new", "jobs/x"])
def test_the_gateways_own_home_is_closed_but_for_the_workspaces(ground: Ground, secret: str) -> None:
    ground.allowed = ["/", str(ground.home)]
    (ground.workspace / "way").symlink_to(ground.home)
    for path in (f"{ground.home}/{secret}", f"way/{secret}"):
        with pytest.raises(ForbiddenPath, match="protected"):
            ground.read(path)
        with pytest.raises(ForbiddenPath):
            ground.files.create(path, b"")
    assert ground.read("way/agents/main/note.txt") == "main"


def test_a_workspace_of_ones_own_does_not_open_the_home(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    inside = ground.home / "mine"
    inside.mkdir()
    (inside / "a").write_text("a")
    around = local_files(tmp_path, ground.home, list)
    within = local_files(inside, ground.home, list)
    at = local_files(ground.home, ground.home, list)
    within.open("a").close()
    for files in (around, within, at):
        with pytest.raises(ForbiddenPath):
            files.open(str(ground.home / "token"))


def link_to_file(ground: Ground) -> str:
    (ground.workspace / "link").symlink_to(ground.outside / "note.txt")
    return "link"


def link_to_folder(ground: Ground) -> str:
    (ground.workspace / "link").symlink_to(ground.outside)
    return "link/note.txt"


def link_by_steps(ground: Ground) -> str:
    (ground.workspace / "a").symlink_to("b")
    (ground.workspace / "b").symlink_to("folder/c")
    (ground.workspace / "folder").mkdir()
    (ground.workspace / "folder" / "c").symlink_to("../../../../outside")
    return "a/note.txt"


def link_to_nothing(ground: Ground) -> str:
    (ground.workspace / "link").symlink_to(ground.outside / "new.txt")
    return "link"


@pytest.mark.parametrize("make", [link_to_file, link_to_folder, link_by_steps, link_to_nothing])
def test_links_out_are_followed_to_their_end_and_refused(ground: Ground, make: Callable[[Ground], str]) -> None:
    path = make(ground)
    before = sorted(ground.outside.iterdir())
    acts: list[Callable[[Files], object]] = [
        lambda files: files.open(path),
        lambda files: files.create(path, b"x"),
        lambda files: files.update(path, b"x"),
        lambda files: files.append(path, b"x"),
        lambda files: files.status(path),
    ]
    for act in acts:
        with pytest.raises(ForbiddenPath):
            act(ground.files)
    assert sorted(ground.outside.iterdir()) == before and (ground.outside / "note.txt").read_text() == "outside"


def test_a_link_within_the_allowed_folders_is_followed(ground: Ground) -> None:
    ground.allowed = [str(ground.other)]
    (ground.workspace / "link").symlink_to(ground.other)
    (ground.outside / "back").symlink_to(ground.workspace)
    assert ground.read("link/note.txt") == "other"
    assert ground.read(ground.outside / "back" / "note.txt") == "main"


def test_an_invalid_name_is_reported(ground: Ground) -> None:
    for path in ("a\0b", "x" * 256, "x/" * 3000 + "x"):
        with pytest.raises(InvalidArgs):
            ground.read(path)
        with pytest.raises(InvalidArgs):
            ground.files.create(path, b"")


def test_create_makes_folders_and_never_replaces(ground: Ground) -> None:
    ground.files.create("a/b/c.txt", b"first")
    with pytest.raises(AlreadyExists, match="already exists"):
        ground.files.create("a/b/c.txt", b"second")
    with pytest.raises(AlreadyExists):
        ground.files.create("a/b", b"second")
    assert ground.read("a/b/c.txt") == "first"
    assert os.listdir(ground.workspace / "a" / "b") == ["c.txt"]


def test_update_and_append_never_create(ground: Ground) -> None:
    for act in (ground.files.update, ground.files.append):
        with pytest.raises(NotFound):
            act("absent/x.txt", b"x")
        with pytest.raises(Failed):
            act(".", b"x")
    assert not (ground.workspace / "absent").exists()
    ground.files.update("note.txt", b"one")
    assert ground.files.append("note.txt", b", two") == len("one, two")
    assert ground.read("note.txt") == "one, two"


def content(files: Files, path: str) -> bytes | None:
    """Return what a file holds, or None where it cannot be read."""
    try:
        with files.open(path) as file:
            return file.read()
    except ToolError:
        return None


def test_a_path_is_judged_by_the_present_file(ground: Ground) -> None:
    place = ground.workspace / "swapped"
    for _ in range(3):
        place.write_text("plain")
        assert content(ground.files, "swapped") == b"plain"
        place.write_text("longer than before")
        assert content(ground.files, "swapped") == b"longer than before"
        place.unlink()
        assert content(ground.files, "swapped") is None
        place.symlink_to(ground.outside / "note.txt")
        assert content(ground.files, "swapped") is None
        place.unlink()
        os.mkfifo(place)
        assert content(ground.files, "swapped") is None
        place.unlink()
    (ground.workspace / "way").mkdir()
    (ground.workspace / "way" / "note.txt").write_text("inside")
    assert content(ground.files, "way/note.txt") == b"inside"
    (ground.workspace / "way" / "note.txt").unlink()
    (ground.workspace / "way").rmdir()
    (ground.workspace / "way").symlink_to(ground.outside)
    assert (ground.workspace / "way" / "note.txt").exists()
    assert content(ground.files, "way/note.txt") is None


def test_a_file_beneath_a_root_is_not_read_when_the_root_is_gone(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "more").mkdir()
    note = tmp_path / "more" / "note.txt"
    note.write_text("seen")
    roots = [ConfinedRoot(tmp_path / "work"), ConfinedRoot(tmp_path / "more")]
    allowed = {"now": tuple(roots)}
    files = Files(tmp_path / "work", roots=lambda: allowed["now"])
    assert content(files, str(note)) == b"seen"
    allowed["now"] = (roots[0],)
    assert content(files, str(note)) is None
    allowed["now"] = tuple(roots)
    assert content(files, str(note)) == b"seen"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "/nowhere/x", "note.txt", "a\nb/../x"])
def test_a_refusal_is_known_by_its_kind_and_text(ground: Ground, path: str) -> None:
    with pytest.raises((ForbiddenPath, AlreadyExists)) as refused:
        ground.files.create(path, b"x")
    assert type(as_raised(refused.value.kind, refused.value.message)) is refused.type


def test_another_error_is_not_taken_for_a_refusal_of_the_path() -> None:
    for kind, message in (
        ("failed", "Failed to write '/a already exists': No space left on device"),
        ("not_allowed", "Failed to write '/a': Permission denied"),
        ("not_found", "'/a' already exists"),
        ("timeout", "'/a' is in a protected folder; no tool may use it"),
    ):
        error = as_raised(kind, message)
        assert (error.kind, error.message) == (kind, message)
        assert not isinstance(error, ForbiddenPath | AlreadyExists)
