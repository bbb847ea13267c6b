"""Changes in folders, reported by the kernel (inotify), to avoid scanning thousands of files.

A change is reported before the program that made it continues, so a later check sees it. Not reported are changes
through mapped memory, or through a link to the same file in another folder.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_EVENT = struct.Struct("iIII")
_MODIFY, _ATTRIB, _MOVED, _CREATE, _DELETE = 0x2, 0x4, 0xC0, 0x100, 0x200
_OVERFLOW, _IGNORED, _ONLY_FOLDERS = 0x4000, 0x8000, 0x01000000
_LOCAL = frozenset(
    # ext, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS, bcachefs; remote changes on other file systems are not reported
    (0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E)
)


class FolderWatch:
    """Watches folders. The owner calls `close`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises OSError if watching is not possible: not Linux, too many watches, or a remote file system."""
        self._library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._folders: dict[int, tuple[int, Path]] = {}
        self._identities = [_identity(folder) for folder in folders]
        self._file = self._checked(self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            for place, folder in enumerate(folders):
                self._watch(place, folder)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def changed(self) -> set[tuple[int, str]] | None:
        """Return the changes since the last call: the index of the folder, and the name in it.

        None if they are unknown: there were too many, or a folder was replaced.
        """
        found: set[tuple[int, str]] = set()
        while True:
            try:
                data = os.read(self._file, 65536)
            except BlockingIOError:
                break
            except OSError:
                return None
            at = 0
            while at < len(data):
                number, kind, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if kind & (_OVERFLOW | _IGNORED):
                    return None
                name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                found.add((self._folders[number][0], name))
        same = [_identity(folder) for _, folder in self._folders.values()] == self._identities
        return found if same else None

    def _watch(self, place: int, folder: Path) -> None:
        path = os.fsencode(folder)
        system = ctypes.create_string_buffer(512)
        self._checked(self._library.statfs(path, system))
        if ctypes.c_long.from_buffer(system).value not in _LOCAL:
            raise OSError(f"{folder} is on a file system that can change without notification")
        wanted = _MODIFY | _ATTRIB | _MOVED | _CREATE | _DELETE | _ONLY_FOLDERS
        self._folders[self._checked(self._library.inotify_add_watch(self._file, path, wanted))] = place, folder

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
