"""Listing a folder."""

from __future__ import annotations

import os
import stat

import msgspec

from farhand.machine.files.confined_root import closing_descriptor
from farhand.machine.files.files import Files, file_errors
from farhand.protocol.errors import Failed


class FolderEntry(msgspec.Struct, frozen=True):
    """One name in a folder; `kind` is file, dir, symlink or other."""

    name: str
    kind: str
    size: int


def list_folder(files: Files, path: str, *, hidden: bool = False, most: int = 10_000) -> list[FolderEntry]:
    """Return the entries of a folder by name, except protected ones; `hidden` includes names with a leading dot.

    Raises NotFound, NotAllowed, or Failed if the path is not a folder or has more than `most` entries.
    """
    place = files.place(path)
    if not stat.S_ISDIR(files.status(path).st_mode):
        raise Failed(f"'{path}' is not a folder; use read for a file")
    found: list[FolderEntry] = []
    with (
        file_errors("list", place.path),
        closing_descriptor(files.open_folder(place)) as folder,
        os.scandir(folder) as entries,
    ):
        for entry in entries:
            if entry.name.startswith(".") and not hidden:
                continue
            if files.is_hidden(os.path.join(place.real, entry.name)):  # noqa: PTH118
                continue
            if len(found) >= most:
                raise Failed(f"'{path}' has more than {most} entries; use glob with a pattern")
            found.append(FolderEntry(entry.name, _kind(entry), _size(entry)))
    return sorted(found, key=lambda entry: entry.name)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "symlink"
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
