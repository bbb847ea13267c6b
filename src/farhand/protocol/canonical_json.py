"""Whether two JSON texts say the same."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

# Longer texts are compared byte for byte: what somebody waits for is not held up by them.
MAX_CANONICAL_BYTES = 256 * 1024


def canonical(raw: bytes | msgspec.Raw) -> bytes:
    """One text for all that differ in blanks, in the order of names or in how characters are escaped.

    Nothing is lost: numbers stay as they are written. What could have two meanings (a name that comes twice), is no
    JSON or is longer than `MAX_CANONICAL_BYTES` is returned as it came.
    """
    text = bytes(raw)
    if len(text) > MAX_CANONICAL_BYTES:
        return text
    try:
        return _encode(_read(text.decode()))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name comes twice")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_read = json.JSONDecoder(
    parse_int=_number, parse_float=_number, parse_constant=_constant, object_pairs_hook=_object
).decode
_encode = msgspec.json.Encoder(order="deterministic").encode
