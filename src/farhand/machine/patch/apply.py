"""Apply patches to several files, all together or not at all.

Line ends, and a missing last one, are preserved. Patches are parsed in `parse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files
from farhand.machine.files.text import MOST_TEXT
from farhand.machine.files.transaction import FileChange, change_files
from farhand.machine.patch.parse import Hunk, Section, parse
from farhand.protocol.errors import Failed, InvalidArgs, NotFound


class _Overlay(msgspec.Struct):
    """The files after the patch, layered over the current files."""

    files: Files
    old: dict[str, bytes | None] = msgspec.field(default_factory=dict)
    new: dict[str, bytes | None] = msgspec.field(default_factory=dict)
    modes: dict[str, int] = msgspec.field(default_factory=dict)

    def read(self, path: str) -> bytes | None:
        real = self.files.place(path).real
        if real not in self.new:
            self.old[real] = self.new[real] = self._content(path)
        return self.new[real]

    def put(self, path: str, content: bytes | None) -> None:
        self.new[self.files.place(path).real] = content

    def keep_mode(self, source: str, target: str) -> None:
        self.modes[self.files.place(target).real] = self.files.status(source).st_mode

    def changes(self) -> list[FileChange]:
        return [
            FileChange(path, self.old[path], new, self.modes.get(path))
            for path, new in self.new.items()
            if new != self.old[path]
        ]

    def _content(self, path: str) -> bytes | None:
        try:
            with self.files.open(path) as file:
                content = file.read(MOST_TEXT + 1)
        except NotFound:
            return None
        if len(content) > MOST_TEXT:
            raise Failed(f"'{display(path)}' is larger than {MOST_TEXT} bytes; use a command for this file")
        return content


def apply_patch(files: Files, patch: str, *, path: str | None = None) -> str:
    """Apply a patch and return a report, a line for each file and hunk. `path`: the file of a diff without names.

    All or nothing. Raises InvalidArgs for an invalid patch, NotFound for a missing file, Failed for hunks that do not
    match, or match in several places.
    """
    changes, report = planned_changes(files, patch, path=path)
    change_files(files, changes)
    return "\n".join(report)


def planned_changes(files: Files, patch: str, *, path: str | None = None) -> tuple[list[FileChange], list[str]]:
    """Return the changes and the report of `apply_patch`, without applying them. Raises as it does."""
    overlay = _Overlay(files)
    report: list[str] = []
    for section in parse(patch, path=path):
        if not section.path:
            raise InvalidArgs(f"a patch section '*** {section.act} File:' names no file")
        report += _ACTS[section.act](overlay, section)
    return overlay.changes(), report


def _add(overlay: _Overlay, section: Section) -> list[str]:
    if overlay.read(section.path) is not None:
        raise Failed(f"'{section.path}' already exists, so it cannot be added; use '*** Update File:' to change it")
    overlay.put(section.path, "".join(f"{line}\n" for line in section.added).encode())
    return [f"added {section.path} ({len(section.added)} lines)"]


def _delete(overlay: _Overlay, section: Section) -> list[str]:
    if overlay.read(section.path) is None:
        raise NotFound(f"'{section.path}' cannot be deleted: no such file")
    if Path(overlay.files.resolve(section.path)).is_symlink():
        raise Failed(f"'{section.path}' is a link, and a patch deletes only files; remove it with a command")
    overlay.put(section.path, None)
    return [f"deleted {section.path}"]


def _update(overlay: _Overlay, section: Section) -> list[str]:
    content = overlay.read(section.path)
    if content is None:
        raise NotFound(f"'{section.path}' cannot be updated: no such file; use '*** Add File:' to make it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Failed(f"'{section.path}' is not UTF-8 text (byte {error.start}), so it cannot be patched") from None
    if not section.hunks and section.move_to is None:
        raise InvalidArgs(f"'*** Update File: {section.path}' has no hunks; give lines with ' ', '-' and '+'")
    updated, places = fit(text, section.hunks, section.path)
    report = [f"applied {len(section.hunks)} hunk(s) to {section.path}"]
    report += [f"hunk {number} applied at line {line}" for number, line in enumerate(places, 1)]
    target = section.path
    if section.move_to is not None:
        target = section.move_to
        if overlay.files.place(target) != overlay.files.place(section.path) and overlay.read(target) is not None:
            raise Failed(f"'{section.path}' cannot be moved to '{target}': that file already exists")
        overlay.keep_mode(section.path, target)
        overlay.put(section.path, None)
        report.append(f"moved {section.path} to {target}")
    overlay.put(target, updated.encode())
    return report


_ACTS: dict[str, Callable[[_Overlay, Section], list[str]]] = {"Add": _add, "Update": _update, "Delete": _delete}


# -- fitting hunks to a file ------------------------------------------------------------------------------------


def fit(text: str, hunks: Sequence[Hunk], path: str) -> tuple[str, list[int]]:
    """Return the text with all hunks applied, and the line (from 1) of each. Raises Failed if one does not match."""
    lines = text.split("\n")
    ended = lines[-1] == ""
    if ended:
        lines.pop()
    with_end = lines if ended else lines[:-1]
    line_end = "\r" if sum(line.endswith("\r") for line in with_end) * 2 > len(with_end) else ""
    starts = _starts([_bare(line) for line in lines], hunks, path)
    if not ended:
        lines[-1] += line_end  # removed again from the new last line
    result: list[str] = []
    done = 0
    for hunk, start in zip(hunks, starts, strict=True):
        result += lines[done:start]
        done = start
        for sign, content in hunk.lines:
            if sign == "+":
                result.append(_bare(content) + line_end if line_end else content)
            else:
                if sign == " ":
                    result.append(lines[done])
                done += 1
    result += lines[done:]
    if not ended and result:
        result[-1] = result[-1].removesuffix(line_end)
    return "\n".join(result) + "\n" * bool(ended and result), [start + 1 for start in starts]


def _starts(lines: list[str], hunks: Sequence[Hunk], path: str) -> list[int]:
    """Return the start of each hunk, counted from 0: in order, without overlap, and unambiguous."""
    candidates = [_candidates(lines, hunk) for hunk in hunks]
    earliest: list[int] = []
    position = 0
    for hunk, places in zip(hunks, candidates, strict=True):
        fitting = [place for place in places if place >= position]
        if not fitting:
            raise Failed(_misfit(lines, hunk, places, path))
        place = fitting[0] if hunk.near is None else _nearest(fitting, hunk.near - 1)
        earliest.append(place)
        position = place + len(hunk.old)
    limit = len(lines) + 1
    for hunk, places, early in zip(reversed(hunks), reversed(candidates), reversed(earliest), strict=True):
        late = early if hunk.near is not None else max(p for p in places if p == early or p + len(hunk.old) <= limit)
        if late != early:
            raise Failed(
                f"{path}: hunk {hunk.number} fits in more than one place (lines {early + 1} and {late + 1}); "
                "add lines around it, or the line before it as '@@ line @@'; nothing was changed"
            )
        limit = early
    return earliest


def _nearest(places: list[int], wanted: int) -> int:
    return min(places, key=lambda place: abs(place - wanted))


def _candidates(lines: list[str], hunk: Hunk) -> list[int]:
    """Return all positions where a hunk matches: exactly, else ignoring white space at line ends."""
    old = [_bare(text) for text in hunk.old]
    if not old and not hunk.after:
        # Only new lines: at the given line, else at the end.
        return [min(hunk.near, len(lines))] if hunk.near is not None else [len(lines)]
    for compared in (str, str.rstrip):
        places = [
            start
            for start in range(len(lines) - len(old) + 1)
            if all(compared(lines[start + index]) == compared(text) for index, text in enumerate(old))
            and (not hunk.at_end or start + len(old) == len(lines))
        ]
        if places and hunk.after:
            found = {_first_from(places, anchor, old=bool(old)) for anchor in _anchors(lines, hunk.after)}
            places = sorted(place for place in found if place is not None)
        if places:
            return places
    return []


def _first_from(places: list[int], anchor: int, *, old: bool) -> int | None:
    """Return the first position at the anchor line (which the hunk may repeat) or below; new lines go below it."""
    return next((place for place in places if place >= anchor + (not old)), None)


def _anchors(lines: list[str], after: Sequence[str]) -> list[int]:
    """Return the lines that match the last of the texts after `@@`, each found below the previous one."""
    for same in _LIKENESS:
        starts = [index for index, line in enumerate(lines) if same(line, after[0])]
        for text in after[1:]:
            below = (next((i for i in range(start + 1, len(lines)) if same(lines[i], text)), None) for start in starts)
            starts = sorted({index for index in below if index is not None})
        if starts:
            return starts
    return []


# How a line may match the text after `@@`: exactly, but for indentation, or with more around it.
_LIKENESS: Final[tuple[Callable[[str, str], bool], ...]] = (
    lambda line, text: line == text,
    lambda line, text: line.strip() == text.strip(),
    lambda line, text: text.strip() in line,
)


def _bare(text: str) -> str:
    return text.removesuffix("\r")


def _misfit(lines: list[str], hunk: Hunk, places: list[int], path: str) -> str:
    prefix = f"{path}: hunk {hunk.number} failed: "
    if places:
        return (
            f"{prefix}it fits only before or across an earlier hunk; hunks go from top to bottom; nothing was changed"
        )
    if hunk.after and not _anchors(lines, hunk.after):
        return f"{prefix}there is no line {hunk.after[-1]!r} to find it by; nothing was changed"
    where = f" around expected line {hunk.near}" if hunk.near else ""
    first = next(iter(hunk.old), "")
    return f"{prefix}context did not match{where} (first line: {first!r}); read the file again; nothing was changed"
