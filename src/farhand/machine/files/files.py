"""The files of one machine that may be used: open, list, replace.

A path is checked by `AllowedPaths` and then opened without following links. Errors of the system become errors a
caller can act on: NotFound, NotAllowed, InvalidArgs, Failed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from farhand.machine.files import steering_files as steering
from farhand.machine.files.allowed_paths import AllowedPaths, CheckedPath, display
from farhand.machine.files.confined_root import ConfinedRoot, closing_descriptor, sync_folder
from farhand.machine.files.refused_paths import EXISTS, PROTECTED, AlreadyExists, ForbiddenPath
from farhand.machine.files.steering_files import SteeringFiles
from farhand.machine.files.undo_log import Digest, PendingChange, UndoLog
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound, ToolError

# The longest path that error messages include in full.
MOST_SHOWN = 4096


class Files:
    """The files that `AllowedPaths` allows. Changes made by a call are recorded in `undo_log`.

    Thread-safe.
    """

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        roots: Iterable[ConfinedRoot] | Callable[[], Sequence[ConfinedRoot]] = (),
        hidden: Iterable[str | os.PathLike[str]] = (),
        exposed: Iterable[str | os.PathLike[str]] = (),
        read_only: bool = False,
        upward: bool = True,
        transaction_folder: Path | None = None,
        undo_log: UndoLog | None = None,
        steering: SteeringFiles | None = None,
    ) -> None:
        """`transaction_folder`: where changes of several files are logged while in progress. `steering`: the files that
        are changed only if `steering.allowed` is set."""
        self.steering = steering
        self.paths = AllowedPaths(workspace, roots=roots, hidden=hidden, exposed=exposed, upward=upward)
        self.workspace = self.paths.workspace
        self.read_only = read_only
        self.transaction_folder = transaction_folder
        self.undo_log = undo_log
        # Held from the last check of a file to its replacement.
        self.write_lock = threading.Lock()

    @property
    def roots(self) -> Sequence[ConfinedRoot]:
        return self.paths.roots

    def resolve(self, path: str) -> str:
        """Return the absolute path; see `AllowedPaths.normalise`. Raises ToolError."""
        return self.paths.normalise(path)

    def place(self, path: str) -> CheckedPath:
        """Check a path, which need not exist; see `AllowedPaths.check`. Raises ToolError."""
        with file_errors("resolve", self.resolve(path)):
            return self.paths.check(path)

    def is_hidden(self, real: str) -> bool:
        """Return whether a real path is hidden, or below something that is, and not exposed."""
        return self.paths.is_protected(real)

    def open(self, path: str) -> BinaryIO:
        """Open a regular file for reading; the caller closes it. Never blocks on a pipe or a device."""
        place = self.place(path)
        with file_errors("read", place.path), open_parent(place) as (folder, name):
            return open_regular(folder, name)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a path, following links. Raises NotFound."""
        place = self.place(path)
        with file_errors("read", place.path), open_parent(place) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def open_folder(self, place: CheckedPath) -> int:
        """Return a descriptor for listing a folder (`os.scandir`); the caller closes it. Raises OSError."""
        with closing_descriptor(place.root.open_folder(place.real)) as folder:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)

    def write(self, path: str, content: bytes, *, expected: bytes | None = None) -> str:
        """Replace or create a file atomically and return its absolute path. See `replacing`."""
        with self.replacing(path, expected=expected) as (file, spelled):
            file.write(content)
        return spelled

    def create(self, path: str, content: bytes) -> str:
        """Create a file atomically and return its absolute path. Raises AlreadyExists."""
        with self.replacing(path, new=True) as (file, spelled):
            file.write(content)
        return spelled

    def update(self, path: str, content: bytes) -> None:
        """Replace the content of an existing file atomically. Raises NotFound."""
        self.status(path)
        with self.replacing(path, judge=_refuse_missing) as (file, _):
            file.write(content)

    def append(self, path: str, content: bytes) -> int:
        """Append to an existing file and return its new size; if the disk fails, nothing is appended.

        A file with several hard links is replaced by one with only this name: another link may lie outside the roots,
        and its content must not change.
        """
        place = self._writable(path)
        with file_errors("write", place.path), open_parent(place) as (folder, name), self.write_lock:
            require_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, dir_fd=folder), "ab") as file:
                before = os.fstat(file.fileno())
                require_regular(before)
                if before.st_nlink == 1:
                    with self._keeping_appended(folder, name, place, content):
                        try:
                            file.write(content)
                            file.flush()
                            os.fsync(file.fileno())
                        except OSError:
                            os.ftruncate(file.fileno(), before.st_size)
                            raise
                    return os.fstat(file.fileno()).st_size
        return self._append_to_copy(path, content)

    def _append_to_copy(self, path: str, content: bytes) -> int:
        with self.open(path) as old:
            before = os.fstat(old.fileno())

            def refuse_changed(now: os.stat_result | None) -> None:
                if now is None or _version(now) != _version(before):
                    raise Failed(
                        f"Failed to write '{display(path)}': another program changed the file in the meantime, so "
                        "nothing was added; try again"
                    )

            with self.replacing(path, judge=refuse_changed) as (file, _):
                shutil.copyfileobj(old, file)
                file.write(content)
                return file.tell()

    def _writable(self, path: str) -> CheckedPath:
        place = self.place(path)
        self.refuse_unwritable("write", place)
        return place

    def refuse_unwritable(self, action: str, place: CheckedPath, *, folder: bool = False) -> None:
        """Raise NotAllowed for a read-only path, or one that this caller may not change.

        `folder`: a whole folder is to be placed there.
        """
        if self.read_only or not place.root.writable:
            raise NotAllowed(f"Failed to {action} '{display(place.path)}': the files here are read-only")
        if self.steering is None or steering.allowed.get():
            return
        if self.steering.covers(place.real) or (folder and self.steering.holds(place.real)):
            raise steering.steering_refusal(display(place.path))

    @contextlib.contextmanager
    def replacing(
        self,
        path: str,
        *,
        expected: bytes | None = None,
        judge: Callable[[os.stat_result | None], None] | None = None,
        new: bool = False,
        beside: str = "",
    ) -> Iterator[tuple[BinaryIO, str]]:
        """Yield an empty file, and the absolute path that it replaces when the block succeeds.

        If the block or the disk fails, the old file stays unchanged. Missing folders are created; mode and owner of an
        existing file are kept. With `expected`, a file with other content is left alone and Failed is raised; with
        `new`, an existing file raises AlreadyExists. `judge` receives the old file's status, or None, just before the
        replacement; an exception it raises leaves the file alone too. `beside` is the temporary name.
        """
        place = self._writable(path)
        made = place.root.missing_folders(place.real) if self.undo_log is not None and self.undo_log.enabled else ()
        with file_errors("write", place.path), open_parent(place, make=True) as (folder, name):
            if new:
                _refuse_existing(folder, name, place)
            old = replaceable_status(folder, name)
            beside = beside or f".farhand-{secrets.token_hex(8)}.tmp"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(beside, flags, 0o600 if old else 0o666, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    yield file, place.path
                    file.flush()
                    if old:
                        copy_owner_and_mode(descriptor, old)
                    written = self.written(descriptor)
                    os.fsync(descriptor)
                # Two concurrent edits of one file must not both find it unchanged.
                with self.write_lock:
                    if judge is not None:
                        judge(status_in(folder, name))
                    if expected is not None and read_content(folder, name) != expected:
                        raise Failed(
                            f"Failed to edit '{display(place.path)}': the file was changed by someone else "
                            "in the meantime, so nothing was written. Read it again and repeat the edit."
                        )
                    with self.recording(folder, name, place.real, written, made=made):
                        if new:
                            _refuse_existing(folder, name, place)
                            _settle(folder, beside, name, place)
                        else:
                            os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=folder)
                raise
            sync_folder(folder)

    def remove(self, path: str) -> None:
        """Remove a file, or a link but never its target. Raises NotFound."""
        spelled = self.resolve(path)
        parent, name = os.path.split(spelled)
        place = self.place(parent)
        real = os.path.join(place.real, name)  # noqa: PTH118
        self.refuse_unwritable("remove", CheckedPath(spelled, real, place.root))
        if self.is_hidden(real):
            raise ForbiddenPath(f"'{display(spelled)}' {PROTECTED}")
        with file_errors("remove", spelled), closing_descriptor(place.root.open_folder(place.real)) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            linked = stat.S_ISLNK(status.st_mode)
            if self.paths.is_protected_status(status):
                raise ForbiddenPath(f"'{display(spelled)}' {PROTECTED}")
            if not linked:
                require_regular(status)
            unkept = "it was a link" if linked else ""
            with self.write_lock, self.recording(folder, name, real, None, unkept=unkept):
                os.unlink(name, dir_fd=folder)
            sync_folder(folder)

    # -- keeping what was there -------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(
        self,
        folder: int,
        name: str,
        real: str,
        new: Digest | None,
        *,
        in_place: bool = False,
        unkept: str = "",
        made: Sequence[str] = (),
    ) -> Iterator[None]:
        """Record a file's content while the block changes it, if a call is in progress: see `UndoLog.recording`."""
        if self.undo_log is None or not self.undo_log.enabled:
            yield
            return
        with contextlib.ExitStack() as stack:
            old = None
            if not unkept:
                try:
                    old = stack.enter_context(open_regular(folder, name, buffered=False))
                except FileNotFoundError:
                    pass
                except OSError as error:  # writable but not readable
                    unkept = f"it could not be read: {error.strerror}"
            stack.enter_context(
                self.undo_log.recording([PendingChange(folder, name, real, old, new, in_place, unkept, made)])
            )
            yield

    def written(self, descriptor: int) -> Digest | None:
        """Return the digest of a file that was just written, if its change is recorded."""
        return None if self.undo_log is None or not self.undo_log.enabled else self.undo_log.digest(descriptor)

    @contextlib.contextmanager
    def _keeping_appended(self, folder: int, name: str, place: CheckedPath, content: bytes) -> Iterator[None]:
        if self.undo_log is None or not self.undo_log.enabled:
            yield
            return
        size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size + len(content)
        new = Digest("", size)
        if size <= self.undo_log.largest:
            new = Digest.of((read_content(folder, name) or b"") + content)
        with self.recording(folder, name, place.real, new, in_place=True):
            yield


@contextlib.contextmanager
def file_errors(act: str, path: str, *, missing: type[ToolError] = NotFound) -> Iterator[None]:
    """Translate OSError into an error that names the action, the path and the reason."""
    try:
        yield
    except OSError as error:
        name = display(path)
        if len(name) > MOST_SHOWN:
            name = f"{name[:100]}…"
        message = f"Failed to {act} '{name}': {_reason(error)}"
        kind = missing if error.errno in (errno.ENOENT, errno.ENOTDIR) else _KINDS.get(error.errno or 0, Failed)
        raise kind(message) from error


_KINDS: dict[int, type[ToolError]] = {
    errno.EACCES: NotAllowed,
    errno.EPERM: NotAllowed,
    errno.EROFS: NotAllowed,
    errno.EXDEV: NotAllowed,
    errno.ENAMETOOLONG: InvalidArgs,
}

_ADVICE = {
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.ELOOP: "too many links, or the path was changed while it was opened",
    errno.ENOSPC: "the disk is full; nothing was changed",
    errno.EDQUOT: "the disk quota is used up; nothing was changed",
    errno.EBUSY: "it is a mount point and cannot be replaced",
}


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0)
    return f"{text} ({advice})" if advice else text


@contextlib.contextmanager
def open_parent(place: CheckedPath, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of a path; yield its descriptor and the name in it (`.` for a root itself)."""
    if place.real == place.root.path:
        parent, name = place.real, "."
    else:
        parent, name = os.path.split(place.real)
    if make:
        with file_errors("create the folders of", place.path, missing=Failed):
            folder = place.root.open_folder(parent, make=True)
    else:
        folder = place.root.open_folder(parent)
    with closing_descriptor(folder):
        yield folder, name


def open_regular(folder: int, name: str, *, buffered: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else."""
    # Checked before opening: opening a device can have side effects.
    require_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file = os.fdopen(os.open(name, flags, dir_fd=folder), "rb", -1 if buffered else 0)
    try:
        require_regular(os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def require_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {_KIND_NAMES.get(stat.S_IFMT(status.st_mode), 'no regular file')}")


_KIND_NAMES = {
    stat.S_IFIFO: "a named pipe, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
    stat.S_IFLNK: "a link that leads in a circle",
}


def replaceable_status(folder: int, name: str) -> os.stat_result | None:
    """Return the status of the file to be replaced, or None. Raises OSError if it must not be replaced."""
    old = status_in(folder, name)
    if old is None:
        return None
    require_regular(old)
    # A rename needs permission for the folder only, but a read-only file must stay.
    if not os.access(name, os.W_OK, dir_fd=folder):
        os.close(os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))  # raises the reason
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return old


def status_in(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a name in an open folder, without following a link; None if there is no such name."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _version(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_missing(old: os.stat_result | None) -> None:
    if old is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _refuse_existing(folder: int, name: str, place: CheckedPath) -> None:
    if status_in(folder, name) is not None:
        raise AlreadyExists(f"'{display(place.path)}' {EXISTS}")


def _settle(folder: int, beside: str, name: str, place: CheckedPath) -> None:
    """Give a file its name unless that exists by now."""
    try:
        os.link(beside, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise AlreadyExists(f"'{display(place.path)}' {EXISTS}") from None
    except OSError:  # no hard links on this file system; the window for a race is short
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(beside, dir_fd=folder)


def copy_owner_and_mode(descriptor: int, old: os.stat_result) -> None:
    """Copy owner and mode of the old file, but not set-user-id: the content is new."""
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o777)


def read_content(folder: int, name: str) -> bytes | None:
    try:
        with open_regular(folder, name) as file:
            return file.read()
    except FileNotFoundError:
        return None
