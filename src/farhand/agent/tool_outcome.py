"""The outcome of a tool call as shown to the model."""

from __future__ import annotations

import base64
import re
from typing import Any, Final

import msgspec

from farhand.llm.messages import Block, Content, FinishReason, Image, Message, Text, ToolUse
from farhand.protocol.calls import NULL, ToolResult
from farhand.protocol.errors import ToolError
from farhand.protocol.json_limits import decode_bounded
from farhand.protocol.untrusted import one_line
from farhand.tools.model_view import without_repeats

# The images that models accept, with the bytes that they begin with.
IMAGES: Final = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
# What `Read` of a node returns at most, in base64.
MAX_IMAGE_CHARS: Final = 10 * 1024 * 1024 * 4 // 3 + 4
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_REPEATS: Final = re.compile(rb'"(tail|sessions)"')


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content for the model, and the whole result for other readers."""

    content: Content
    is_error: bool = False
    # Kind of a failure: one of the six in `protocol/errors.py`.
    kind: str | None = None
    # The result as JSON; `null` if the tool returned none.
    result: msgspec.Raw = NULL

    @classmethod
    def failed(cls, kind: str, message: str) -> Outcome:
        return cls(message, is_error=True, kind=kind)

    @classmethod
    def of_error(cls, error: ToolError) -> Outcome:
        return cls.failed(error.kind.value, error.message)

    @classmethod
    def of_result(cls, result: ToolResult) -> Outcome:
        """Return the outcome of a call through the gate.

        Text (`{"content": "…"}` and nothing else) is shown unchanged, content blocks become text and images, anything
        else is compact JSON.
        """
        if not result.ok:
            assert result.error is not None
            return cls.failed(result.error.kind, result.error.message)
        return cls(_shown(result.result), result=result.result)

    def message(self, use: ToolUse) -> Message:
        """Return the transcript entry for this outcome of `use`."""
        return Message("tool", self.content, tool_call_id=use.id, name=use.name, is_error=self.is_error)


def shortened(text: str, longest: int) -> str:
    """Return the text, or its head and tail with a line between them about the omitted part."""
    if len(text) <= longest:
        return text
    head = longest * 7 // 9
    tail = longest - head
    missing = len(text) - head - tail
    return f"{text[:head]}\n...[{missing} characters left out: too long for the model's context]...\n{text[-tail:]}"


def argument_fault(use: ToolUse, finish_reason: FinishReason) -> str | None:
    """Return what is wrong with the arguments of a call if they are not a JSON object."""
    try:
        arguments: Any = msgspec.json.decode(use.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        cut = "; the reply was cut at its token limit" if finish_reason == "length" else ""
        return f"the arguments of {use.name} are not valid JSON ({error}){cut}. It did not run: send one JSON object."
    if not isinstance(arguments, dict):
        return f"the arguments of {use.name} must be a JSON object, not {use.arguments[:40]!r}. It did not run."
    return None


def cancelled(*, began: bool, ended: bool) -> Outcome:
    """Return the outcome of a call that ended because its run was stopped."""
    if not began:
        return Outcome.failed("cancelled", "Cancelled: the run was stopped before this call began; it did not run.")
    if ended:
        return Outcome.failed("cancelled", "Cancelled: the run was stopped; what this call had done so far stays done.")
    return Outcome.failed("cancelled", "Cancelled: the run was stopped; this call has not confirmed its end.")


def _shown(result: msgspec.Raw) -> Content:
    data = bytes(result)
    if b'"content"' not in data and not _REPEATS.search(data):
        return data.decode()
    try:
        value = decode_bounded(data)
    except msgspec.DecodeError:
        return data.decode()
    once = without_repeats(value)
    if once is not value:
        return msgspec.json.encode(once).decode()
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(content, str) and len(value) == 1:
        return content
    if isinstance(content, list) and content and all(isinstance(block, dict) for block in content):
        blocks = [_block(block) for block in content]
        if not any(block is None for block in blocks):
            return tuple(block for block in blocks if block is not None)
    return data.decode()


def _block(block: dict[str, Any]) -> Block | None:
    match block:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image", "data": str(data), "mimeType": str(mime_type)}:
            if _is_image(data, mime_type):
                return Image(f"data:{mime_type};base64,{data}")
            return Text(f"[image of type {one_line(mime_type, 50)}, {len(data) * 3 // 4} bytes, which cannot be shown]")
        case {"type": "resource", "resource": {"uri": str(uri), "text": str(text)}}:
            return Text(f"{uri}:\n{text}")
        case {"type": "resource", "resource": {"uri": str(uri), "blob": str(data)}}:
            return Text(f"[resource {uri}: {len(data) * 3 // 4} bytes that cannot be shown]")
        case {"type": "resource_link", "uri": str(uri), "name": str(name)}:
            return Text(f"[link to {name}: {uri}]")
        case {"type": "audio", "data": str(data), "mimeType": str(mime_type)}:
            return Text(f"[audio of type {mime_type}, {len(data) * 3 // 4} bytes, which cannot be shown]")
    return None


def _is_image(data: str, mime_type: str) -> bool:
    """Return whether models accept an image. It stays in the conversation, so one that they refuse would make every
    later request fail."""
    beginnings = IMAGES.get(mime_type)
    if (
        beginnings is None
        or not data
        or len(data) > MAX_IMAGE_CHARS
        or _BASE64.fullmatch(data) is None
        or len(data) % 4
    ):
        return False
    head = base64.b64decode(data[:16])
    return any(head.startswith(one) for one in beginnings)
