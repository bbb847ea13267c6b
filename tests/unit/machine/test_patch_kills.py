"""A patch over several files is applied whole or not at all, wherever the program is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.transaction_log import roll_back_unfinished
from tests.support.fork_server import run_process

PATCH = """\
*** Begin Patch
*** Update File: a.txt
@@
-one
+ONE
*** Add File: new/deep/b.txt
+new
*** Delete File: sub/c.txt
*** Update File: sub/d.txt
*** Move to: moved/d.txt
@@
-old
+new
*** Update File: e.txt
@@
-five
+FIVE
*** End Patch
"""

PROGRAM = """\
import os, signal, sys
from pathlib import Path
from farhand.machine.files.files import Files
from farhand.machine.patch.apply import apply_patch
from farhand.machine.files.confined_root import ConfinedRoot

folder, intents, patch, last = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
files = Files(folder, roots=[ConfinedRoot(folder)], transaction_folder=intents)
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir"}
count = 0

def watch(event, arguments):
    global count
    if event in CHANGES or (event == "open" and arguments[2] & os.O_CREAT):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
apply_patch(files, patch)
print(count)
"""

# Of these steps: the first file is changed then, the last is not.
HALF_WAY = 18


def make(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for name, text in {"a.txt": "one\n", "sub/c.txt": "gone\n", "sub/d.txt": "old\n", "e.txt": "five\n"}.items():
        (folder / name).write_text(text)
    (folder / "e.txt").chmod(0o640)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def patch(work: Path, transaction_folder: Path, last: int) -> subprocess.CompletedProcess[str]:
    program = transaction_folder.with_name("program.py")
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(work), str(transaction_folder), PATCH, str(last)]
    return run_process(command, env=os.environ)


def test_a_kill_before_any_change_of_the_disk_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Killed before each rename, link, removal, folder and new file in turn."""
    whole = tmp_path / "whole"
    make(whole)
    before = tree(whole)
    done = patch(whole, tmp_path / "none", 0)
    assert done.returncode == 0, done.stderr
    after, steps = tree(whole), int(done.stdout)
    assert before != after and steps > 20
    seen = set()
    for last in range(1, steps + 1):
        work, transaction_folder = tmp_path / f"work-{last}", tmp_path / f"intents-{last}"
        make(work)
        assert patch(work, transaction_folder, last).returncode == -9
        files = Files(work, roots=[ConfinedRoot(work)], transaction_folder=transaction_folder)
        roll_back_unfinished(files)
        found = tree(work)
        assert found in (before, after), f"killed at step {last} of {steps}"
        assert not list(transaction_folder.glob("*")) and roll_back_unfinished(files) == 0
        assert (work / "e.txt").stat().st_mode & 0o777 == 0o640
        seen.add(found == after)
    assert seen == {False, True}


def test_a_finished_patch_leaves_nothing_behind(tmp_path: Path) -> None:
    make(tmp_path / "work")
    assert patch(tmp_path / "work", tmp_path / "intents", 0).returncode == 0
    assert list((tmp_path / "intents").iterdir()) == []
    assert not [name for name in tree(tmp_path / "work") if "farhand" in name]


def killed_half_way(tmp_path: Path) -> Files:
    """A patch whose first file is changed and whose last is not."""
    work, transaction_folder = tmp_path / "work", tmp_path / "intents"
    make(work)
    assert patch(work, transaction_folder, HALF_WAY).returncode == -9
    assert (work / "a.txt").read_text() == "ONE\n" and (work / "e.txt").read_text() == "five\n"
    return Files(work, roots=[ConfinedRoot(work)], transaction_folder=transaction_folder)


def test_names_that_are_not_text_are_put_right_too(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"w\xfcrk")
    make(odd)
    before = tree(odd)
    assert patch(odd, tmp_path / "intents", HALF_WAY).returncode == -9
    assert roll_back_unfinished(Files(odd, roots=[ConfinedRoot(odd)], transaction_folder=tmp_path / "intents")) == 1
    assert tree(odd) == before


def test_a_file_changed_since_the_kill_is_not_reverted(tmp_path: Path) -> None:
    files = killed_half_way(tmp_path)
    own = Path(files.workspace) / "a.txt"
    own.write_text("by hand\n")
    assert roll_back_unfinished(files) == 1
    assert own.read_text() == "by hand\n"


@pytest.mark.parametrize("text", ["", "{", '[{"path": 1}]'])
def test_an_intent_that_cannot_be_read_stops_nothing(tmp_path: Path, text: str) -> None:
    transaction_folder = tmp_path / "intents"
    transaction_folder.mkdir()
    (transaction_folder / "x.json").write_text(text)
    assert (
        roll_back_unfinished(Files(tmp_path, roots=[ConfinedRoot(tmp_path)], transaction_folder=transaction_folder))
        == 0
    )


def test_a_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    files = killed_half_way(tmp_path)
    work, outside = Path(files.workspace), tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("ONE\n")
    work.rename(tmp_path / "aside")
    work.symlink_to(outside)
    assert roll_back_unfinished(files) == 0
    assert (outside / "a.txt").read_text() == "ONE\n"
