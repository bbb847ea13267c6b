"""Text from nodes, people and programs, reduced to one bounded printable line before it is shown."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

import msgspec

# Blank in most fonts, although a letter or a mark by category.
_BLANK: Final = re.compile("[\u115f\u1160\u3164\uffa0\u034f\u17b4\u17b5\u2800]")
_BREAKS: Final = frozenset({"Zl", "Zp", "Zs"})

DEEPEST: Final = 6
MOST_ITEMS: Final = 500
LONGEST_VALUE: Final = 1024


def one_line(text: str, longest: int) -> str:
    """Return a text as one printable line of at most `longest` characters.

    Removes control and format characters (bidirectional overrides, zero-width characters), surrogates, private and
    unassigned code points.
    """
    text = text[: 8 * longest]
    if not text.isprintable():
        text = "".join(map(_shown, text))
    if not text.isascii():
        text = _BLANK.sub("", text)
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def quoted(text: str) -> str:
    """Return a text in quotation marks that nothing in it can end."""
    return msgspec.json.encode(text).decode()


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\t\r\n" or unicodedata.category(character) in _BREAKS else ""


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with every string reduced to one line; values too deep or too many are dropped."""
    match value:
        case str():
            return one_line(value, LONGEST_VALUE)
        case dict() if depth < DEEPEST:
            items = list(value.items())[:MOST_ITEMS]
            return {one_line(str(name), 128): plain_value(item, depth + 1) for name, item in items}
        case list() if depth < DEEPEST:
            return [plain_value(item, depth + 1) for item in value[:MOST_ITEMS]]
        case bool() | int() | float() | None:
            return value
    return None
