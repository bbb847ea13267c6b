"""Change several files together: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence

import msgspec

from farhand.machine.files.allowed_paths import CheckedPath, display
from farhand.machine.files.confined_root import sync_folder
from farhand.machine.files.files import (
    Files,
    copy_owner_and_mode,
    file_errors,
    open_parent,
    open_regular,
    read_content,
    replaceable_status,
)
from farhand.machine.files.transaction_log import LoggedChange, digest, logged_transaction
from farhand.machine.files.undo_log import Digest, PendingChange, call_id
from farhand.protocol.errors import Failed, NotAllowed


class FileChange(msgspec.Struct, frozen=True):
    """The content of a file before and after; None stands for no file."""

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None  # of a new file, if not the system's default
    owner: tuple[int, int] | None = None  # of a new file, if not ours; set if permitted


def change_files(files: Files, changes: Sequence[FileChange]) -> None:
    """Apply all changes, or none, even if the program is killed midway (see `transaction_log`).

    All new content is staged on disk before the first file is touched; then each file must still have its expected
    content, or Failed is raised; if a step fails, the earlier ones are reverted.
    """
    if files.read_only:
        raise NotAllowed("Failed to write: the files here are read-only")
    steps = [_Step(files.place(change.path), change) for change in changes]
    for step in steps:
        files.refuse_unwritable("write", step.place)
    written = [step.written() for step in steps]
    with logged_transaction(files.transaction_folder, written) as intent, contextlib.ExitStack() as stack:
        for step in steps:
            stack.enter_context(_staged(step))
        with files.write_lock:
            for step in steps:
                step.refuse_changed()
            done: list[_Step] = []
            with _keeping(files, steps):
                try:
                    for step in steps:
                        done.append(step)
                        with file_errors("write", step.place.path):
                            step.take()
                    for step in steps:
                        sync_folder(step.folder)
                    if intent is not None:
                        intent.done()
                except BaseException:
                    for step in reversed(done):
                        step.take_back()
                    raise
    if files.undo_log is not None and (call := call_id.get()) is not None:
        files.undo_log.restrict_to_owner(call)  # the temporary links to the old files are gone


@contextlib.contextmanager
def _keeping(files: Files, steps: Sequence[_Step]) -> Iterator[None]:
    """Record the old content of all files as one change, if a call is in progress."""
    if files.undo_log is None or not files.undo_log.enabled:
        yield
        return
    with contextlib.ExitStack() as stack:
        changing = []
        for step in steps:
            change, old = step.change, None
            if change.old is not None:
                with file_errors("read", step.place.path):
                    old = stack.enter_context(open_regular(step.folder, step.name, buffered=False))
            new = None if change.new is None else Digest.of(change.new)
            changing.append(PendingChange(step.folder, step.name, step.place.real, old, new, made=step.made))
        stack.enter_context(files.undo_log.recording(changing))
        yield


@contextlib.contextmanager
def _staged(step: _Step) -> Iterator[None]:
    new = step.change.new is not None
    with contextlib.ExitStack() as stack:
        try:
            with file_errors("write" if new else "delete", step.place.path):
                step.folder, step.name = stack.enter_context(open_parent(step.place, make=new))
                step.prepare()
            yield
        except BaseException:
            step.clean_up()
            step.place.root.remove_folders(step.made)
            raise
        step.clean_up()


class _Step(msgspec.Struct):
    """One file of a transaction."""

    place: CheckedPath
    change: FileChange
    folder: int = -1
    name: str = ""
    beside: str = msgspec.field(default_factory=lambda: f".farhand-{secrets.token_hex(8)}.tmp")
    kept: str = msgspec.field(default_factory=lambda: f".farhand-{secrets.token_hex(8)}.tmp")
    made: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.change.new is not None:
            self.made = self.place.root.missing_folders(self.place.real)

    def written(self) -> LoggedChange:
        change = self.change
        return LoggedChange(
            os.fsencode(self.place.real),
            digest(change.old),
            digest(change.new),
            self.beside,
            self.kept,
            tuple(os.fsencode(folder) for folder in self.made),
        )

    def prepare(self) -> None:
        """Write the new content to a temporary file, durably."""
        old = replaceable_status(self.folder, self.name)
        if self.change.new is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.beside, flags, 0o600 if old else 0o666, dir_fd=self.folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.change.new)
            file.flush()
            if old:
                copy_owner_and_mode(descriptor, old)
            else:
                if self.change.owner is not None:
                    with contextlib.suppress(PermissionError):
                        os.fchown(descriptor, *self.change.owner)
                if self.change.mode is not None:
                    os.fchmod(descriptor, self.change.mode & 0o777)
            os.fsync(descriptor)

    def refuse_changed(self) -> None:
        """Raise Failed if the file no longer has its expected content."""
        if read_content(self.folder, self.name) != self.change.old:
            raise Failed(
                f"Failed to edit '{display(self.place.path)}': the file was changed by someone else in the meantime, "
                "so nothing was written. Read it again and repeat the change."
            )

    def take(self) -> None:
        if self.change.old is not None:
            # A hard link to the old file: reverting needs no disk space.
            os.link(self.name, self.kept, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
        if self.change.new is None:
            os.unlink(self.name, dir_fd=self.folder)
        else:
            os.rename(self.beside, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def take_back(self) -> None:
        """Revert `take`, as far as it was done."""
        with contextlib.suppress(OSError):
            if self.change.old is not None:
                os.rename(self.kept, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
            elif read_content(self.folder, self.name) == self.change.new:
                os.unlink(self.name, dir_fd=self.folder)

    def clean_up(self) -> None:
        for name in (self.beside, self.kept):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.folder)
