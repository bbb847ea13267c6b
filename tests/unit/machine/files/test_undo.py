"""Changes of calls are kept and can be undone: on real files, with a full store, with a program that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.text import replace_text
from farhand.machine.files.undo import ChangedSince, undo
from farhand.machine.files.undo_log import UndoLog, call_id
from farhand.machine.patch.apply import apply_patch
from farhand.protocol.errors import Failed, NotAllowed, NotFound


@contextlib.contextmanager
def call(name: str) -> Iterator[None]:
    before = call_id.set(name)
    try:
        yield
    finally:
        call_id.reset(before)


class Machine:
    """Files with a store of what they held."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.work = folder / "work"
        self.work.mkdir(exist_ok=True)
        self.store = folder / "undo"
        self.options = options
        self.again()

    def again(self) -> None:
        """As another life of the program would find it."""
        self.undo_log = UndoLog(self.store, **self.options)
        self.files = Files(self.work, undo_log=self.undo_log)

    def write(self, name: str, path: str, content: bytes) -> None:
        with call(name):
            self.files.write(path, content)

    def undo(self, name: str, by: str = "u1", **options: Any) -> Any:
        with call(by):
            return undo(self.files, self.undo_log, name, **options)

    @property
    def contents(self) -> list[str]:
        return sorted(path.name for path in (self.store / "contents").iterdir())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_overwritten_file_gets_its_content_and_mode_back(machine: Machine) -> None:
    path = machine.work / "run.sh"
    path.write_bytes(b"old\r\n\xff")
    path.chmod(0o750)
    machine.write("c1", "run.sh", b"new")
    reported = machine.undo("c1")
    assert path.read_bytes() == b"old\r\n\xff"
    assert path.stat().st_mode & 0o777 == 0o750
    assert reported == {"call": "c1", "undone": True, "files": [{"path": str(path), "action": "restored", "bytes": 6}]}


def test_a_created_file_is_removed_and_a_removed_one_restored(machine: Machine) -> None:
    machine.write("c1", "made/deep/new.txt", b"new")
    assert machine.undo("c1")["files"][0]["action"] == "removed"
    assert not (machine.work / "made").exists(), "nor the folders it was made in"
    machine.undo("u1", "u0")
    assert (machine.work / "made/deep/new.txt").read_bytes() == b"new"
    (machine.work / "made/other").write_text("by hand")
    machine.undo("u0", "u00")
    assert [path.name for path in (machine.work / "made").iterdir()] == ["other"]
    gone = machine.work / "gone.txt"
    gone.write_text("kept")
    gone.chmod(0o640)
    with call("c2"):
        machine.files.remove("gone.txt")
    assert machine.undo("c2", "u2")["files"][0]["action"] == "recreated"
    assert gone.read_text() == "kept"
    assert gone.stat().st_mode & 0o777 == 0o640


def test_edits_appends_and_updates_are_kept(machine: Machine) -> None:
    path = machine.work / "a.txt"
    path.write_text("one two")
    with call("edit"):
        replace_text(machine.files, "a.txt", "two", "three")
    with call("append"):
        machine.files.append("a.txt", b" four")
    with call("update"):
        machine.files.update("a.txt", b"five")
    for name, content in (("update", "one three four"), ("append", "one three"), ("edit", "one two")):
        machine.undo(name, f"u-{name}")
        assert path.read_text() == content


def test_what_was_appended_to_is_a_copy(machine: Machine) -> None:
    """A second name for a file that is written in place would change with it."""
    path = machine.work / "log"
    path.write_bytes(b"1\n")
    with call("c1"):
        machine.files.append("log", b"2\n")
    with path.open("ab") as file:
        file.write(b"3\n")
    assert (machine.store / "contents" / machine.contents[0]).read_bytes() == b"1\n"


def test_a_file_with_a_second_name_is_copied(machine: Machine) -> None:
    path, other = machine.work / "a", machine.work / "b"
    path.write_bytes(b"shared")
    os.link(path, other)
    machine.write("c1", "a", b"mine")
    other.write_bytes(b"changed in place")
    machine.undo("c1")
    assert path.read_bytes() == b"shared"


PATCH = """*** Begin Patch
*** Update File: a.txt
-one
+ONE
*** Delete File: b.txt
*** Add File: c.txt
+made
*** Add File: d/e.txt
+deep
*** End Patch"""


def test_a_patch_is_undone_as_a_whole_or_not_at_all(machine: Machine) -> None:
    (machine.work / "a.txt").write_text("one\n")
    (machine.work / "b.txt").write_text("two\n")
    with call("p1"):
        apply_patch(machine.files, PATCH)
    (machine.work / "c.txt").write_text("edited by hand\n")
    with pytest.raises(ChangedSince, match=r"c\.txt"):
        machine.undo("p1")
    assert (machine.work / "a.txt").read_text() == "ONE\n"
    assert not (machine.work / "b.txt").exists()
    (machine.work / "c.txt").write_text("made\n")
    machine.undo("p1")
    assert {path.name: path.read_text() for path in machine.work.iterdir()} == {"a.txt": "one\n", "b.txt": "two\n"}


def test_a_file_changed_since_is_left_alone_and_the_refusal_says_why(machine: Machine) -> None:
    path = machine.work / "a.txt"
    path.write_text("old")
    machine.write("c1", "a.txt", b"new")
    path.write_text("by hand")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    with pytest.raises(ChangedSince) as refused:
        machine.undo("c1")
    said = refused.value.message
    assert f"'{path}' was changed since the call" in said
    assert "the call left 3 bytes" in said
    assert "it has 7 bytes" in said
    assert "changed at 2023-11-14T22:13:20Z" in said
    assert path.read_text() == "by hand"
    path.unlink()
    with pytest.raises(ChangedSince, match="it is gone"):
        machine.undo("c1")


def test_an_undo_can_be_undone_and_that_again(machine: Machine) -> None:
    path = machine.work / "a.txt"
    path.write_text("old")
    machine.write("c1", "a.txt", b"new")
    machine.undo("c1", "u1")
    with pytest.raises(Failed, match="already undone, by call u1 at 20"):
        machine.undo("c1", "u2")
    machine.undo("u1", "u3")
    assert path.read_text() == "new"
    machine.undo("c1", "u4")
    assert path.read_text() == "old"
    machine.again()
    with pytest.raises(Failed, match="already undone, by call u4"):
        machine.undo("c1", "u5")


def test_a_dry_run_shows_the_difference_and_does_nothing(machine: Machine) -> None:
    path = machine.work / "a.txt"
    path.write_text("one\ntwo\n")
    machine.write("c1", "a.txt", b"one\n2\n")
    reported = machine.undo("c1", dry_run=True)
    assert reported["undone"] is False and reported["dryRun"] is True
    assert reported["files"][0]["diff"] == f"--- {path}\n+++ {path}\n@@ -1,2 +1,2 @@\n one\n-2\n+two\n"
    assert path.read_text() == "one\n2\n"
    machine.undo("c1")


def test_without_a_call_nothing_is_kept(machine: Machine) -> None:
    machine.files.write("a.txt", b"1")
    machine.files.write("a.txt", b"2")
    assert not machine.store.exists()
    with pytest.raises(NotFound, match="nothing was kept for call c1"):
        machine.undo("c1")


def test_the_store_is_closed_to_others(machine: Machine) -> None:
    (machine.work / "a").write_text("old")
    machine.write("c1", "a", b"new")
    assert machine.store.stat().st_mode & 0o777 == 0o700
    assert (machine.store / "contents").stat().st_mode & 0o777 == 0o700
    assert (machine.store / "log").stat().st_mode & 0o777 == 0o600


def test_a_change_that_fails_keeps_nothing(machine: Machine) -> None:
    (machine.work / "a").write_text("old")
    with call("c1"), pytest.raises(Failed, match="changed by someone else"):
        machine.files.write("a", b"new", expected=b"other")
    with pytest.raises(NotFound):
        machine.undo("c1")
    assert machine.contents == []


def test_a_file_on_another_disk_is_copied(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        path = Path(elsewhere) / "a"
        path.write_bytes(b"old")
        if path.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is only one file system here")
        machine = Machine(tmp_path)
        machine.write("c1", str(path), b"new")
        machine.undo("c1")
        assert path.read_bytes() == b"old"


def test_a_name_that_is_not_text_works(machine: Machine) -> None:
    name = os.fsdecode(b"caf\xe9")
    (machine.work / name).write_bytes(b"old")
    machine.write("c1", name, b"new")
    machine.again()
    machine.undo("c1")
    assert (machine.work / name).read_bytes() == b"old"


def test_a_store_that_cannot_be_used_stops_no_write_and_undo_says_so(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.store.write_text("in the way")
    (machine.work / "a").write_text("old")
    machine.write("c1", "a", b"new")
    assert (machine.work / "a").read_text() == "new"
    assert "failed to record the changes" in caplog.text
    with pytest.raises(Failed, match="cannot be read"):
        machine.undo("c1")


def test_two_at_once_undo_once(machine: Machine) -> None:
    for round_ in range(10):
        path = machine.work / f"f{round_}"
        path.write_text("old")
        machine.write(f"c{round_}", path.name, b"new")
        start, ended = threading.Barrier(2), []

        def attempt(by: str, call: str = f"c{round_}", start: Any = start, ended: Any = ended) -> None:
            start.wait()
            try:
                machine.undo(call, by)
                ended.append("undone")
            except Failed as error:
                ended.append(error.message)

        threads = [threading.Thread(target=attempt, args=(f"u{round_}-{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert path.read_text() == "old"
        assert ended.count("undone") == 1, ended


# -- quota


def test_the_oldest_make_room_and_are_remembered_as_dropped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, quota=250, largest=200)
    for number in range(4):
        (machine.work / f"f{number}").write_bytes(b"%d" % number * 100)
        machine.write(f"c{number}", f"f{number}", b"new")
    assert len(machine.contents) == 2
    for _ in range(2):
        for number in (0, 1):
            with pytest.raises(NotFound, match="made room for newer changes"):
                machine.undo(f"c{number}")
        machine.again()
    machine.undo("c3")
    assert (machine.work / "f3").read_bytes() == b"3" * 100


def test_a_content_that_several_calls_had_is_kept_once_and_as_long_as_one_of_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, quota=1000)
    for number in range(3):
        (machine.work / f"f{number}").write_bytes(b"same" * 100)
        machine.write(f"c{number}", f"f{number}", b"new")
    assert len(machine.contents) == 1
    (machine.work / "big").write_bytes(b"x" * 700)
    machine.write("c3", "big", b"y")  # does not fit beside the others: all of them make room
    assert len(machine.contents) == 1
    machine.undo("c3")


def test_a_file_over_the_limit_is_not_kept_and_undo_says_so(tmp_path: Path) -> None:
    machine = Machine(tmp_path, quota=1000, largest=50)
    (machine.work / "big").write_bytes(b"x" * 51)
    machine.write("c1", "big", b"small")
    with pytest.raises(Failed, match=r"was not kept: '.*big': it had 51 bytes, and files of more than 50"):
        machine.undo("c1")
    machine.write("c2", "made", b"y" * 60)
    with pytest.raises(Failed, match="the new content has 60 bytes"):
        machine.undo("c2")
    assert machine.contents == []


def test_a_change_larger_than_the_whole_store_is_not_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path, quota=100)
    for name in ("a.txt", "b.txt"):
        (machine.work / name).write_text("one\n" * 20)
    with call("p1"):
        apply_patch(machine.files, "*** Begin Patch\n*** Delete File: a.txt\n*** Delete File: b.txt\n*** End Patch")
    with pytest.raises(Failed, match="more bytes than are kept in all"):
        machine.undo("p1")


def test_a_quota_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, quota=0)
    machine.write("c1", "a", b"1")
    assert not machine.store.exists()
    with pytest.raises(NotFound, match="the quota for undo is 0"):
        machine.undo("c1")


def test_the_log_does_not_grow_for_ever() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where a sync costs nothing
        machine = Machine(Path(folder), most_calls=5)
        for number in range(700):
            machine.write(f"c{number}", "a", b"%d" % number)
        assert len((machine.store / "log").read_bytes().splitlines()) < 1800
        machine.again()
        machine.undo("c699")
        assert (machine.work / "a").read_bytes() == b"698"


# -- rules


def test_the_rules_for_paths_hold(machine: Machine, tmp_path: Path) -> None:
    (machine.work / "a").write_text("old")
    machine.write("c1", "a", b"new")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    limited = [
        Files(elsewhere, roots=[ConfinedRoot(elsewhere)], undo_log=machine.undo_log),
        Files(machine.work, read_only=True, undo_log=machine.undo_log),
        Files(machine.work, hidden=[machine.work / "a"], undo_log=machine.undo_log),
    ]
    for files in limited:
        with call("u1"), pytest.raises(NotAllowed):
            undo(files, machine.undo_log, "c1")
    assert (machine.work / "a").read_text() == "new"


@pytest.mark.parametrize("removed", [False, True])
def test_a_path_that_became_a_folder_is_named_as_changed(machine: Machine, removed: bool) -> None:
    machine.write("c1", "note.txt", b"first")
    if removed:
        with call("c1"):
            machine.files.remove("note.txt")
    else:
        (machine.work / "note.txt").unlink()
    (machine.work / "note.txt").mkdir()
    (machine.work / "note.txt" / "inner").write_text("stays")
    for options in ({}, {"dry_run": True}):
        with pytest.raises(ChangedSince, match=r"was changed since the call.*now it is a folder.*nothing was undone"):
            machine.undo("c1", **options)
    assert (machine.work / "note.txt" / "inner").read_text() == "stays"
    os.rename(machine.work / "note.txt", machine.work / "aside")
    if not removed:
        (machine.work / "note.txt").write_bytes(b"first")
        assert machine.undo("c1")["files"][0]["action"] == "removed"


def test_a_path_that_became_a_pipe_is_named_as_changed(machine: Machine) -> None:
    machine.write("c1", "note.txt", b"first")
    (machine.work / "note.txt").unlink()
    os.mkfifo(machine.work / "note.txt")
    with pytest.raises(ChangedSince, match="now it is not a regular file"):
        machine.undo("c1")


def test_a_link_that_took_a_folders_place_is_not_followed(machine: Machine, tmp_path: Path) -> None:
    (machine.work / "d").mkdir()
    (machine.work / "d/a").write_text("old")
    machine.write("c1", "d/a", b"new")
    (machine.work / "d").rename(tmp_path / "moved")
    (machine.work / "d").symlink_to(tmp_path / "moved")
    with pytest.raises(ChangedSince, match="now leads to"):
        machine.undo("c1")
    assert (tmp_path / "moved/a").read_text() == "new"


def test_content_that_another_program_changed_is_not_restored_as_the_old_one(machine: Machine) -> None:
    path = machine.work / "log"
    path.write_bytes(b"old")
    with path.open("ab", buffering=0) as writer:
        machine.write("c1", "log", b"new")
        writer.write(b" and more")
    with pytest.raises(Failed, match="another program still wrote to the old file"):
        machine.undo("c1")
    assert path.read_bytes() == b"new"


# -- a program that is killed

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from farhand.machine.files.files import Files
    from farhand.machine.files.undo_log import UndoLog, call_id
    from farhand.machine.patch.apply import apply_patch

    work, store, when, step = sys.argv[1:]
    left = int(step)

    def watch(event, arguments):
        # The system calls by which a change is made; the one before the last of them is where the program ends.
        global left
        if event == when and str(arguments[0]).startswith(".farhand-"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    call_id.set("c1")
    files = Files(work, undo_log=UndoLog(Path(store)))
    if when == "os.rename" and int(step) == 0:
        files.write("a.txt", b"new")
    else:
        apply_patch(files, sys.stdin.read())
"""


def killed(machine: Machine, when: str, step: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(machine.work), str(machine.store), when, str(step)]
    done = subprocess.run(command, input=PATCH.encode(), check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_kill_between_keeping_and_writing_leaves_the_file_and_no_trace_in_the_store(machine: Machine) -> None:
    path = machine.work / "a.txt"
    path.write_text("old")
    killed(machine, "os.rename", 0)
    assert path.read_text() == "old"
    assert len(machine.contents) == 1, "it was kept before the change"
    assert path.stat().st_nlink == 2
    machine.again()
    with pytest.raises(NotFound):
        machine.undo("c1")
    assert machine.contents == []
    assert path.stat().st_nlink == 1
    path.write_text("by hand")
    machine.write("c2", "a.txt", b"newer")
    machine.undo("c2")
    assert path.read_text() == "by hand"


def test_a_patch_that_a_kill_cut_in_two_can_be_undone(machine: Machine) -> None:
    (machine.work / "a.txt").write_text("one\n")
    (machine.work / "b.txt").write_text("two\n")
    killed(machine, "os.rename", 1)  # the first file is changed, the last not yet made
    assert (machine.work / "a.txt").read_text() == "ONE\n"
    assert not (machine.work / "c.txt").exists()
    machine.again()
    machine.undo("c1")
    assert (machine.work / "a.txt").read_text() == "one\n"
    assert (machine.work / "b.txt").read_text() == "two\n"


def test_a_torn_log_costs_its_last_line_only(machine: Machine) -> None:
    for name in ("a", "b"):
        (machine.work / name).write_text("old")
        machine.write(f"c-{name}", name, b"new")
    log = machine.store / "log"
    log.write_bytes(log.read_bytes() + b'{"type":"kept","call":"c-x","cha')
    (machine.store / "contents" / ("0" * 64)).write_bytes(b"an orphan")
    machine.again()
    machine.undo("c-a", "u1")
    machine.undo("c-b", "u2")
    assert "0" * 64 not in machine.contents
