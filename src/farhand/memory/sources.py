"""Where memory files come from, and which files are memory files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from farhand.machine.files import Files, refuse_unnameable, shown
from farhand.machine.root import Root
from farhand.protocol.errors import NotAllowed, ToolError

MAIN_FILE: Final = "MEMORY.md"
FOLDER: Final = "memory"
LARGEST_FILE: Final = 16 * 1024 * 1024
UNSETTLED: Final = ""
"""The stamp of a file that may be changed again without its times showing it."""
_SETTLING_NS: Final = 100_000_000


class Source(Protocol):
    """Memory files of one place."""

    name: str
    """Tells this place from every other, across restarts."""
    prefix: str
    """Put before its paths where they are shown."""

    async def listing(self) -> Mapping[str, str]:
        """Every memory file with a stamp that changes when its content may have changed. Raises ToolError."""

    async def read(self, path: str) -> bytes:
        """Raises NotFound, NotAllowed, or Failed."""


def is_memory_path(path: str) -> bool:
    """`MEMORY.md`, or a Markdown file that lies in `memory/` itself and is not hidden."""
    folder, slash, name = path.rpartition("/")
    if not slash:
        return path == MAIN_FILE
    return folder == FOLDER and name.endswith(".md") and not name.startswith(".")


def checked_path(path: str) -> str:
    """A path as a caller may write it, in its plain form. Raises NotAllowed for anything but a memory file."""
    refuse_unnameable("path", path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    plain = "/".join(parts)
    if ".." in parts or path.startswith("/") or not is_memory_path(plain):
        raise NotAllowed(f"{path[:200]!r} is not a memory file; those are {MAIN_FILE} and {FOLDER}/*.md")
    return plain


class FolderSource:
    """The memory files of a folder. A link is followed only to another memory file of the same folder."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self.name = f"folder:{os.path.realpath(folder)}"
        self.prefix = prefix

    async def listing(self) -> Mapping[str, str]:
        return await asyncio.to_thread(self._listing)

    async def read(self, path: str) -> bytes:
        return await asyncio.to_thread(self._read, path)

    def _listing(self) -> dict[str, str]:
        # Done at every search, perhaps for thousands of files.
        found: dict[str, str] = {}
        latest = time.time_ns() - _SETTLING_NS
        with contextlib.suppress(OSError):
            found[MAIN_FILE] = _stamp((self.folder / MAIN_FILE).lstat(), latest)
        inner = self.folder / FOLDER
        linked = inner.is_symlink()
        with contextlib.suppress(OSError), os.scandir(inner) as entries:
            for entry in entries:
                name = entry.name
                if name.endswith(".md") and name[0] != "." and (name.isascii() or shown(name) == name):
                    stamp = UNSETTLED if linked else _stamp(entry.stat(follow_symlinks=False), latest)
                    found[f"{FOLDER}/{name}"] = stamp
        for path in [path for path, stamp in found.items() if not stamp]:
            if not self._is_readable(path):
                del found[path]
        return found

    def _is_readable(self, path: str) -> bool:
        """Asked where a stamp tells nothing: links, and what was changed just now."""
        try:
            self._open(path).close()
        except ToolError:
            return False
        return True

    def _read(self, path: str) -> bytes:
        with self._open(path) as file:
            return file.read(LARGEST_FILE + 1)

    def _open(self, path: str) -> BinaryIO:
        files = Files(self.folder, roots=[Root(self.folder)])
        place = files.place(path)
        within = os.path.relpath(place.real, place.root.path)
        if not is_memory_path(within):
            raise NotAllowed(f"{path!r} leads to {shown(within)!r}, which is not a memory file")
        return files.open(place.real)


def _stamp(status: os.stat_result, latest: int) -> str:
    """The time of change, which nobody can set back, tells more than the time of modification."""
    changed = status.st_ctime_ns
    if changed > latest or not stat.S_ISREG(status.st_mode):
        return UNSETTLED
    return f"{changed}.{status.st_size}.{status.st_ino}"
