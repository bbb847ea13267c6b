"""Parameter descriptions in docstrings: the `Args:` of Google's style and the `Parameters` of NumPy's."""

from __future__ import annotations

import inspect
import re
from typing import Final

_GOOGLE: Final = re.compile(r"(Args|Arguments|Parameters|Params):\s*$")
_NUMPY: Final = re.compile(r"(Other )?Parameters\s*$")
_UNDERLINE: Final = re.compile(r"-{3,}\s*$")
_HEADING: Final = re.compile(r"[A-Z][A-Za-z ]*:\s*$")
# `name: text`, `name (type): text`; several stars for *args.
_GOOGLE_ITEM: Final = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
# `name`, `name : type`, `a, b : type`.
_NUMPY_ITEM: Final = re.compile(r"((?:\*{0,2}\w+)(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the docstring without its section about parameters, and the text about each of them."""
    lines = inspect.cleandoc(text).splitlines()
    for start, line in enumerate(lines):
        if _GOOGLE.match(line):
            end = _end_of_indented(lines, start + 1)
            found = _google(lines[start + 1 : end])
        elif _NUMPY.match(line) and start + 1 < len(lines) and _UNDERLINE.match(lines[start + 1]):
            end = _end_of_numpy(lines, start + 2)
            found = _items(lines[start + 2 : end], 0, _NUMPY_ITEM)
        else:
            continue
        if found:
            rest = [*lines[:start], *lines[end:]]
            return re.sub(r"\n{3,}", "\n\n", "\n".join(rest)).strip(), found
    return "\n".join(lines).strip(), {}


def _end_of_indented(lines: list[str], start: int) -> int:
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end][:1].isspace()):
        end += 1
    return end


def _end_of_numpy(lines: list[str], start: int) -> int:
    """Return where the next underlined heading begins."""
    for end in range(start, len(lines)):
        if end + 1 < len(lines) and lines[end].strip() and _UNDERLINE.match(lines[end + 1]):
            return end
        if _HEADING.match(lines[end]):
            return end
    return len(lines)


def _google(lines: list[str]) -> dict[str, str]:
    widths = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    indent = min(widths, default=0)
    return _items(lines, indent, _GOOGLE_ITEM)


def _items(lines: list[str], indent: int, item: re.Pattern[str]) -> dict[str, str]:
    """Return the text of each item; deeper lines continue it."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        match = item.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if match is None:
            current.append(line.strip())
            continue
        current = [match[2]] if item is _GOOGLE_ITEM else []
        for name in match[1].split(","):
            found[name.strip().lstrip("*")] = current
    return {name: text for name, words in found.items() if (text := " ".join(words).strip())}
