"""Limits of JSON: what a plain peer can parse, and how many values are decoded at all.

The parser of a plain peer supports 127 levels of nesting and holds numbers as doubles. It drops other messages
silently.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import msgspec

# Of a value inside a message, which is one level itself.
MAX_DEPTH: Final = 126

# In one request body, or in the arguments of one call.
MAX_VALUES: Final = 100_000

_SEPARATORS: Final = b",[{"
_PIECE: Final = 256 * 1024
_LONG_NUMBER: Final = re.compile(rb"\d{200}|[eE]\+?\d{3}")


def plain_peer_error(raw: bytes | msgspec.Raw) -> str | None:
    """Return why a plain peer cannot parse a value, or None if it can."""
    text = bytes(raw)
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and not _LONG_NUMBER.search(text):
        return None  # the common case, without decoding
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


def check_value_count(raw: bytes | msgspec.Raw, most: int = MAX_VALUES) -> None:
    """Raise msgspec.DecodeError for JSON with more than `most` values.

    Decoding millions of small values takes seconds and gigabytes; one string of the same length takes neither. Values
    are counted by their separators outside of strings. Counting takes linear time and holds the interpreter lock for a
    few milliseconds at a time, so that a thread can count in a frame of any length.
    """
    data = memoryview(raw)
    if len(data) <= most:  # each value takes at least a byte
        return
    if sum(_count(bytes(data[at : at + _PIECE]), _SEPARATORS) for at in range(0, len(data), _PIECE)) <= most:
        return
    found, in_text, carried = 0, False, b""
    for at in range(0, len(data), _PIECE):
        piece = carried + bytes(data[at : at + _PIECE])
        carried = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape ends in the next piece
                piece, carried = piece[:-1], piece[-1:]
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = piece.split(b'"')
        found += _count(b"".join(parts[in_text::2]), _SEPARATORS)
        in_text ^= len(parts) % 2 == 0
        if found > most:
            raise msgspec.DecodeError(f"it has more than {most} values")


def decode_bounded(raw: bytes | msgspec.Raw) -> Any:
    """Decode JSON from an untrusted peer. Raises msgspec.DecodeError, also for too many values or levels."""
    check_value_count(raw)
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def _count(text: bytes, characters: bytes) -> int:
    """Count these characters. Ten times as fast as `bytes.count` where there are many."""
    return len(text) - len(text.translate(None, characters))
