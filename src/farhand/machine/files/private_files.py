"""Files and folders that only their owner can access, whatever the umask.

The umask itself stays unchanged: it applies to commands and to files of users.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

FILE = 0o600


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file as `Path.open` does; a new one is private to its owner."""
    return path.open(mode) if "r" in mode else open(path, mode, opener=_opener)


def write_private(path: Path, content: bytes) -> None:
    """Write a whole file; a new one is private to its owner."""
    with open_private(path, "wb") as file:
        file.write(content)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably; the new one is private to its owner."""
    beside = path.with_name(f"{path.name}.new")
    with open_private(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder_at(path.parent)


def sync_folder_at(path: Path) -> None:
    """Sync the entries of a folder to disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def create_private(path: Path) -> None:
    """Create an empty private file, or restrict an existing one.

    An existing one is not opened: closing it would release the locks this process holds on it.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE))
    except FileExistsError:
        restrict_to_owner(path)


def restrict_to_owner(path: Path) -> None:
    """Remove all permissions of group and others from a file or folder. Raises OSError."""
    status = path.lstat()
    if status.st_mode & 0o077 and not stat.S_ISLNK(status.st_mode):
        path.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def restrict_tree(top: Path, *, apart_from: Collection[str] = ()) -> None:
    """Remove all permissions of group and others from a folder and its content, as far as possible.

    Skips names in `apart_from`, and files with several hard links, which may belong elsewhere.
    """
    with contextlib.suppress(OSError):
        restrict_to_owner(top)
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        for entry in entries:
            if entry.name in apart_from:
                continue
            path = Path(entry.path)
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    restrict_tree(path)
                elif entry.stat(follow_symlinks=False).st_nlink == 1:
                    restrict_to_owner(path)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE)
