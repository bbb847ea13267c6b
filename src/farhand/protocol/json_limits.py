"""What a plain peer can read of JSON. Its parser goes 127 levels deep and holds numbers as doubles; a message with more
in it is dropped without an answer."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import msgspec

# Of a value inside of a message, which is one level itself.
MAX_DEPTH: Final = 126

# In one body or in the arguments of one call.
MAX_VALUES: Final = 100_000

_SEPARATORS: Final = b",[{"
_LONG_NUMBER: Final = re.compile(rb"\d{200}|[eE]\+?\d{3}")


def plain_peer_error(raw: bytes | msgspec.Raw) -> str | None:
    """Why a plain peer cannot read a value; None: it can."""
    text = bytes(raw)
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and not _LONG_NUMBER.search(text):
        return None  # nearly every one, and then it need not be taken apart
    try:
        level: list[Any] = [msgspec.json.decode(text)]
    except msgspec.MsgspecError:
        return "a number in it is out of range"
    except RecursionError:
        return f"it is nested deeper than {MAX_DEPTH} levels"
    depth = 0
    while level:
        if any(type(value) is int and abs(value) > sys.float_info.max for value in level):
            return "a number in it is out of range"
        holding = [value for value in level if isinstance(value, dict | list)]
        depth += bool(holding)
        if depth > MAX_DEPTH:
            return f"it is nested deeper than {MAX_DEPTH} levels"
        level = [inner for value in holding for inner in (value.values() if isinstance(value, dict) else value)]
    return None


def check_value_count(raw: bytes | msgspec.Raw) -> None:
    """Raises msgspec.DecodeError for JSON that holds more values than it is read for.

    Millions of small values take seconds and gigabytes to decode, where one text of the same length takes neither. They
    are counted by their separators, outside of texts.
    """
    text = bytes(raw)
    if _count(text, _SEPARATORS) <= MAX_VALUES:
        return
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if _count(text, b'"') <= 4 * MAX_VALUES and _count(b"".join(text.split(b'"')[::2]), _SEPARATORS) <= MAX_VALUES:
        return
    raise msgspec.DecodeError(f"it holds more than {MAX_VALUES} values")


def _count(text: bytes, characters: bytes) -> int:
    """How many of these there are: `count` takes ten times as long where they are many."""
    return len(text) - len(text.translate(None, characters))
