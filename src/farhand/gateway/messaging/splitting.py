"""Cutting a long text into messages, at the best place there is, with code blocks kept whole on each side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_FENCE: Final = re.compile(r"^ {0,3}(`{3,}|~{3,})(.*)$", re.MULTILINE)
_BREAKS: Final = ("\n\n", "\n", " ")
# A break before this much of a message is filled is not worth it.
_EARLIEST: Final = 0.5


def units(text: str) -> int:
    """Length as services count it: characters beyond the first 65,536 are two."""
    return len(text) + sum(character > "\uffff" for character in text)


def split(text: str, longest: int, measure: Callable[[str], int] = units) -> tuple[str, ...]:
    """The text in pieces of at most `longest`. Put together, they say the same; nothing but blanks is left out."""
    text = text.strip("\n")
    pieces: list[str] = []
    opening = ""
    while measure(opening + text) > longest:
        head = _cut(text, longest - measure(opening) - 8, measure)  # room for the end of a code block
        piece = opening + head
        text = text[len(head) :]
        opening = _open_fence(piece)
        if opening:
            fence = opening.strip()
            closing = re.match(r"`+|~+", fence)
            piece = piece.rstrip("\n") + "\n" + (closing.group() if closing else "```")
            text = text.removeprefix("\n")
            opening = f"{fence}\n"
            if measure(opening) > longest // 4:  # whoever opens a block with a novel gets plain text
                opening = ""
        else:
            text = text.lstrip("\n ")
        pieces.append(piece.rstrip())
    if text.strip() or not pieces:
        pieces.append(opening + text)
    return tuple(piece for piece in pieces if piece.strip()) or ("",)


def _cut(text: str, room: int, measure: Callable[[str], int]) -> str:
    """As much of the beginning as fits, up to a good place to stop."""
    end = max(1, min(len(text), room))
    while end > 1 and measure(text[:end]) > room:
        end -= max(1, (measure(text[:end]) - room) // 2)
    for separator in _BREAKS:
        place = text.rfind(separator, 0, end + 1)
        if place >= end * _EARLIEST:
            return text[: max(1, place)]
    return text[:end]


def _open_fence(piece: str) -> str:
    """The line that opened a code block which the piece does not close."""
    opened = ""
    for match in _FENCE.finditer(piece):
        mark = match.group(1)
        if not opened:
            opened = match.group(0)
        elif mark[0] == opened.strip()[0] and not match.group(2).strip():
            opened = ""
    return opened
