"""What a command changed in a copy-on-write view: the upper folder of an overlay compared with the folder below."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

import msgspec

from farhand.machine.files.confined_root import ConfinedRoot, closing_descriptor
from farhand.machine.files.diffs import MOST_DIFFED, text_diff
from farhand.machine.files.files import open_regular
from farhand.protocol.errors import Failed

MOST_CHANGES: Final = 10_000
DIFF_BYTES: Final = 256 * 1024
_OPAQUE: Final = ("trusted.overlay.opaque", "user.overlay.opaque")

ADDED, CHANGED, DELETED = "added", "changed", "deleted"

# Type and mode, size, time of change and inode of a file; None for no file.
Fingerprint = tuple[int, int, int, int] | None


class Change(msgspec.Struct, frozen=True):
    """A change of one file, link or folder; `upper` is where its new content lies, none if it was deleted."""

    path: str
    kind: str
    upper: str | None
    before: Fingerprint
    # Of text, made when the command ended: what lies at the path may be another file later.
    diff: str | None = None

    @property
    def shown(self) -> dict[str, str]:
        """Return the change as callers see it."""
        found = {"path": self.path, "kind": self.kind}
        return found if self.diff is None else {**found, "diff": self.diff}


class Lower:
    """A folder below an overlay, read without following links: none of its folders was one when the command ran."""

    def __init__(self, path: str) -> None:
        """Raises NotFound if there is no such folder."""
        self._root = ConfinedRoot(path)

    def fingerprint(self, path: str) -> Fingerprint:
        try:
            with self._at(path) as (folder, name):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:  # a folder of the path is a link now
                raise
            return None
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        moment = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
        return (status.st_mode, size, moment, status.st_ino)

    def names(self, path: str) -> list[str]:
        with closing_descriptor(self._root.open_folder(path)) as folder:
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        with closing_descriptor(readable):
            return os.listdir(readable)

    def link(self, path: str) -> str:
        with self._at(path) as (folder, name):
            return os.readlink(name, dir_fd=folder)

    def open(self, path: str) -> BinaryIO:
        """Open a regular file. Raises OSError for anything else."""
        with self._at(path) as (folder, name):
            return open_regular(folder, name)

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int, str]]:
        parent, name = os.path.split(path)
        with closing_descriptor(self._root.open_folder(parent)) as folder:
            yield folder, name


def changes(overlays: Mapping[str, str]) -> list[Change]:
    """Return what differs between folders and their upper folders, with diffs until they are too long together.

    Raises Failed if it is too much.
    """
    found: list[tuple[Change, Lower]] = []
    for folder, upper in overlays.items():
        lower = Lower(folder)
        for change in _differences(lower, folder, upper, opaque=False):
            found.append((change, lower))
            if len(found) > MOST_CHANGES:
                raise Failed(f"the command changed more than {MOST_CHANGES} files; the trial was discarded")
    room, described = DIFF_BYTES, []
    for change, lower in sorted(found, key=lambda one: one[0].path):
        diff = _diff(change, lower) if room > 0 else None
        if diff is not None and len(diff) <= room:
            room -= len(diff)
            change = msgspec.structs.replace(change, diff=diff)  # noqa: PLW2901
        described.append(change)
    return described


def _diff(change: Change, lower: Lower) -> str | None:
    try:
        old = new = None
        if change.kind != ADDED:
            with lower.open(change.path) as file:
                old = _content(file)
        if change.upper is not None:
            if not stat.S_ISREG(os.lstat(change.upper).st_mode):
                return None
            with open(change.upper, "rb") as file:
                new = _content(file)
    except (OSError, ValueError):
        return None  # too large, or not a regular file
    return text_diff(old, new, change.path) or None


def _content(file: BinaryIO) -> bytes:
    data = file.read(MOST_DIFFED + 1)
    if len(data) > MOST_DIFFED:
        raise ValueError(f"more than {MOST_DIFFED} bytes")
    return data


def _differences(tree: Lower, lower: str, upper: str, *, opaque: bool) -> Iterator[Change]:
    for entry in os.scandir(upper):
        below = f"{lower}/{entry.name}"
        if not entry.name.isprintable() and _not_utf8(entry.name):
            raise Failed(f"the command made a file whose name is not UTF-8, {entry.name!r}; the trial was discarded")
        before = None if opaque else tree.fingerprint(below)
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield from _deleted(tree, below, before)
        elif entry.is_dir(follow_symlinks=False):
            is_folder = before is not None and stat.S_ISDIR(before[0])
            if before is not None and not is_folder:
                yield Change(below, DELETED, None, before)
            if not is_folder:
                yield Change(below, ADDED, entry.path, None)
            elif before is not None and stat.S_IMODE(before[0]) != stat.S_IMODE(status.st_mode):
                yield Change(below, CHANGED, entry.path, before)
            replaced = opaque or not is_folder or _is_opaque(entry.path)
            if is_folder and replaced:
                yield from _missing(tree, below, entry.path)
            yield from _differences(tree, below, entry.path, opaque=replaced)
        elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise Failed(f"the command made {below}, which is neither a file, a folder nor a link; trial discarded")
        elif before is not None and stat.S_ISDIR(before[0]):
            yield from _deleted(tree, below, before)
            yield Change(below, ADDED, entry.path, None)
        elif before is None:
            yield Change(below, ADDED, entry.path, None)
        elif not _same(tree, below, entry.path, before, status):
            yield Change(below, CHANGED, entry.path, before)


def _not_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


def _missing(tree: Lower, lower: str, upper: str) -> Iterator[Change]:
    """Yield what a folder that was replaced does not have any more."""
    kept = set(os.listdir(upper))
    for name in tree.names(lower):
        if name not in kept:
            yield from _deleted(tree, f"{lower}/{name}", tree.fingerprint(f"{lower}/{name}"))


def _deleted(tree: Lower, path: str, before: Fingerprint) -> Iterator[Change]:
    if before is None:
        return
    if stat.S_ISDIR(before[0]):
        for name in tree.names(path):
            yield from _deleted(tree, f"{path}/{name}", tree.fingerprint(f"{path}/{name}"))
    yield Change(path, DELETED, None, before)


def _same(tree: Lower, below: str, above: str, before: tuple[int, int, int, int], status: os.stat_result) -> bool:
    """Return whether a file was only copied: opening it for writing, or changing its times, copies it, too."""
    if before[0] != status.st_mode:
        return False
    if stat.S_ISLNK(status.st_mode):
        return tree.link(below) == os.readlink(above)
    if before[1] != status.st_size:
        return False
    with tree.open(below) as old, open(above, "rb") as new:
        while piece := old.read(1 << 20):
            if piece != new.read(len(piece)):
                return False
    return True


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(path, name) == b"y":
                return True
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM):
                raise
    return False
