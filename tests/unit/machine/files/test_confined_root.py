"""Which files may be used: roots, links, hidden folders, and a process that swaps folders for links."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farhand.machine.files.confined_root import ConfinedRoot, Opener, _kernel_can, open_stepwise, open_with_openat2
from farhand.machine.files.files import Files
from farhand.machine.search.glob import glob_files
from farhand.machine.search.grep import grep_files
from farhand.protocol.errors import InvalidArgs, NotAllowed, NotFound, ToolError

OPENERS = [pytest.param(open_stepwise, id="walk")]
if _kernel_can():
    OPENERS.append(pytest.param(open_with_openat2, id="kernel"))
RACE_SECONDS = 60.0 if os.environ.get("FARHAND_SIEGE") == "long" else 1.0


@pytest.fixture(params=OPENERS)
def opener(request: pytest.FixtureRequest) -> Opener:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """`inside` is the allowed folder, `outside` is not."""
    (tmp_path / "inside" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "inside" / "deep" / "note").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "note").write_text("outside")
    return tmp_path


def content(files: Files, path: str) -> str:
    with files.open(path) as file:
        return file.read().decode()


def names_in(root: ConfinedRoot, real: str, **options: bool) -> list[str]:
    folder = root.open_folder(real, **options)
    try:
        return sorted(os.listdir(f"/proc/self/fd/{folder}"))
    finally:
        os.close(folder)


# -- the primitive: folders beneath, no links


def test_folders_beneath_are_opened(place: Path, opener: Opener) -> None:
    root = ConfinedRoot(place / "inside", opener=opener)
    assert names_in(root, root.path) == ["deep"]
    assert names_in(root, root.path + "/deep") == ["er", "note"]


@pytest.mark.parametrize("path", ["{top}/outside", "{top}", "{top}/inside/../outside", "{top}/inside-too"])
def test_a_path_outside_is_refused(place: Path, opener: Opener, path: str) -> None:
    (place / "inside-too").mkdir()
    with pytest.raises(OSError) as refused:
        ConfinedRoot(place / "inside", opener=opener).open_folder(path.format(top=place))
    assert refused.value.errno in (errno.EXDEV, errno.EINVAL)


@pytest.mark.parametrize("target", ["../outside", "deep", "/", "/proc/self/root"])
def test_a_link_on_the_way_is_never_followed(place: Path, opener: Opener, target: str) -> None:
    (place / "inside" / "link").symlink_to(target)
    root = ConfinedRoot(place / "inside", opener=opener)
    for path in (root.path + "/link", root.path + "/link/er"):
        with pytest.raises(OSError) as refused:
            root.open_folder(path)
        assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR)


def test_missing_folders_are_made_on_request(place: Path, opener: Opener) -> None:
    root = ConfinedRoot(place / "inside", opener=opener)
    with pytest.raises(FileNotFoundError):
        root.open_folder(root.path + "/new/er")
    assert names_in(root, root.path + "/new/er", make=True) == []
    assert (place / "inside" / "new" / "er").is_dir()


def test_folders_are_not_made_through_a_link(place: Path, opener: Opener) -> None:
    (place / "inside" / "link").symlink_to("../outside")
    with pytest.raises(OSError):
        ConfinedRoot(place / "inside", opener=opener).open_folder(str(place / "inside/link/new"), make=True)
    assert not (place / "outside" / "new").exists()


def test_no_descriptor_is_left_open(place: Path, opener: Opener) -> None:
    root = ConfinedRoot(place / "inside", opener=opener)
    before = os.listdir("/proc/self/fd")
    for path in ("/deep", "/missing/x", "/deep/note/x"):
        try:
            os.close(root.open_folder(root.path + path))
        except OSError:
            continue
    assert os.listdir("/proc/self/fd") == before


def test_a_root_must_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="missing"):
        ConfinedRoot(tmp_path / "missing")


# -- the policy: where a path really leads


def test_without_roots_any_absolute_path_is_used_as_it_is(place: Path) -> None:
    files = Files(place / "inside")
    assert content(files, str(place / "outside" / "note")) == "outside"
    assert files.resolve(str(place / "outside" / "note")) == str(place / "outside" / "note")


@pytest.mark.parametrize(
    ("path", "meant"),
    [("a", "{w}/a"), ("./a//b", "{w}/a/b"), ("deep/../x", "{w}/x"), ("", "{w}"), ("~/x", "{w}/~/x"), ("/x", "/x")],
)
def test_relative_paths_start_at_the_workspace(tmp_path: Path, path: str, meant: str) -> None:
    assert Files(tmp_path).resolve(path) == meant.format(w=tmp_path)


@pytest.mark.parametrize("path", ["../outside/note", "{top}/outside/note", "deep/../../outside/note", "/etc/passwd"])
def test_with_a_root_nothing_outside_is_reached(place: Path, path: str) -> None:
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside")])
    with pytest.raises(NotAllowed, match="outside the allowed folders"):
        files.open(path.format(top=place))


@pytest.mark.parametrize("target", ["../outside/note", "{top}/outside/note", "/proc/self/root{top}/outside/note"])
def test_a_link_to_the_outside_is_refused(place: Path, target: str) -> None:
    (place / "inside" / "link").symlink_to(target.format(top=place))
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside")])
    with pytest.raises(NotAllowed):
        files.open("link")
    with pytest.raises(NotAllowed):
        files.write("link", b"changed")
    assert (place / "outside" / "note").read_text() == "outside"


@pytest.mark.parametrize("target", ["deep/note", "{top}/inside/deep/note", "../inside/deep/note"])
def test_a_link_that_stays_inside_is_followed(place: Path, target: str) -> None:
    (place / "inside" / "link").symlink_to(target.format(top=place))
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside")])
    assert content(files, "link") == "inside"


def test_a_link_that_leads_nowhere_outside_creates_nothing_there(place: Path) -> None:
    (place / "inside" / "link").symlink_to(place / "outside" / "new")
    with pytest.raises(NotAllowed):
        Files(place / "inside", roots=[ConfinedRoot(place / "inside")]).write("link", b"x")
    assert not (place / "outside" / "new").exists()


def test_several_roots(place: Path) -> None:
    (place / "third").mkdir()
    (place / "third" / "note").write_text("third")
    (place / "inside" / "over").symlink_to(place / "outside" / "note")
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside"), ConfinedRoot(place / "outside")])
    assert content(files, "deep/note") == "inside"
    assert content(files, str(place / "outside" / "note")) == "outside"
    assert content(files, "over") == "outside"
    with pytest.raises(NotAllowed):
        files.open(str(place / "third" / "note"))


def test_a_root_given_through_a_link_allows_both_spellings(place: Path) -> None:
    (place / "alias").symlink_to("inside")
    files = Files(place / "alias", roots=[ConfinedRoot(place / "alias")])
    assert content(files, "deep/note") == "inside"
    assert content(files, str(place / "inside" / "deep" / "note")) == "inside"


def test_a_workspace_outside_the_roots_grants_no_access(place: Path) -> None:
    with pytest.raises(NotAllowed):
        Files(place / "outside", roots=[ConfinedRoot(place / "inside")]).open("note")


def test_hidden_folders_are_never_reached(place: Path) -> None:
    (place / "inside" / "link").symlink_to("deep")
    (place / "alias").symlink_to("inside/deep")
    files = Files(place / "inside", hidden=[place / "alias"])
    for path in ("deep/note", "link/note", "deep", str(place / "alias" / "note")):
        with pytest.raises(NotAllowed, match="protected"):
            files.open(path)
    with pytest.raises(NotAllowed):
        files.write("deep/new", b"")
    (place / "inside" / "deeper").write_text("not hidden")
    assert content(files, "deeper") == "not hidden"


@pytest.mark.parametrize("path", ["a\0b", "\0", "\ud800"])
def test_text_that_cannot_name_a_file_is_an_invalid_argument(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidArgs, match="'path'"):
        Files(tmp_path).open(path)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in ("a", "a/x"):
        with pytest.raises(ToolError):
            Files(tmp_path).open(path)


# -- the race: a neighbour swaps a folder for a link to the outside, as fast as it can


def swap_for_ever(inside: Path) -> None:
    """Exchange `door` (a folder) and `trap` (a link) in one step, so that there always is a door."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2
    while libc.renameat2(here, bytes(inside / "door"), here, bytes(inside / "trap"), exchange) == 0:
        pass
    os._exit(1)


@contextmanager
def swapping(place: Path) -> Iterator[None]:
    (place / "inside" / "door").mkdir()
    (place / "inside" / "door" / "note").write_text("inside")
    (place / "inside" / "trap").symlink_to(place / "outside")
    neighbour = multiprocessing.get_context("fork").Process(target=swap_for_ever, args=(place / "inside",), daemon=True)
    neighbour.start()
    try:
        yield
        assert neighbour.is_alive()
    finally:
        neighbour.kill()
        neighbour.join()


def checked_then_opened(place: Path) -> str:
    """The usual mistake: the path is judged by name and opened by name."""
    real = os.path.realpath(place / "inside" / "door" / "note")
    if not real.startswith(str(place / "inside")):
        raise PermissionError
    return (place / "inside" / "door" / "note").read_text()


def seen(read: Callable[[], str], seconds: float, until: str | None = None) -> dict[str, int]:
    counts: dict[str, int] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end and until not in counts:
        try:
            answer = read()
        except (OSError, ToolError):
            answer = "refused"
        counts[answer] = counts.get(answer, 0) + 1
    return counts


@pytest.mark.siege
def test_the_race_is_real(place: Path) -> None:
    with swapping(place):
        assert "outside" in seen(lambda: checked_then_opened(place), 60, until="outside")


@pytest.mark.siege
def test_a_swapped_folder_never_shows_the_outside(place: Path, opener: Opener) -> None:
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside", opener=opener)])
    with swapping(place):
        counts = seen(lambda: content(files, "door/note"), RACE_SECONDS)
    assert "outside" not in counts
    assert counts["inside"] > 0


@pytest.mark.siege
def test_a_swapped_folder_never_takes_a_write_to_the_outside(place: Path, opener: Opener) -> None:
    files = Files(place / "inside", roots=[ConfinedRoot(place / "inside", opener=opener)])
    with swapping(place):
        counts = seen(lambda: files.write("door/new", b"x") and "written", RACE_SECONDS)
        counts |= seen(lambda: files.write("door/made/new", b"x") and "made", RACE_SECONDS)
    assert os.listdir(place / "outside") == ["note"]
    assert (place / "outside" / "note").read_text() == "outside"
    assert counts["written"] > 0


@pytest.mark.siege
def test_a_search_through_a_swapped_folder_never_shows_the_outside(place: Path) -> None:
    (place / "outside" / "only-here").write_text("outside")
    root = str(place / "inside")
    files = Files(root, roots=[ConfinedRoot(root)])

    def searched() -> str:
        matches, _ = grep_files(files, "outside", ".")
        return "outside" if any("outside" in match.content for match in matches) else "nothing"

    def listed() -> str:
        return "outside" if any("only-here" in path for path in glob_files(files, "**/*", ".")) else "nothing"

    with swapping(place):
        counts = seen(searched, RACE_SECONDS)
        counts_of_names = seen(listed, RACE_SECONDS)
    assert counts.keys() == {"nothing"}
    assert counts_of_names.keys() == {"nothing"}
