"""Changes in folders as the kernel reports them."""

from pathlib import Path

import pytest

from farhand.machine.files.watch import FolderWatch


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "old").write_text("old")
    return tmp_path / "one", tmp_path / "two"


def test_every_kind_of_change_is_reported_once(watched: tuple[Path, Path]) -> None:
    one, two = watched
    watch = FolderWatch(watched)
    try:
        assert watch.changed() == set()
        (one / "new").write_text("new")
        assert watch.changed() == {(0, "new")}
        assert watch.changed() == set()
        with (two / "old").open("a") as file:
            file.write("more")
        assert watch.changed() == {(1, "old")}
        (two / "old").chmod(0o600)
        assert watch.changed() == {(1, "old")}
        (one / "new").rename(two / "moved")
        assert watch.changed() == {(0, "new"), (1, "moved")}
        (two / "moved").unlink()
        (two / "d\udcffd").write_text("a name that is no text")
        assert watch.changed() == {(1, "moved"), (1, "d\udcffd")}
        (one / "folder").mkdir()
        watch.changed()
        (one / "folder" / "inner").write_text("not asked for")
        assert watch.changed() == set()
    finally:
        watch.close()


@pytest.mark.parametrize("what", ["replaced", "gone", "replaced above"])
def test_a_replaced_folder_is_reported(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    watch = FolderWatch([folder])
    try:
        if what == "replaced above":
            (tmp_path / "above").rename(tmp_path / "before")
            folder.mkdir(parents=True)
        else:
            folder.rename(tmp_path / "before")
            if what == "replaced":
                folder.mkdir()
        assert watch.changed() is None
    finally:
        watch.close()


def test_a_folder_that_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nothing", tmp_path / "file", Path("/proc/self")):
        with pytest.raises(OSError, match=r"."):
            FolderWatch([path])


def test_too_many_changes_are_reported_as_unknown(watched: tuple[Path, Path]) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 100_000:
        pytest.skip("the kernel keeps more events here than is worth making")
    watch = FolderWatch(watched)
    try:
        paths = [watched[0] / "a", watched[0] / "b"]  # the same event twice in a row is reported once
        for path in paths:
            path.write_text("")
        for number in range(most + 1):
            paths[number % 2].chmod(0o600)
        assert watch.changed() is None
    finally:
        watch.close()
