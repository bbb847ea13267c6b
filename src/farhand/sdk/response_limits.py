"""Responses within the size limits: a truncated result, or a truncated error message."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw

from farhand.protocol.calls import ToolFailure
from farhand.protocol.messages import ToolResponse, encode
from farhand.protocol.version import MAX_FRAME_BYTES, MAX_TOOL_RESPONSE_BYTES


class ResponseLimits(msgspec.Struct, frozen=True):
    """How long a response may be."""

    result: int
    frame: int = MAX_FRAME_BYTES

    @classmethod
    def towards(cls, announced: int | None, own: int) -> ResponseLimits:
        """Return the smaller of a node's own limit and its gateway's; the guide's if it announced none."""
        if announced is None:
            return cls(min(own, MAX_TOOL_RESPONSE_BYTES))
        return cls(min(own, announced), announced)


def encode_within(response: ToolResponse, room: ResponseLimits) -> bytes:
    """Encode a response: whole if it fits, else truncated and marked as such."""
    frame = encode(response)
    limit = min(room.result, room.frame)
    excess = len(frame) - limit
    if excess <= 0:
        return frame
    if response.error:
        return encode(_shortened(response.request_id, response.error, excess))
    result = b"null" if response.result is UNSET else bytes(response.result)
    if len(result) <= room.result and len(frame) <= room.frame:
        return frame
    return encode(_truncated(response.request_id, result, limit))


def _truncated(request_id: str, result: bytes, limit: int) -> ToolResponse:
    head = b'{"_truncated":true,"_original_bytes":%d,"partial":"' % len(result)
    frame = len(encode(ToolResponse(request_id, True, result=Raw(head + b'"}'))))
    return ToolResponse(request_id, True, result=Raw(head + _beginning(result.decode(), limit - frame) + b'"}'))


def _shortened(request_id: str, error: ToolFailure, excess: int) -> ToolResponse:
    room = len(msgspec.json.encode(error.message)) - 2 - excess
    message = msgspec.json.decode(b'"%b"' % _beginning(error.message, room), type=str)
    return ToolResponse(request_id, False, error=ToolFailure(error.kind, message))


def _beginning(text: str, room: int) -> bytes:
    """Return as much of `text` as fits into `room` bytes, escaped for a JSON string."""
    escaped = msgspec.json.encode(text)[1:-1]
    for end in range(min(room, len(escaped)), 0, -1):
        try:
            msgspec.json.decode(b'"%b"' % escaped[:end], type=str)
        except (msgspec.MsgspecError, UnicodeError):
            continue  # the cut went through a character or an escape
        return escaped[:end]
    return b""
