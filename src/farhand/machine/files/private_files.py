"""Files and folders for their owner alone, whatever the umask.

The umask itself stays as it is: it belongs to the commands and to the files that users ask for.
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
    """Open a file as `Path.open` does; a new one is for its owner alone."""
    return path.open(mode) if "r" in mode else open(path, mode, opener=_opener)


def write_private(path: Path, content: bytes) -> None:
    """Write a whole file; a new one is for its owner alone."""
    with open_private(path, "wb") as file:
        file.write(content)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file whole or not at all, on the disk when this returns; the new one is for its owner alone."""
    beside = path.with_name(f"{path.name}.new")
    with open_private(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def create_private(path: Path) -> None:
    """Create an empty file for its owner alone, or close one that is there to others.

    One that is there is not opened: to close it again would give up the locks this process holds on it.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE))
    except FileExistsError:
        restrict_to_owner(path)


def restrict_to_owner(path: Path) -> None:
    """Take every right to a file or folder from others than its owner. Raises OSError."""
    status = path.lstat()
    if status.st_mode & 0o077 and not stat.S_ISLNK(status.st_mode):
        path.chmod(stat.S_IMODE(status.st_mode) & 0o700)


def restrict_tree(top: Path, *, apart_from: Collection[str] = ()) -> None:
    """Take every right to a folder and all it holds from others than its owner, as far as that can be done.

    What is named `apart_from` in it is left alone, and so is a file with further names: they may belong elsewhere.
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
