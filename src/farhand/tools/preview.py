"""Previews: what a call would do, as a diff of each file, or as the command and its folder.

A preview is made by the tool that would run, from its parsed arguments and the current files. It records what it was
made from: a digest of each file, and the folder of a command. Repeating it gives the same result unless something
changed.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Awaitable, Iterator, Mapping
from typing import Final

import msgspec

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files
from farhand.machine.files.text import MOST_TEXT
from farhand.protocol.errors import Failed, NotFound, ToolError

# Maximum characters of a diff; a longer one is omitted, with a note.
MOST_DIFF: Final = 200_000
# Maximum pairs of lines to compare; beyond that, all lines are shown as removed and added.
MOST_COMPARED: Final = 1_000_000
CONTEXT: Final = 3


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
        raise NotFound(f"the folder {display(folder)} is not there") from None
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
        texts = [("" if content is None else content.decode()) for content in (old, new)]
    except UnicodeDecodeError:
        sizes = [("no file" if content is None else f"{len(content)} bytes") for content in (old, new)]
        return FileEffect(name, before, note=f"not text: {sizes[0]} before, {sizes[1]} after")
    if old == new:
        return FileEffect(name, before, note="the content stays the same")
    lines = _unified(_lines(texts[0]), _lines(texts[1]))
    names = ["/dev/null" if content is None else _one_line(name) for content in (old, new)]
    diff = f"--- {names[0]}\n+++ {names[1]}\n" + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    if len(diff) > MOST_DIFF:
        lengths = f"{len(texts[0])} characters before, {len(texts[1])} after"
        return FileEffect(name, before, note=f"the diff is too long to show: {lengths}")
    return FileEffect(name, before, diff)


def _unified(old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the hunks of a diff; if there is too much to compare, one from the first change to the last."""
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    shortest = min(len(old), len(new)) - head
    tail = next((i for i in range(shortest) if old[-1 - i] != new[-1 - i]), shortest)
    gone, come = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(gone) * len(come) <= MOST_COMPARED:
        hunks = difflib.unified_diff(old, new, n=CONTEXT)
        next(hunks, None), next(hunks, None)  # skip the file names
        yield from hunks
        return
    first = max(0, head - CONTEXT)
    after = old[len(old) - tail :][:CONTEXT]
    around = head - first + len(after)
    yield f"@@ -{first + 1},{len(gone) + around} +{first + 1},{len(come) + around} @@\n"
    yield from (f" {line}" for line in old[first:head])
    yield from (f"-{line}" for line in gone)
    yield from (f"+{line}" for line in come)
    yield from (f" {line}" for line in after)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _one_line(name: str) -> str:
    """Return a name without control characters: a line break would look like a line of the diff."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in name)


def _lines(text: str) -> list[str]:
    """Return lines with their ends; only \\n ends a line."""
    parts = text.split("\n")
    return [*(f"{part}\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else [])]
