"""Split a Markdown file into chunks that can be found and cited by line."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

# Characters after which a chunk gets no further block: a chunk on one subject is found better.
ENOUGH = 400
# Maximum characters of a chunk; about what a small embedding model reads.
MOST = 1200

_HEADING = re.compile(r"(#{1,6})\s+")
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])\s")
_FENCE = re.compile(r"\s{0,3}(```|~~~)")


class MemoryChunk(msgspec.Struct, frozen=True):
    """Whole lines of a file (or a part of a very long line), numbered from 1."""

    start_line: int
    end_line: int
    text: str
    # The headings above it, outermost first; they say what a short note is about.
    headings: str = ""


def chunks(text: str) -> list[MemoryChunk]:
    """Split a text into chunks; every non-blank line is in exactly one of them, in order."""
    found: list[MemoryChunk] = []
    gathered: list[tuple[int, str]] = []
    trail: list[tuple[int, str]] = []
    above = ""

    def finish() -> None:
        while gathered and not gathered[-1][1].strip():
            gathered.pop()
        if gathered:
            found.extend(_fitting(gathered, above))
            gathered.clear()

    size = 0
    for block in _blocks(lines_of(text)):
        heading = _HEADING.match(block[0][1])
        length = sum(len(line) + 1 for _, line in block)
        if heading or size + length > ENOUGH:
            finish()
            size = 0
        if heading:
            level = len(heading[1])
            trail = [(depth, title) for depth, title in trail if depth < level]
            above = " > ".join(title for _, title in trail)
            # Not by regular expression: matching the end of the title would backtrack at every blank.
            title = block[0][1][heading.end() :].rstrip().rstrip("#").rstrip()
            trail.append((level, title))
        elif not gathered:
            above = " > ".join(title for _, title in trail)
        gathered.extend(block)
        size += length
    finish()
    return found


def lines_of(text: str) -> list[str]:
    """Return the lines as an editor counts them: separated by `\\n` or `\\r\\n` only."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _blocks(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield paragraphs, top-level list items and fenced code, each with the blank lines after it.

    A heading belongs to the block that follows it.
    """
    block: list[tuple[int, str]] = []
    fence = ""
    blank = False
    bare = False  # the block is only a heading so far
    for number, line in enumerate(lines, 1):
        filled = bool(line.strip())
        heading = not fence and bool(_HEADING.match(line))
        starts = heading or (not bare and (blank or bool(_ITEM.match(line))))
        if block and filled and not fence and starts:
            yield block
            block = []
        if filled:
            bare = heading
        if filled or block:
            block.append((number, line))
        blank = not filled
        mark = _FENCE.match(line)
        if mark:
            fence = "" if fence == mark[1] else fence or mark[1]
    if block:
        yield block


def _fitting(lines: list[tuple[int, str]], headings: str) -> Iterator[MemoryChunk]:
    """Yield one chunk, or several if a block is longer than a chunk may be."""
    part: list[tuple[int, str]] = []
    size = 0
    for number, line in lines:
        if part and size + len(line) + 1 > MOST:
            yield _chunk(part, headings)
            part, size = [], 0
        if len(line) > MOST:
            for start in range(0, len(line), MOST):
                yield MemoryChunk(number, number, line[start : start + MOST], headings)
            continue
        if part or line.strip():
            part.append((number, line))
            size += len(line) + 1
    if part:
        yield _chunk(part, headings)


def _chunk(part: list[tuple[int, str]], headings: str) -> MemoryChunk:
    while not part[-1][1].strip():
        part.pop()
    return MemoryChunk(part[0][0], part[-1][0], "\n".join(line for _, line in part), headings)
