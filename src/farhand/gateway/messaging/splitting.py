"""Split a long text into messages at natural boundaries, keeping code blocks well-formed in each part."""

from __future__ import annotations

import re
from typing import Final

_FENCE: Final = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$", re.MULTILINE)
_BREAKS: Final = ("\n\n", "\n", " ")
# Do not break a message before it is filled to this fraction.
_EARLIEST: Final = 0.5


def units(text: str) -> int:
    """Return the length in UTF-16 code units, as services count it."""
    return len(text) + sum(character > "\uffff" for character in text)


def split(text: str, longest: int) -> tuple[str, ...]:
    """Split the text into pieces of at most `longest`. Only whitespace at the boundaries is dropped."""
    text = text.strip("\n")
    pieces: list[str] = []
    opening = ""
    while units(opening + text) > longest:
        head = _cut(text, longest - units(opening) - 8)  # room for the closing fence
        piece = opening + head
        text = text[len(head) :]
        opening = _open_fence(piece)
        if opening:
            fence = opening.strip()
            closing = re.match(r"`+|~+", fence)
            piece = piece.rstrip("\n") + "\n" + (closing.group() if closing else "```")
            text = text.removeprefix("\n")
            opening = f"{fence}\n"
            if units(opening) > longest // 4:  # a very long opening line is not repeated
                opening = ""
        else:
            text = text.lstrip("\n ")
        pieces.append(piece.rstrip())
    if text.strip() or not pieces:
        pieces.append(opening + text)
    return tuple(piece for piece in pieces if piece.strip()) or ("",)


def _cut(text: str, room: int) -> str:
    """Return the longest beginning that fits and ends at a good boundary."""
    end = max(1, min(len(text), room))
    while end > 1 and units(text[:end]) > room:
        end -= max(1, (units(text[:end]) - room) // 2)
    for separator in _BREAKS:
        place = text.rfind(separator, 0, end + 1)
        if place >= end * _EARLIEST:
            return text[: max(1, place)]
    return text[:end]


def _open_fence(piece: str) -> str:
    """Return the line that opened a code block which the piece does not close."""
    opened = ""
    for match in _FENCE.finditer(piece):
        mark = match.group(1)
        if not opened:
            opened = match.group(0)
        elif mark[0] == opened.strip()[0] and not match.group(2).strip():
            opened = ""
    return opened
