"""Previews: what a call would do, as a diff of each file, or as the command and its folder.

A preview is made by the tool that would run, from its parsed arguments and the current files. It records what it was
made from: a digest of each file, and the folder of a command. Repeating it gives the same result unless something
changed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Awaitable, Mapping
from typing import Final

import msgspec

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.diffs import unified_diff
from farhand.machine.files.files import Files
from farhand.machine.files.text import MOST_TEXT
from farhand.protocol.errors import Failed, NotFound, ToolError

# Maximum characters of a diff; a longer one is omitted, with a note.
MOST_DIFF: Final = 200_000


class FileEffect(msgspec.Struct, frozen=True, omit_defaults=True):
    """The change of one file."""

    path: str
    # Digest of its content; None if there is no such file.
    before: str | None = None
    diff: str = ""
    # Why there is no diff.
    note: str = ""


class Preview(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call would do. An approval is bound to a digest of it."""

    files: tuple[FileEffect, ...] = ()
    command: str | None = None
    cwd: str | None = None
    # The identity of the folder `cwd`, whatever its name.
    folder: str | None = None
    # Additions to the environment.
    env: dict[str, str] = {}
    stdin: str | None = None
    # Description of what the call does beyond its files and its command.
    summary: str = ""
    # What the command wrote when it was tried.
    output: str = ""
    # Why the preview is incomplete.
    note: str = ""


async def preview_or_error(preview: Awaitable[Preview]) -> Preview:
    """Return a preview; if the call would fail, one with the reason as its note."""
    try:
        return await preview
    except ToolError as error:
        return Preview(note=f"the call would fail: {error.message}")


def file_preview(files: Files, path: str, new: bytes) -> Preview:
    """Preview the write of a whole file. Raises ToolError if it would fail."""
    return change_preview(files, path, current_content(files, path), new)


def change_preview(files: Files, path: str, old: bytes | None, new: bytes | None) -> Preview:
    """Preview a change of one file. Raises ToolError if it would fail."""
    return Preview(files=(planned_effect(files, path, old, new),))


def planned_effect(files: Files, path: str, old: bytes | None, new: bytes | None) -> FileEffect:
    """Return the change of one file that a tool would write. Raises ToolError if that would fail."""
    place = files.place(path)
    files.refuse_unwritable("write", place)
    parent = os.path.dirname(place.real)  # noqa: PTH120
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)  # noqa: PTH120
    if not os.path.isdir(parent):  # noqa: PTH112
        raise Failed(f"Failed to write '{display(place.path)}': '{display(parent)}' is not a folder")
    return file_effect(place.real, old, new)


def current_content(files: Files, path: str) -> bytes | None:
    """Return the content of a file, None if there is no such file. Raises ToolError."""
    try:
        with files.open(path) as file:
            content = file.read(MOST_TEXT + 1)
    except NotFound:
        return None
    if len(content) > MOST_TEXT:
        raise Failed(f"'{display(path)}' has more than {MOST_TEXT} bytes")
    return content


def command_preview(
    command: str, folder: str, *, env: Mapping[str, str] | None = None, stdin: str | None = None, summary: str = ""
) -> Preview:
    """Preview a command in `folder`. Raises NotFound if there is no such folder."""
    try:
        real = os.path.realpath(folder, strict=True)
        status = os.stat(real)  # noqa: PTH116
    except (OSError, ValueError):
        raise NotFound(f"the folder {display(folder)} does not exist") from None
    if not stat.S_ISDIR(status.st_mode):
        raise NotFound(f"{display(folder)} is not a folder")
    return Preview(
        command=command,
        cwd=display(real),
        folder=f"{status.st_dev}:{status.st_ino}",
        env=dict(env or {}),
        stdin=stdin,
        summary=summary,
    )


def file_effect(path: str, old: bytes | None, new: bytes | None) -> FileEffect:
    """Return the change of one file as a unified diff; None stands for no file."""
    name = display(path)
    before = None if old is None else digest(old)
    try:
        diff = unified_diff(old, new, name)
    except UnicodeDecodeError:
        sizes = [("no file" if content is None else f"{len(content)} bytes") for content in (old, new)]
        return FileEffect(name, before, note=f"not text: {sizes[0]} before, {sizes[1]} after")
    if old == new:
        return FileEffect(name, before, note="the content stays the same")
    if len(diff) > MOST_DIFF:
        lengths = [len((content or b"").decode()) for content in (old, new)]
        return FileEffect(
            name,
            before,
            note=f"the diff is too long to show: {lengths[0]} characters before, {lengths[1]} after",
        )
    return FileEffect(name, before, diff)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
