"""Parse patches.

    *** Begin Patch
    *** Add File: path        then lines with `+`
    *** Update File: path     then, optionally, `*** Move to: path`; then hunks
    @@ a line before the hunk @@
     a line that stays
    -a line that goes
    +a line that comes
    *** Delete File: path
    *** End Patch

A plain unified diff (`--- a/path`, `+++ b/path`, `@@ -1,3 +1,4 @@`) is accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from farhand.protocol.errors import InvalidArgs

_BEGIN = "*** Begin Patch"
_END = "*** End Patch"
_HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File: *(.*)")
_MOVE = "*** Move to:"
_END_OF_FILE = "*** End of File"
_RANGE = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*")


class Hunk(msgspec.Struct, frozen=True):
    """Context, removed and added lines in order, and where they are."""

    number: int
    lines: tuple[tuple[str, str], ...]  # (' ', '-' or '+', text)
    after: tuple[str, ...] = ()  # lines before it, each below the previous one
    near: int | None = None  # a line number, from 1
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        return [text for sign, text in self.lines if sign != "+"]


class Section(msgspec.Struct, frozen=True):
    """The changes of one file."""

    act: str  # "Add", "Update" or "Delete"
    path: str
    added: tuple[str, ...] = ()
    hunks: tuple[Hunk, ...] = ()
    move_to: str | None = None


def parse(patch: str, *, path: str | None = None) -> list[Section]:
    """Return the sections of a patch. Raises InvalidArgs naming the invalid line."""
    lines = patch.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    if lines and lines[0].endswith("\r"):
        lines = [line.removesuffix("\r") for line in lines]  # the whole patch has these line ends
    if lines and lines[0].strip() == _BEGIN:
        if lines[-1].strip() != _END:
            raise InvalidArgs(f"the patch does not end with the line '{_END}'; was it cut off?")
        sections = list(_sections(lines[1:-1]))
    elif path is not None or any(line.startswith(("--- ", "@@ -")) for line in lines):
        sections = list(_unified(lines, path))
    else:
        raise InvalidArgs(f"the patch must begin with the line '{_BEGIN}' and end with '{_END}'")
    if not sections:
        raise InvalidArgs("invalid patch: it changes nothing; no hunks found")
    return sections


def _sections(lines: list[str]) -> Iterator[Section]:
    index = 0
    while index < len(lines):
        if not lines[index].strip():
            index += 1
            continue
        header = _HEADER.fullmatch(lines[index].rstrip())
        if header is None:
            raise InvalidArgs(
                f"patch line {index + 2}: {lines[index]!r} is not '*** Add File:', '*** Update File:' or "
                "'*** Delete File:'"
            )
        end = next((i for i in range(index + 1, len(lines)) if _HEADER.fullmatch(lines[i].rstrip())), len(lines))
        yield _section(header[1], header[2].strip(), lines[index + 1 : end], index + 3)
        index = end


def _section(act: str, path: str, body: list[str], number: int) -> Section:
    while body and not body[-1]:
        body = body[:-1]  # blank lines before the next header are not content
    if act == "Delete":
        if body:
            raise InvalidArgs(f"patch line {number}: '*** Delete File: {path}' takes no lines, got {body[0]!r}")
        return Section(act, path)
    if act == "Add":
        for index, line in enumerate(body):
            if line and not line.startswith("+"):
                raise InvalidArgs(f"patch line {number + index}: {line!r}: lines of an added file begin with '+'")
        return Section(act, path, added=tuple(line[1:] for line in body))
    move_to = None
    if body and body[0].startswith(_MOVE):
        move_to = body[0].removeprefix(_MOVE).strip()
        body, number = body[1:], number + 1
    return Section(act, path, hunks=tuple(_hunks(body, number)), move_to=move_to)


def _hunks(body: list[str], number: int) -> Iterator[Hunk]:
    """Yield the hunks between `@@` lines; the first may have none."""
    index = count = 0
    while index < len(body):
        after: list[str] = []
        near = None
        headed = index
        while index < len(body) and body[index].startswith("@@"):
            if ranged := _RANGE.fullmatch(body[index].rstrip()):
                near = int(ranged[1])
            elif text := _heading(body[index]):
                after.append(text)
            index += 1
        start = index
        while index < len(body) and not body[index].startswith("@@"):
            index += 1
        lines = body[start:index]
        while lines and not lines[-1]:
            lines.pop()
        at_end = bool(lines) and lines[-1].strip() == _END_OF_FILE
        if at_end:
            lines.pop()
        count += 1
        if not lines:
            if not any(line.strip() for line in body[headed:index]):
                continue
            raise InvalidArgs(f"hunk at line {number + headed} has no body")
        yield Hunk(count, tuple(_lines(lines, number + start)), tuple(after), near, at_end)


def _lines(lines: list[str], number: int) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(lines):
        if line.startswith((" ", "-", "+")):
            yield line[0], line[1:]
        elif not line:
            yield " ", ""  # an empty context line that lost its leading space
        elif not line.startswith("\\"):  # "\ No newline at end of file"
            raise InvalidArgs(
                f"parse hunk line {number + index}: invalid patch line prefix in {line!r}; use ' ', '-' or '+'"
            )


def _unified(lines: list[str], path: str | None) -> Iterator[Section]:
    """Yield the sections of a plain unified diff."""
    heads = [i for i in range(len(lines) - 1) if lines[i].startswith("--- ") and lines[i + 1].startswith("+++ ")]
    if not heads:
        yield _unified_section(path, path, lines, 1)
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        body = lines[head + 2 : end]
        between = next((i for i, line in enumerate(body) if line.startswith(("diff --git ", "Index: "))), len(body))
        old = path if path is not None else _diff_name(lines[head])
        new = path if path is not None else _diff_name(lines[head + 1])
        yield _unified_section(old, new, body[:between], head + 3)


def _unified_section(old: str | None, new: str | None, body: list[str], first: int) -> Section:
    begin = next((i for i, line in enumerate(body) if line.startswith("@@")), len(body))
    hunks = tuple(_hunks(body[begin:], first + begin))
    if old is None and new is None:
        raise InvalidArgs("the diff names no file; give the parameter path, or '--- a/path' and '+++ b/path'")
    if not hunks:
        raise InvalidArgs("invalid unified diff: no hunks found")
    if new is None:
        assert old is not None
        return Section("Delete", old)
    if old is None:
        return Section("Add", new, added=tuple(text for hunk in hunks for sign, text in hunk.lines if sign == "+"))
    return Section("Update", old, hunks=hunks, move_to=None if old == new else new)


def _diff_name(line: str) -> str | None:
    name = line[4:].partition("\t")[0].strip()
    return None if name in ("/dev/null", "") else re.sub(r"^[ab]/", "", name)


def _heading(line: str) -> str:
    """Return the text of a line `@@ text @@`; the second mark is optional."""
    text = line.removeprefix("@@").removeprefix(" ")
    bare = text.rstrip()
    return bare.removesuffix("@@").rstrip() if bare.endswith("@@") else text
