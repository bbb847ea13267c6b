"""A folder and the files below it, opened without following links.

`ConfinedRoot` receives a real path. If a part of it has been replaced by a link since it was checked, opening fails,
so the file that was checked is the file that is opened.

Every file is reached the same way: open its folder here, then use its name with `dir_fd`. With `openat2` the kernel
resolves the whole path at once; elsewhere the folders are opened one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from farhand.protocol.errors import NotFound

# O_PATH needs no permission to list the folder; where it is missing (macOS), a readable descriptor is used.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Opener = Callable[[int, Sequence[str]], int]


class ConfinedRoot:
    """One allowed folder; `/` allows everything. Files in a root that is not `writable` are read-only."""

    def __init__(self, path: str | os.PathLike[str], *, opener: Opener | None = None, writable: bool = True) -> None:
        """Resolve links in `path` once, now. Raises NotFound if there is no such folder."""
        self.writable = writable
        self.path = os.path.realpath(path)
        if not Path(self.path).is_dir():
            raise NotFound(f"'{os.fspath(path)}' is not a folder; a root must be one that exists")
        self._prefix = self.path.rstrip("/") + "/"
        self._open = opener or (open_with_openat2 if _kernel_can() else open_stepwise)

    def __repr__(self) -> str:
        return f"ConfinedRoot({self.path!r})"

    def contains(self, real: str) -> bool:
        """Return whether a real path (absolute, without links or dots) is this folder or below it."""
        return real == self.path or real.startswith(self._prefix)

    def open_folder(self, real: str, *, make: bool = False) -> int:
        """Return a descriptor of the folder at a real path; the caller closes it. `make` creates missing folders.

        Raises OSError; ELOOP or ENOTDIR for a part that is a link.
        """
        if not self.contains(real):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), real)
        parts = [part for part in real[len(self._prefix) :].split("/") if part]
        if "\0" in real or ".." in parts:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), real)
        top = os.open(self.path, _FOLDER)
        if not parts:
            return top
        try:
            return self._open(top, parts)
        except FileNotFoundError:
            if not make:
                raise
            return open_stepwise(top, parts, make=True)
        finally:
            os.close(top)

    def missing_folders(self, real: str) -> tuple[str, ...]:
        """Return the folders that must be created for a file at a real path, outermost first."""
        missing = []
        folder = os.path.dirname(real)  # noqa: PTH120 (checked, and not to be resolved again)
        while self.contains(folder) and not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)  # noqa: PTH120
        return tuple(reversed(missing))

    def remove_folders(self, made: Sequence[str]) -> None:
        """Remove those of the folders, given outermost first, that are empty."""
        for path in reversed(made):
            parent, name = os.path.split(path)
            with contextlib.suppress(OSError), closing_descriptor(self.open_folder(parent)) as folder:
                os.rmdir(name, dir_fd=folder)


@contextlib.contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_stepwise(top: int, parts: Sequence[str], *, make: bool = False) -> int:
    """Open folder after folder, following no link."""
    current = os.dup(top)
    try:
        for part in parts:
            try:
                following = os.open(part, _FOLDER, dir_fd=current)
            except FileNotFoundError:
                if not make:
                    raise
                _make_folder(part, current)
                following = os.open(part, _FOLDER, dir_fd=current)
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def open_subfolder(name: str, parent: int) -> int:
    """Return a descriptor for listing a folder in an open one, following no link. Raises OSError."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def open_with_openat2(top: int, parts: Sequence[str]) -> int:
    """Open the whole path in one call that refuses links and everything not below `top`."""
    path = os.fsencode("/".join(parts))
    how = _How(_FOLDER, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
    # The kernel fails with EAGAIN if a part of the path is renamed at the same time.
    for _ in range(64):
        descriptor: int = libc().syscall(_OPENAT2, top, path, ctypes.byref(how), ctypes.sizeof(how))
        if descriptor >= 0:
            return descriptor
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), os.fsdecode(path))


def sync_folder(folder: int) -> None:
    """Sync a folder's entries to disk; skipped for a folder that may not be listed."""
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except PermissionError:
        return
    with closing_descriptor(readable):
        os.fsync(readable)


def _make_folder(name: str, parent: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return  # created concurrently; opening it shows whether it is a folder
    sync_folder(parent)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _kernel_can() -> bool:
    """Return whether `openat2` works: not on other systems, kernels before 5.6, or in some sandboxes."""
    if sys.platform != "linux":
        return False
    with closing_descriptor(os.open("/", _FOLDER)) as top:
        try:
            os.close(open_with_openat2(top, ["."]))
        except OSError:
            return False
    return True
