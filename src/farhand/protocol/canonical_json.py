"""Canonical form of JSON texts, for comparing them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgspec

# Longer texts are compared byte for byte, to bound the time this takes.
MAX_CANONICAL_BYTES = 256 * 1024


def canonical(raw: bytes | msgspec.Raw) -> bytes:
    """Return one text for all JSON texts that differ only in whitespace, key order or character escapes.

    Numbers keep their spelling. A text with a repeated key, invalid JSON, and anything longer than
    `MAX_CANONICAL_BYTES` is returned unchanged.
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
        raise ValueError("repeated key")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_read = json.JSONDecoder(
    parse_int=_number, parse_float=_number, parse_constant=_constant, object_pairs_hook=_object
).decode
_encode = msgspec.json.Encoder(order="deterministic").encode
