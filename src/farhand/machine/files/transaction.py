"""Several files changed together: all of them, or none."""

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
    """What a file holds before and after; None: there is no file."""

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None  # of a new file, where it is not what the system gives
    owner: tuple[int, int] | None = None  # of a new file, where it should not be ours and may be given


def change_files(files: Files, changes: Sequence[FileChange]) -> None:
    """Make all of the changes, or none, also when the program is killed in the middle (see `intents`).

    Everything is written beside its place and on disk before the first file is touched; then each is still what its
    change says it was, or Failed is raised; and a step that fails takes back those before it.
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
        files.undo_log.close_to_others(call)  # the steps have given up their second names of the old files


@contextlib.contextmanager
def _keeping(files: Files, steps: Sequence[_Step]) -> Iterator[None]:
    """Keep what the files hold, all for one change, if a call is being worked on."""
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
    """One file of several that change together."""

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
        """Put the new content beside its place, on disk."""
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
        """Raises Failed when the file is not what it was when the change was made up."""
        if read_content(self.folder, self.name) != self.change.old:
            raise Failed(
                f"Failed to edit '{display(self.place.path)}': the file was changed by someone else in the meantime, "
                "so nothing was written. Read it again and repeat the change."
            )

    def take(self) -> None:
        if self.change.old is not None:
            # A second name for the old file: taking it back needs no room on the disk.
            os.link(self.name, self.kept, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
        if self.change.new is None:
            os.unlink(self.name, dir_fd=self.folder)
        else:
            os.rename(self.beside, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def take_back(self) -> None:
        """Undo `take`, as far as it came."""
        with contextlib.suppress(OSError):
            if self.change.old is not None:
                os.rename(self.kept, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
            elif read_content(self.folder, self.name) == self.change.new:
                os.unlink(self.name, dir_fd=self.folder)

    def clean_up(self) -> None:
        for name in (self.beside, self.kept):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.folder)
