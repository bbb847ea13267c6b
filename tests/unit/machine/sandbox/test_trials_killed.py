"""A program that is killed while it keeps a trial: afterwards nothing is applied, or keeping again applies all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhand.machine.files.files import Files
from farhand.machine.files.transaction_log import roll_back_unfinished
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.errors import NotFound

KILLED = 77


class _NoSandbox:
    """The command is not run here: the test writes what it would have written."""

    mounts = ()
    disk = 0

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace

    def check(self) -> None:
        pass

    def words(self, *_: Any, **__: Any) -> list[str]:
        return []


class Machine:
    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "root", folder
        self.root.mkdir(parents=True, exist_ok=True)
        (folder / "log").mkdir(exist_ok=True)

    def trials(self) -> Trials:
        """What a program has that has just started."""
        files = Files(self.root, transaction_folder=self.folder / "log")
        roll_back_unfinished(files)

        def sandbox() -> Any:
            return _NoSandbox(str(self.root))

        return Trials(self.folder / "trials", files, [str(self.root)], sandbox)

    def try_changes(self) -> None:
        trials = self.trials()
        (self.root / "changed").write_text("old")
        (self.root / "gone").write_text("bye")
        trials.begin("one", "a command", str(self.root))
        upper = self.folder / "trials" / "one" / "upper0"
        (upper / "changed").write_text("new")
        (upper / "folder").mkdir()
        (upper / "folder" / "added").write_text("more")
        (upper / "link").symlink_to("changed")
        os.mknod(upper / "gone", 0o20000, 0)  # how an overlay marks what was deleted
        assert trials.finish("one").state == "ready"

    def content(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): os.readlink(path) if path.is_symlink() else path.read_text()
            for path in self.root.rglob("*")
            if path.is_symlink() or path.is_file()
        }


OLD = {"changed": "old", "gone": "bye"}
NEW = {"changed": "new", "folder/added": "more", "link": "changed"}


def keep_and_die(machine: Machine, function: str, count: int) -> int:
    """Keep the trial in a process that dies before the `count`th call of a function of `os`; return its status."""
    child = os.fork()
    if child == 0:
        real, left = getattr(os, function), [count]

        def dying(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os._exit(KILLED)
            return real(*args, **options)

        setattr(os, function, dying)
        try:
            machine.trials().keep("one")
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="the mark of a deleted file needs root")
@pytest.mark.parametrize("function", ["rename", "link", "unlink", "symlink", "mkdir", "fsync", "replace", "rmdir"])
@pytest.mark.parametrize("count", range(1, 9))
def test_a_kill_at_any_step_applies_all_or_nothing(tmp_path: Path, function: str, count: int) -> None:
    machine = Machine(tmp_path)
    machine.try_changes()
    status = keep_and_die(machine, function, count)
    assert status in (0, KILLED)
    trials = machine.trials()
    if status == KILLED:
        assert trials.find("one").state in ("ready", "keeping", "kept")
    trials.keep("one")
    assert machine.content() == NEW
    assert trials.find("one").state == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="the mark of a deleted file needs root")
def test_a_trial_that_expired_is_gone_unless_it_is_being_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.try_changes()
    record = tmp_path / "trials" / "one" / "trial.json"
    expired = msgspec.json.decode(record.read_bytes()) | {"expires_at": 1}
    record.write_bytes(msgspec.json.encode(expired | {"state": "keeping"}))
    assert machine.trials().keep("one").state == "kept" and machine.content() == NEW
    other = Machine(tmp_path / "other")
    other.try_changes()
    record = other.folder / "trials" / "one" / "trial.json"
    record.write_bytes(msgspec.json.encode(msgspec.json.decode(record.read_bytes()) | {"expires_at": 1}))
    with pytest.raises(NotFound):
        other.trials().keep("one")
    assert other.content() == OLD and not record.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the mark of a deleted file needs root")
def test_a_kill_before_the_first_file_leaves_the_old_ones(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.try_changes()
    assert keep_and_die(machine, "link", 1) == KILLED
    machine.trials()
    assert machine.content() == OLD
