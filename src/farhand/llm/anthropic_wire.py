"""Convert messages and tools to the format of Anthropic's Messages API.

The prompt is cached up to four marks: the tools, the system prompt, and the last two turns of the user, so that each
request of a run reads what the one before it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from farhand.llm.messages import Block, Content, Image, Message, Text, ToolUse
from farhand.llm.tool_names import ToolNames, normal_schema
from farhand.protocol.calls import ToolSpec

CACHED: Final = {"cache_control": {"type": "ephemeral"}}
# The API requires that the user begins.
BEGINNING: Final = "(the beginning of the conversation is not shown)"
CACHED_TURNS: Final = 2
_NOT_IN_IDS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_DATA_URL: Final = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


def system_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    texts = [message.text for message in messages if message.role == "system" and message.text.strip()]
    return [{"type": "text", "text": "\n\n".join(texts), **CACHED}] if texts else []


def tools_to_wire(tools: Sequence[ToolSpec], names: ToolNames) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = [
        {
            "name": names.sent(tool.name),
            "description": tool.description,
            "input_schema": {"type": "object", **normal_schema(tool.parameters)},
        }
        for tool in tools
    ]
    sent[-1].update(CACHED)
    return sent


def tool_choice_to_wire(parameters: Mapping[str, Any], names: ToolNames) -> dict[str, Any] | None:
    """Return the choice of a request in the format of the OpenAI API, in this one's."""
    choice: dict[str, Any] = {}
    match parameters.get("tool_choice"):
        case "required":
            choice = {"type": "any"}
        case "none":
            choice = {"type": "none"}
        case {"function": {"name": str(name)}}:
            choice = {"type": "tool", "name": names.sent(name)}
    if parameters.get("parallel_tool_calls") is False and choice.get("type") != "none":
        choice = {"type": "auto", **choice, "disable_parallel_tool_use": True}
    return choice or None


def messages_to_wire(
    messages: Sequence[Message], names: ToolNames, *, images: bool, thinking: bool = False
) -> list[dict[str, Any]]:
    """Convert a conversation: turns alternate, and the results of a round begin the user's next turn.

    With `thinking`, signed thinking since the last message of the user is sent back.
    """
    turns: list[dict[str, Any]] = []
    asked = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    for place, message in enumerate(messages):
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        thoughts = _thoughts(message) if thinking and place > asked else []
        blocks = thoughts + _assistant(message, names) if role == "assistant" else _user(message, images=images)
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    if not turns or turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": [{"type": "text", "text": BEGINNING}]})
    for turn in [turn for turn in turns if turn["role"] == "user"][-CACHED_TURNS:]:
        turn["content"][-1] = {**turn["content"][-1], **CACHED}
    return turns


def _user(message: Message, *, images: bool) -> list[dict[str, Any]]:
    blocks = _content(message.content, images=images)
    if message.role != "tool":
        return blocks
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": _id(message.tool_call_id or ""), "content": blocks}
    return [{**result, "is_error": True} if message.is_error else result]


def _assistant(message: Message, names: ToolNames) -> list[dict[str, Any]]:
    text = message.text.rstrip()  # the API refuses a last turn that ends with white space
    said: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    return said + [
        {"type": "tool_use", "id": _id(use.id), "name": names.sent(use.name), "input": _input(use)}
        for use in message.tool_calls
    ]


def _thoughts(message: Message) -> list[dict[str, Any]]:
    return [
        {"type": "redacted_thinking", "data": block.data}
        if block.data
        else {"type": "thinking", "thinking": block.text, "signature": block.signature}
        for block in message.signed_thinking
    ]


def _content(content: Content, *, images: bool) -> list[dict[str, Any]]:
    blocks: tuple[Block, ...] = (Text(content),) if isinstance(content, str) else content
    sent = [_image(block, images=images) if isinstance(block, Image) else _text(block.text) for block in blocks]
    return [block for block in sent if block is not None]


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "text", "text": text} if text.strip() else None  # blank text is refused


def _image(image: Image, *, images: bool) -> dict[str, Any]:
    found = _DATA_URL.match(image.url)
    if not images:
        kind = found[1] if found else image.url
        return {"type": "text", "text": f"[an image ({kind}) that this model cannot see]"}
    if found is None:
        return {"type": "image", "source": {"type": "url", "url": image.url}}
    return {"type": "image", "source": {"type": "base64", "media_type": found[1], "data": image.url[found.end() :]}}


def _input(use: ToolUse) -> dict[str, Any]:
    """Return the arguments of a call as an object, which the API requires."""
    try:
        found = msgspec.json.decode(use.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"not_a_json_object": use.arguments}


def _id(identity: str) -> str:
    """Return the id of a call in the characters that the API takes; other models may have made it."""
    return _NOT_IN_IDS.sub("_", identity) or "_"
