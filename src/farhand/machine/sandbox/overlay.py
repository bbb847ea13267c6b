"""What a command changed in a copy-on-write view: the upper folder of an overlay compared with the folder below."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from farhand.machine.files.diffs import MOST_DIFFED, text_diff
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

    def shown(self, room: int) -> dict[str, str]:
        """Return the change as callers see it, with a diff of at most `room` characters if it is text."""
        found = {"path": self.path, "kind": self.kind}
        diff = self._diff(room)
        return found if diff is None else {**found, "diff": diff}

    def _diff(self, room: int) -> str | None:
        if room <= 0:
            return None
        try:
            old = None if self.kind == ADDED else _content(self.path)
            new = None if self.upper is None else _content(self.upper)
        except (OSError, ValueError):
            return None  # too large, or not a regular file
        diff = text_diff(old, new, self.path)
        return diff if diff and len(diff) <= room else None


def shown(changes: list[Change]) -> list[dict[str, str]]:
    """Return changes as callers see them; diffs are left out once they are too long together."""
    room, found = DIFF_BYTES, []
    for change in changes:
        found.append(change.shown(room))
        room -= len(found[-1].get("diff", ""))
    return found


def changes(overlays: Mapping[str, str]) -> list[Change]:
    """Return what differs between folders and their upper folders. Raises Failed if it is too much."""
    found: list[Change] = []
    for folder, upper in overlays.items():
        for change in _differences(folder, upper, opaque=False):
            found.append(change)
            if len(found) > MOST_CHANGES:
                raise Failed(f"the command changed more than {MOST_CHANGES} files; the trial was discarded")
    return sorted(found, key=lambda change: change.path)


def fingerprint(path: str) -> Fingerprint:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    moment = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    return (status.st_mode, size, moment, status.st_ino)


def _differences(lower: str, upper: str, *, opaque: bool) -> Iterator[Change]:
    names = set()
    for entry in os.scandir(upper):
        names.add(entry.name)
        below = f"{lower}/{entry.name}"
        before = None if opaque else fingerprint(below)
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield from _deleted(below, before)
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
                yield from _missing(below, entry.path)
            yield from _differences(below, entry.path, opaque=replaced)
        elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise Failed(f"the command made {below}, which is neither a file, a folder nor a link; trial discarded")
        elif before is not None and stat.S_ISDIR(before[0]):
            yield from _deleted(below, before)
            yield Change(below, ADDED, entry.path, None)
        elif before is None:
            yield Change(below, ADDED, entry.path, None)
        elif not _same(below, entry.path, before, status):
            yield Change(below, CHANGED, entry.path, before)


def _missing(lower: str, upper: str) -> Iterator[Change]:
    """Yield what a folder that was replaced does not have any more."""
    kept = set(os.listdir(upper))
    for entry in os.scandir(lower):
        if entry.name not in kept:
            yield from _deleted(entry.path, fingerprint(entry.path))


def _deleted(path: str, before: Fingerprint) -> Iterator[Change]:
    if before is None:
        return
    if stat.S_ISDIR(before[0]):
        for entry in os.scandir(path):
            yield from _deleted(entry.path, fingerprint(entry.path))
    yield Change(path, DELETED, None, before)


def _same(below: str, above: str, before: tuple[int, int, int, int], status: os.stat_result) -> bool:
    """Return whether a file was only copied: opening it for writing, or changing its times, copies it, too."""
    if before[0] != status.st_mode:
        return False
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(below) == os.readlink(above)
    if before[1] != status.st_size:
        return False
    with open(below, "rb") as old, open(above, "rb") as new:
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


def _content(path: str) -> bytes:
    if not stat.S_ISREG(os.lstat(path).st_mode) or os.path.getsize(path) > MOST_DIFFED:
        raise ValueError(path)
    with open(path, "rb") as file:
        return file.read(MOST_DIFFED)
