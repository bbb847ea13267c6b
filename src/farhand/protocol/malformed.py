"""Frames that cannot be decoded: which call, if any, they were meant to answer."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from farhand.protocol.messages import ToolResponse

# Peers write the id among the first fields. Looking no further bounds the work for a frame of any size.
LOOKED_AT_BYTES = 64 * 1024
_REQUEST_ID = re.compile(rb'"request_id"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"([\x20\x21\x23-\x5b\x5d-\x7e]{1,128})"')
_RESPONSE = ToolResponse.__struct_config__.tag


class _Head(msgspec.Struct):
    type: Any = None


_head_decoder = msgspec.json.Decoder(_Head)


def may_be_response(frame: bytes) -> bool:
    """Return whether a frame that cannot be decoded may have been meant as a `tool_response`.

    False only for an object whose type says otherwise: messages of other types are ignored, known or not.
    """
    try:
        kind = _head_decoder.decode(frame).type
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return True
    return not isinstance(kind, str) or kind == _RESPONSE


def readable_request_id(frame: bytes) -> str | None:
    """Return the first request id in a frame that cannot be decoded."""
    found = _REQUEST_ID.search(frame[:LOOKED_AT_BYTES])
    return None if found is None else found[1].decode("ascii")
