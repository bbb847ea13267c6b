"""Trial runs: a command works on a copy-on-write view of the folders, and its changes are kept or discarded later.

Each trial has a folder with the upper folders of its overlays and a file that describes it. Both survive the program,
as the command does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farhand.machine.files.allowed_paths import CheckedPath
from farhand.machine.files.confined_root import closing_descriptor
from farhand.machine.files.files import Files, open_parent
from farhand.machine.files.private_files import replace_private
from farhand.machine.files.refused_paths import PROTECTED, ForbiddenPath
from farhand.machine.files.transaction import FileChange, change_files
from farhand.machine.files.undo_log import call_id
from farhand.machine.sandbox import overlay
from farhand.machine.sandbox.launch import Launch
from farhand.machine.sandbox.levels import ChosenSandbox, outermost
from farhand.machine.sandbox.overlay import ADDED, DELETED, Change, Lower
from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.protocol.redaction import KnownSecrets

MIB: Final = 1024 * 1024
QUOTA: Final = 1024 * MIB  # of all changes of a trial
MOST_FILE: Final = 512 * MIB
MOST_TRIALS: Final = 20
# Of one caller. All callers together leave as many to the owner.
MOST_OF_CALLER: Final = 5
# Of trials that changed nothing, or have ended.
MOST_ENDED: Final = 100
EXPIRES_SECONDS: Final = 24 * 60 * 60
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_RECORD: Final = "trial.json"
_LISTED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Each level takes an open file.
_DEEPEST: Final = 200
_UNMOUNTABLE: Final = re.compile(r"[,:\\]")


class TrialConflict(Failed):
    """A file that a trial changed has been changed since; nothing was applied."""


class Trial(msgspec.Struct, frozen=True):
    """A trial and its state: `running`, `ready`, `keeping`, `kept`, `discarded` or `failed`."""

    id: str
    command: str
    state: str
    started_at: int
    expires_at: int
    # The lent folders, in the order of their upper folders.
    folders: tuple[str, ...]
    # Bytes that it may change.
    quota: int = QUOTA
    changes: tuple[Change, ...] = ()
    error: str = ""
    # The result of the command, as its tool gave it.
    result: dict[str, Any] = {}
    # Who is behind it; empty for the owner.
    caller: str = ""
    # The call that applied its changes, which can be undone.
    kept_by: str = ""

    def lowers(self) -> dict[str, Lower]:
        """Return the lent folders."""
        return {folder: Lower(folder) for folder in self.folders}

    def described(self) -> dict[str, Any]:
        """Return the trial as callers see it."""
        shown = [change.shown for change in self.changes]
        found: dict[str, Any] = self.result | {
            "trialId": self.id,
            "command": self.command,
            "state": self.state,
            "changes": shown,
        }
        found |= {"startedAt": self.started_at, "expiresAt": self.expires_at}
        found |= {"keptBy": self.kept_by} if self.kept_by else {}
        return found | ({"error": self.error} if self.error else {})


class Trials:
    """The trials of one machine. Methods block: call them in a thread."""

    def __init__(
        self,
        folder: Path,
        files: Files,
        roots: Sequence[str],
        sandbox: Callable[[], ChosenSandbox],
        *,
        quota: int = QUOTA,
        expires: float = EXPIRES_SECONDS,
    ) -> None:
        """`files` applies what is kept. `sandbox` returns that of trials, without network; it raises Failed."""
        self._folder = folder
        self._files = files
        self._roots = outermost(roots)
        self._sandbox = sandbox
        self._quota = quota
        self._expires = expires
        self._lock = threading.Lock()

    def begin(
        self,
        name: str,
        command: str,
        workdir: str,
        environment: Mapping[str, str] | None = None,
        *,
        inherit: bool = False,
        caller: str = "",
    ) -> list[str]:
        """Prepare a trial, or find it again, and return the prefix of its command. `caller`: who is behind it; empty
        for the owner.

        Raises Failed if this machine cannot run trials, or has too many.
        """
        for root in self._roots:
            if _UNMOUNTABLE.search(root):
                raise Failed(f"a trial cannot be run in {root!r}: its path contains a comma, colon or backslash")
        sandbox = self._sandbox()
        sandbox.check()
        quota = min(self._quota, sandbox.disk or self._quota)
        with self._lock:
            self._sweep()
            folder = self._place(name)
            if not folder.exists():
                self._make_room(caller)
                self._create(name, command, caller, quota)
        overlays = [
            (root, str(folder / f"upper{number}"), str(folder / f"work{number}"))
            for number, root in enumerate(self._roots)
        ]
        limits = {"file_size": min(quota, MOST_FILE)}
        uppers = [upper for _, upper, _ in overlays]
        return [
            *Launch(overlays=overlays, disk=quota, counted=uppers, limits=limits).words(),
            *sandbox.words(workdir, environment, inherit=inherit),
        ]

    def _make_room(self, caller: str) -> None:
        """Remove old trials that can no longer be kept. Raises Failed if too many others wait, or too many of a
        caller."""
        every = sorted(self._all(), key=lambda one: one.started_at)
        waiting = [
            one for one in every if one.state in ("running", "keeping") or (one.state == "ready" and one.changes)
        ]
        if len(waiting) >= MOST_TRIALS:
            raise Failed(f"{len(waiting)} trials wait to be kept or discarded; end one of them first")
        own = [one for one in waiting if one.caller == caller]
        others = [one for one in waiting if one.caller]
        if caller and (len(own) >= MOST_OF_CALLER or len(others) >= MOST_TRIALS - MOST_OF_CALLER):
            raise Failed(
                f"{len(own)} trials of this caller wait to be kept or discarded, and {len(others)} of all but the "
                f"owner; one caller has at most {MOST_OF_CALLER}, all together {MOST_TRIALS - MOST_OF_CALLER}: end one "
                "of them first"
            )
        for one in [one for one in every if one not in waiting][:-MOST_ENDED]:
            _remove(self._place(one.id))

    def _create(self, name: str, command: str, caller: str, quota: int) -> None:
        """Make the folder of a trial with everything in it, or, if the program is killed, nothing."""
        beside = self._folder / f".{name}"
        _remove(beside)
        for number, root in enumerate(self._roots):
            (beside / f"upper{number}").mkdir(mode=0o700, parents=True)
            (beside / f"work{number}").mkdir(mode=0o700)
            shutil.copymode(root, beside / f"upper{number}")
        now = _now_ms()
        expires_at = now + round(self._expires * 1000)
        trial = Trial(name, command[:10_000], "running", now, expires_at, self._roots, quota, caller=caller)
        replace_private(beside / _RECORD, msgspec.json.encode(trial))
        beside.rename(self._place(name))

    def finish(self, name: str, result: Mapping[str, Any] | None = None, *, secrets: Sequence[str] = ()) -> Trial:
        """Record what the command of a trial changed, and its result; return the trial. `secrets` are masked in what
        is shown: later calls show it, too, and do not know them.

        Raises Failed if it changed too much.
        """
        with self._lock:
            trial = self._find(name)
            if trial.state != "running":
                return trial
            uppers = {root: str(self._place(name) / f"upper{number}") for number, root in enumerate(trial.folders)}
            try:
                size = sum(_size(upper) for upper in uppers.values())
                if size > trial.quota:
                    raise Failed(f"the command wrote {size} bytes; a trial has at most {trial.quota}")
                found = overlay.changes(uppers)
                replaced = sum(change.before[1] for change in found if change.before is not None)
                if replaced > trial.quota:  # keeping it reads them
                    raise Failed(f"the command replaced or removed {replaced} bytes; a trial has at most {trial.quota}")
                for change in found:
                    if change.before is not None and change.before[2] // 1_000_000 > trial.started_at:
                        raise Failed(f"{change.path} was changed by another program during the trial; run it again")
                said = dict(result or {})
                if secrets:
                    known = KnownSecrets(secrets)
                    said = msgspec.json.decode(known.redact(msgspec.json.encode(said)))
                    found = [
                        msgspec.structs.replace(one, diff=one.diff and known.redact_text(one.diff)) for one in found
                    ]
                ready = msgspec.structs.replace(trial, state="ready", changes=tuple(found), result=said)
                self._store(ready)
                return ready
            except Exception as error:
                self._end(trial, "failed", str(error))
                raise Failed(f"trial discarded: {error}") from None

    def find(self, name: str) -> Trial:
        """Return a trial. Raises NotFound."""
        with self._lock:
            self._sweep()
            return self._find(name)

    def keep(self, name: str) -> Trial:
        """Apply the changes of a trial: all of them, or none. Keeping it again is not an error.

        Raises NotFound; TrialConflict if a file has been changed since; Failed if the trial is not ready any more.
        """
        with self._lock:
            self._sweep()
            trial = self._find(name)
            if trial.state == "kept":
                return trial
            if trial.state not in ("ready", "keeping"):
                raise Failed(
                    f"trial {name} is {trial.state}{': ' if trial.error else ''}{trial.error}; nothing to keep"
                )
            # One that still says `keeping` was interrupted: its files are all new, or all old and tried again.
            if trial.state == "ready" or not self._are_applied(trial):
                for change in trial.changes:
                    self._entry(change.path)
                _refuse_conflicts(trial)
                trial = msgspec.structs.replace(trial, state="keeping", kept_by=call_id.get() or "")
                self._store(trial)
                try:
                    self._apply_files(trial)
                except BaseException:
                    self._store(msgspec.structs.replace(trial, state="ready", kept_by=""))
                    raise
            # Files are changed in one transaction. The rest can be repeated after a crash.
            self._apply_rest(trial.changes)
            return self._end(trial, "kept")

    def discard(self, name: str) -> Trial:
        """Remove the changes of a trial; one discarded before is returned as it is. Raises NotFound, Failed."""
        with self._lock:
            trial = self._find(name)
            if trial.state in ("keeping", "kept"):
                raise Failed(f"trial {name} is {trial.state}; it cannot be discarded")
            return trial if trial.state == "discarded" else self._end(trial, "discarded")

    def _are_applied(self, trial: Trial) -> bool:
        """Return whether all files have the content that an interrupted `keep` gave them."""
        lowers = trial.lowers()
        made = {change.path for change in trial.changes if change.upper is not None}
        for change in trial.changes:
            lower = lowers[_folder_of(change, lowers)]
            new = _regular(change.upper) if change.upper is not None else None
            now = lower.fingerprint(change.path)
            is_file = now is not None and stat.S_ISREG(now[0])
            if change.upper is None:
                if is_file and change.path not in made:
                    return False
            elif new is not None:  # otherwise a folder or a link, which is not part of the transaction
                if not is_file:
                    return False
                with lower.open(change.path) as file:
                    if file.read() != new:
                        return False
        return True

    def _apply_files(self, trial: Trial) -> None:
        steps = []
        lowers = trial.lowers()
        for change in trial.changes:
            old = _old_content(change, lowers) if change.kind != ADDED else None
            new = _regular(change.upper) if change.upper is not None else None
            if (old is None and new is None) or (old == new):
                continue  # a folder, a link, or only another mode
            mode = stat.S_IMODE(os.lstat(change.upper).st_mode) if change.upper is not None else None
            steps.append(FileChange(change.path, old, new, mode))
        if steps:
            change_files(self._files, steps)

    def _apply_rest(self, changes: Sequence[Change]) -> None:
        """Make folders and links, set modes, remove links and folders."""
        made = {change.path for change in changes if change.upper is not None}
        for change in changes:
            if change.upper is not None:
                with open_parent(self._entry(change.path), make=True) as (folder, name):
                    _take_over(change.upper, folder, name)
        for change in reversed(changes):
            if change.kind == DELETED and change.path not in made:
                with (
                    contextlib.suppress(FileNotFoundError, NotADirectoryError),
                    open_parent(self._entry(change.path)) as (folder, name),
                ):
                    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                    (os.rmdir if stat.S_ISDIR(mode) else os.unlink)(name, dir_fd=folder)

    def _entry(self, path: str) -> CheckedPath:
        """Check that a path may be changed; a link at its end is changed itself. Raises ToolError."""
        parent, name = os.path.split(path)
        folder = self._files.place(parent)
        entry = CheckedPath(path, f"{folder.real.rstrip('/')}/{name}", folder.root)
        if self._files.is_hidden(entry.real):
            raise ForbiddenPath(f"'{path[:200]}' {PROTECTED}")
        self._files.refuse_unwritable("write", entry)
        return entry

    # the folder

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidArgs(f"{name[:100]!r} is not the id of a trial")
        return self._folder / name

    def _find(self, name: str) -> Trial:
        try:
            return msgspec.json.decode((self._place(name) / _RECORD).read_bytes(), type=Trial)
        except (OSError, msgspec.MsgspecError):
            raise NotFound(f"there is no trial {name!r} on this machine, or it has expired") from None

    def _store(self, trial: Trial) -> None:
        replace_private(self._place(trial.id) / _RECORD, msgspec.json.encode(trial))

    def _end(self, trial: Trial, state: str, error: str = "") -> Trial:
        """Store the end of a trial and remove its files; the record stays until it expires."""
        changes = tuple(msgspec.structs.replace(change, diff=None) for change in trial.changes)
        ended = msgspec.structs.replace(trial, state=state, error=error, changes=changes)
        self._store(ended)
        for number in range(len(trial.folders)):
            for part in ("upper", "work"):
                _remove(self._place(trial.id) / f"{part}{number}")
        return ended

    def _all(self) -> list[Trial]:
        found = []
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            with contextlib.suppress(NotFound, InvalidArgs):
                found.append(self._find(entry.name))
        return found

    def _sweep(self) -> None:
        """Remove what has expired."""
        now = _now_ms()
        for trial in self._all():
            # One that still says `running` was cancelled, or its program was killed.
            if trial.expires_at < now and trial.state != "keeping":
                _remove(self._place(trial.id))


def _refuse_conflicts(trial: Trial) -> None:
    lowers = trial.lowers()
    removed = {change.path for change in trial.changes if change.kind == DELETED}
    for change in trial.changes:
        now = lowers[_folder_of(change, lowers)].fingerprint(change.path)
        if change.kind == ADDED and change.path in removed:
            continue  # a folder that was replaced by a file, or the reverse
        if now != change.before:
            raise TrialConflict(
                f"{change.path} {'exists now' if change.before is None else 'has been changed since the trial'}; "
                "nothing was applied: discard the trial and run it again"
            )


def _take_over(upper: str, folder: int, name: str) -> None:
    """Make what lies at `upper` in a folder, apart from the content of files: a folder, a link, or a mode."""
    status = os.lstat(upper)
    if stat.S_ISLNK(status.st_mode):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        os.symlink(os.readlink(upper), name, dir_fd=folder)
        return
    if stat.S_ISDIR(status.st_mode):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        os.fchmod(opened, stat.S_IMODE(status.st_mode))
    finally:
        os.close(opened)


def _regular(path: str) -> bytes | None:
    """Return the content of a regular file; None for anything else."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return None
    with open(path, "rb") as file:
        return file.read()


def _old_content(change: Change, lowers: Mapping[str, Lower]) -> bytes | None:
    """Return the content of a regular file that a trial changed; None for anything else."""
    if change.before is None or not stat.S_ISREG(change.before[0]):
        return None
    with lowers[_folder_of(change, lowers)].open(change.path) as file:
        return file.read()


def _folder_of(change: Change, lowers: Mapping[str, Lower]) -> str:
    return next(folder for folder in lowers if change.path.startswith(folder.rstrip("/") + "/"))


def _size(folder: str) -> int:
    """Return the bytes of the files in a folder; holes count, since keeping a file reads them."""
    found = (os.lstat(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)
    return sum(max(status.st_blocks * 512, status.st_size) for status in found)


def _remove(folder: Path) -> None:
    with contextlib.suppress(RecursionError):
        with contextlib.suppress(OSError), closing_descriptor(os.open(folder, _LISTED)) as opened:
            _permit(opened)
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # nested too deeply
        subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def _permit(folder: int, depth: int = 0) -> None:
    """Give this user all rights to the folders in an open one: overlayfs leaves a work folder without any.

    A link is not followed, also not one that the command, which may still run, puts in the place of a folder.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    for name in names if depth < _DEEPEST else ():
        with contextlib.suppress(OSError):
            with closing_descriptor(os.open(name, os.O_PATH | _LISTED, dir_fd=folder)) as inner:
                os.chmod(f"/proc/self/fd/{inner}", 0o700)
            with closing_descriptor(os.open(name, _LISTED, dir_fd=folder)) as inner:
                _permit(inner, depth + 1)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
