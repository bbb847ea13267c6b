"""How a tool call ended, as the model is told it."""

from __future__ import annotations

from typing import Any

import msgspec

from farhand.llm.messages import Block, Content, FinishReason, Image, Message, Text, ToolUse
from farhand.protocol.calls import NULL, ToolResult
from farhand.protocol.errors import ToolError
from farhand.protocol.json_limits import decode_bounded


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the model reads, and beside it the whole result for readers that want more than text."""

    content: Content
    is_error: bool = False
    # Of a failure: one of the six kinds of `protocol/errors.py`.
    kind: str | None = None
    # The result itself, in JSON; `null` where the tool gave none.
    result: msgspec.Raw = NULL

    @classmethod
    def failed(cls, kind: str, message: str) -> Outcome:
        return cls(message, is_error=True, kind=kind)

    @classmethod
    def of_error(cls, error: ToolError) -> Outcome:
        return cls.failed(error.kind.value, error.message)

    @classmethod
    def of_result(cls, result: ToolResult) -> Outcome:
        """The outcome of a call through the gate.

        Text (`{"content": "…"}` and nothing else) is shown as it is, content blocks become text and images, anything
        else is compact JSON.
        """
        if not result.ok:
            assert result.error is not None
            return cls.failed(result.error.kind, result.error.message)
        return cls(_shown(result.result), result=result.result)

    def message(self, use: ToolUse) -> Message:
        """The transcript's entry for this outcome of `use`."""
        return Message("tool", self.content, tool_call_id=use.id, name=use.name, is_error=self.is_error)


def shortened(text: str, longest: int) -> str:
    """The text, or its head and tail with a line between them that says what is missing."""
    if len(text) <= longest:
        return text
    head = longest * 7 // 9
    tail = longest - head
    missing = len(text) - head - tail
    return f"{text[:head]}\n...[{missing} characters left out: too long for the model's context]...\n{text[-tail:]}"


def argument_fault(use: ToolUse, finish_reason: FinishReason) -> str | None:
    """What is wrong with the arguments of a call, where they are no JSON object."""
    try:
        arguments: Any = msgspec.json.decode(use.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        cut = "; the reply was cut at its token limit" if finish_reason == "length" else ""
        return f"the arguments of {use.name} are not valid JSON ({error}){cut}. It did not run: send one JSON object."
    if not isinstance(arguments, dict):
        return f"the arguments of {use.name} must be a JSON object, not {use.arguments[:40]!r}. It did not run."
    return None


def cancelled(*, began: bool, ended: bool) -> Outcome:
    """The outcome of a call that a stop of the run ended."""
    if not began:
        return Outcome.failed("cancelled", "Cancelled: the run was stopped before this call began; it did not run.")
    if ended:
        return Outcome.failed("cancelled", "Cancelled: the run was stopped; what this call had done so far stays done.")
    return Outcome.failed("cancelled", "Cancelled: the run was stopped; this call has not confirmed its end.")


def _shown(result: msgspec.Raw) -> Content:
    data = bytes(result)
    if b'"content"' not in data:
        return data.decode()
    try:
        value = decode_bounded(data)
    except msgspec.DecodeError:
        return data.decode()
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
            return Image(f"data:{mime_type};base64,{data}")
    return None
