"""Undo the file changes of a call: all of them, or none."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from farhand.machine.files.allowed_paths import CheckedPath, display
from farhand.machine.files.diffs import text_diff
from farhand.machine.files.files import Files
from farhand.machine.files.transaction import FileChange, change_files
from farhand.machine.files.transaction_log import digest
from farhand.machine.files.undo_log import CallChanges, UndoLog, call_id
from farhand.machine.files.undo_log_lines import ChangedFile
from farhand.protocol.errors import Failed, NotFound, ToolError

_ACTS: Final = {(True, True): "restored", (True, False): "recreated", (False, True): "removed"}


class ChangedSince(Failed):
    """A file was changed after the call."""


class UndoStep(msgspec.Struct, frozen=True):
    """One file to be reverted."""

    file: ChangedFile
    place: CheckedPath
    now: bytes | None
    then: bytes | None

    @property
    def act(self) -> str:
        return _ACTS[self.then is not None, self.now is not None]

    def display(self, *, diff: bool) -> dict[str, Any]:
        result = {"path": display(self.place.path), "action": self.act, "bytes": len(self.then or b"")}
        text = text_diff(self.now, self.then, display(self.place.path)) if diff else None
        return result if text is None else {**result, "diff": text}


def changed_paths(undo_log: UndoLog, call: str) -> list[str]:
    """Return the files that a call changed, as far as they are kept. Raises OSError."""
    found = undo_log.find(call)
    return [] if found is None else [display(file.name) for file in _merged(found)]


def planned_steps(files: Files, undo_log: UndoLog, call: str) -> list[UndoStep]:
    """Return what the undo of a call would do to each file that the call changed. Raises as `undo`."""
    try:
        found = undo_log.find(call)
    except OSError as error:
        raise Failed(f"what was kept in {undo_log.folder} cannot be read: {error.strerror or error}") from None
    if found is None:
        raise NotFound(_nothing(undo_log, call))
    if not undo_log.in_effect(call):
        assert found.undone is not None
        raise Failed(f"call {call} was already undone, by call {found.undone.by} at {_moment(found.undone.at)}")
    files_changed = _merged(found)
    missing = [f"'{display(file.name)}': {file.unkept}" for file in files_changed if file.unkept]
    if missing:
        raise Failed(f"call {call} cannot be undone, its old content was not kept: {'; '.join(missing)}")
    steps = [_step(files, undo_log, file, found) for file in files_changed]
    if steps and all(step.now == step.then for step in steps):
        raise Failed(f"nothing to undo: what call {call} changed is already as it was before it")
    return steps


def undo(files: Files, undo_log: UndoLog, call: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Restore the files that a call changed, remove those it created, and report the changes.

    All or nothing. The undo is recorded for the current call and can itself be undone. With `dry_run` nothing is
    changed and the report says what would be. Raises NotFound if nothing was recorded for the call, ChangedSince if a
    file was changed after it, ForbiddenPath and NotAllowed as any other change, Failed.
    """
    steps = [step for step in planned_steps(files, undo_log, call) if step.now != step.then]
    if not dry_run:
        change_files(
            files,
            [
                FileChange(step.place.real, step.now, step.then, step.file.mode or None, step.file.owner)
                for step in steps
            ],
        )
        for step in steps:
            if step.then is None:
                step.place.root.remove_folders([os.fsdecode(folder) for folder in step.file.made])
        by = call_id.get()
        if by is not None:
            undo_log.undone(call, by)
    return {
        "call": call,
        "undone": not dry_run,
        **({"dryRun": True} if dry_run else {}),
        "files": [step.display(diff=dry_run) for step in steps],
    }


def _merged(found: CallChanges) -> list[ChangedFile]:
    """Return each file once: its content before the first change of the call, and after the last."""
    merged: dict[bytes, ChangedFile] = {}
    for file in found.files:
        first = merged.get(file.path)
        if first is None:
            merged[file.path] = file
        else:
            merged[file.path] = msgspec.structs.replace(
                first, new=file.new, new_size=file.new_size, unkept=first.unkept or file.unkept
            )
    return list(merged.values())


def _step(files: Files, undo_log: UndoLog, file: ChangedFile, found: CallChanges) -> UndoStep:
    place = files.place(file.name)
    if place.real != file.name:
        raise ChangedSince(
            f"'{display(file.name)}' now leads to '{display(place.real)}'; it was another file when the call "
            "changed it, so nothing was undone"
        )
    now = _content(files, file, undo_log.largest)
    then = None
    if file.old is not None:
        then = undo_log.content(file.old)
        if then is None:
            raise Failed(
                f"the old content of '{display(file.name)}' is lost: what was kept is damaged, or another program "
                "still wrote to the old file; nothing was undone"
            )
    if now != then and digest(now) != file.new:
        raise ChangedSince(_changed(files, file, now, max(change.at for change in found.changes.values())))
    return UndoStep(file, place, now, then)


def _content(files: Files, file: ChangedFile, largest: int) -> bytes | None:
    try:
        with files.open(file.name) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > largest:
                changed = _moment(os.fstat(opened.fileno()).st_mtime_ns // 1_000_000)
                raise ChangedSince(
                    f"'{display(file.name)}' was changed since the call: it has {size} bytes now, the call left "
                    f"{file.new_size}; it was changed at {changed}; nothing was undone"
                )
            return opened.read()
    except NotFound:
        return None
    except Failed as error:
        status = files.status(file.name)
        if stat.S_ISREG(status.st_mode):
            raise
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise ChangedSince(
            f"'{display(file.name)}' was changed since the call: the call left {_left(file)}, and now it is {kind}, "
            f"changed at {_moment(status.st_mtime_ns // 1_000_000)}; nothing was undone"
        ) from error


def _left(file: ChangedFile) -> str:
    return "no file" if file.new is None else f"{file.new_size} bytes with SHA-256 {file.new[:16]}…"


def _changed(files: Files, file: ChangedFile, now: bytes | None, at: int) -> str:
    if now is None:
        found, when = "it is gone", ""
    else:
        found = f"it has {len(now)} bytes with SHA-256 {(digest(now) or '')[:16]}…"
        try:
            when = f", changed at {_moment(files.status(file.name).st_mtime_ns // 1_000_000)}"
        except ToolError:
            when = ""
    return (
        f"'{display(file.name)}' was changed since the call: the call left {_left(file)} at {_moment(at)}, and now "
        f"{found}{when}; nothing was undone"
    )


def _nothing(undo_log: UndoLog, call: str) -> str:
    if undo_log.quota <= 0:
        return "nothing is kept on this machine (the quota for undo is 0), so no call can be undone"
    if undo_log.was_dropped(call):
        return (
            f"what call {call} changed is no longer kept: it made room for newer changes (at most "
            f"{undo_log.quota} bytes are kept)"
        )
    return (
        f"nothing was kept for call {call}: it changed no file through a file tool. What a command does, and what a "
        "folder that is transferred replaces, is not kept and cannot be undone"
    )


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
