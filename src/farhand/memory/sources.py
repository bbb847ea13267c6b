"""The sources of memory files, and which files are memory files."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from farhand.machine.files.allowed_paths import check_path_text, display
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.files.watch import FolderWatch
from farhand.protocol.errors import NotAllowed, ToolError

MAIN_FILE: Final = "MEMORY.md"
FOLDER: Final = "memory"
LARGEST_FILE: Final = 16 * 1024 * 1024
# How long a change without a kernel notification may stay unnoticed.
LOOK_SECONDS: Final = 60.0
# The stamp of a file whose next change might not alter its timestamps.
UNSETTLED: Final = ""
_SETTLING_NS: Final = 100_000_000


class Source(Protocol):
    # Identifies this place across restarts.
    name: str
    # Prefix of its paths when they are displayed.
    prefix: str

    async def listing(self) -> Mapping[str, str]:
        """Return every memory file with a stamp that changes when its content may have changed. Raises ToolError.

        Returning the same object again means that nothing changed.
        """

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises NotFound, NotAllowed, or Failed."""

    def close(self) -> None:
        """Close open resources; the source can still be used."""


def is_memory_path(path: str) -> bool:
    """Return whether a path is `MEMORY.md` or a visible Markdown file directly in `memory/`."""
    folder, slash, name = path.rpartition("/")
    if not slash:
        return path == MAIN_FILE
    return folder == FOLDER and name.endswith(".md") and not name.startswith(".")


def checked_path(path: str) -> str:
    """Return the normalised path of a memory file. Raises NotAllowed for any other file."""
    check_path_text("path", path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    plain = "/".join(parts)
    if ".." in parts or path.startswith("/") or not is_memory_path(plain):
        raise NotAllowed(f"{path[:200]!r} is not a memory file; those are {MAIN_FILE} and {FOLDER}/*.md")
    return plain


class FolderSource:
    """The memory files of a folder. A link is followed only to another memory file of the same folder.

    Changes are reported by the kernel where possible; elsewhere, and periodically, all files are checked.
    """

    def __init__(self, folder: Path, prefix: str = "", *, look_seconds: float = LOOK_SECONDS) -> None:
        self.folder = folder
        self._look_seconds = look_seconds
        self.name = f"folder:{os.path.realpath(folder)}"
        self.prefix = prefix
        self._known: dict[str, str] = {}
        self._looked = -math.inf
        # Checked every time: links, recently changed files, unreadable files.
        self._unsettled: list[str] = []
        self._watch: FolderWatch | None = None

    async def listing(self) -> Mapping[str, str]:
        changed = self._changed()
        if changed is None:
            self._known = await asyncio.to_thread(self._look_at_all)
        elif changed:
            self._known = await asyncio.to_thread(self._look_at, changed)
        return self._known

    async def read(self, path: str) -> bytes:
        return await asyncio.to_thread(self._read, path)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _changed(self) -> set[str] | None:
        """Return the paths to check; None for all."""
        reported = self._watch.changed() if self._watch is not None else None
        if reported is None or (0, FOLDER) in reported or time.monotonic() - self._looked > self._look_seconds:
            return None
        changed = {name if place == 0 else f"{FOLDER}/{name}" for place, name in reported}
        changed.update(self._unsettled)
        return {path for path in changed if is_memory_path(path)}

    def _look_at_all(self) -> dict[str, str]:
        self.close()
        self._looked = time.monotonic()
        inner = self.folder / FOLDER
        linked = inner.is_symlink()
        with contextlib.suppress(OSError):
            self._watch = FolderWatch([self.folder, *([inner] if inner.is_dir() else [])]) if not linked else None
        found: dict[str, str] = {}
        latest = time.time_ns() - _SETTLING_NS
        with contextlib.suppress(OSError):
            found[MAIN_FILE] = _stamp((self.folder / MAIN_FILE).lstat(), latest)
        with contextlib.suppress(OSError), os.scandir(inner) as entries:
            for entry in entries:
                name = entry.name
                if name.endswith(".md") and name[0] != "." and _nameable(name):
                    stamp = UNSETTLED if linked else _stamp(entry.stat(follow_symlinks=False), latest)
                    found[f"{FOLDER}/{name}"] = stamp
        return self._settled(found)

    def _look_at(self, paths: Iterable[str]) -> dict[str, str]:
        found = dict(self._known)
        latest = time.time_ns() - _SETTLING_NS
        for path in paths:
            found.pop(path, None)
            with contextlib.suppress(OSError):
                if _nameable(path):
                    found[path] = _stamp((self.folder / path).lstat(), latest)
        return self._settled(found)

    def _settled(self, found: dict[str, str]) -> dict[str, str]:
        self._unsettled = [path for path, stamp in found.items() if not stamp]
        for path in self._unsettled:
            if not self._is_readable(path):
                del found[path]
        return found

    def _is_readable(self, path: str) -> bool:
        """Return whether a file without a stamp can be read: a link, or one that changed recently."""
        try:
            self._open(path).close()
        except ToolError:
            return False
        return True

    def _read(self, path: str) -> bytes:
        with self._open(path) as file:
            return file.read(LARGEST_FILE + 1)

    def _open(self, path: str) -> BinaryIO:
        files = Files(self.folder, roots=[ConfinedRoot(self.folder)])
        place = files.place(path)
        within = os.path.relpath(place.real, place.root.path)
        if not is_memory_path(within):
            raise NotAllowed(f"{path!r} leads to {display(within)!r}, which is not a memory file")
        return files.open(place.real)


def _nameable(name: str) -> bool:
    return name.isascii() or display(name) == name


def _stamp(status: os.stat_result, latest: int) -> str:
    """Return the stamp of a file. The change time is used because, unlike the modification time, it cannot be set."""
    changed = status.st_ctime_ns
    if changed > latest or not stat.S_ISREG(status.st_mode):
        return UNSETTLED
    return f"{changed}.{status.st_size}.{status.st_ino}"
