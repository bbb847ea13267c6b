"""Convert messages and tools to the format of the OpenAI chat API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from farhand.llm.messages import Block, Content, Image, Message, Text
from farhand.llm.tool_names import ToolNames, normal_schema
from farhand.protocol.calls import ToolSpec


def names_of(messages: Iterable[Message], tools: Iterable[ToolSpec]) -> ToolNames:
    """Return the tool names that a request needs: those of its tools and of its past calls."""
    used = (use.name for message in messages for use in message.tool_calls)
    return ToolNames([*(tool.name for tool in tools), *used])


def tool_to_wire(tool: ToolSpec, names: ToolNames) -> dict[str, Any]:
    function = {
        "name": names.sent(tool.name),
        "description": tool.description,
        "parameters": normal_schema(tool.parameters),
    }
    return {"type": "function", "function": function}


def messages_to_wire(
    messages: Sequence[Message], names: ToolNames, *, images: bool = True, thinking: bool = False
) -> list[dict[str, Any]]:
    """Convert a conversation to the API's format.

    A tool message holds only text there, so the images of a round's results follow in a user message. With `images`
    false, each image is replaced by a line of text.
    """
    sent: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    for message in messages:
        if pictures and message.role != "tool":
            sent.append({"role": "user", "content": pictures})
            pictures = []
        match message.role:
            case "assistant":
                if message.text or message.tool_calls:
                    sent.append(_assistant(message, names, thinking=thinking))
            case "tool":
                text = message.text
                if message.images and not images:
                    text = "\n".join([text, *(_in_words(image) for image in message.images)])
                sent.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": text})
                if message.images and images:
                    source = f"Shown by the call {message.tool_call_id} of {message.name}:"
                    pictures.append({"type": "text", "text": source})
                    pictures += [_part(image, images=True) for image in message.images]
            case _:
                entry: dict[str, Any] = {"role": message.role, "content": _content(message.content, images=images)}
                if message.name:
                    entry["name"] = message.name
                sent.append(entry)
    if pictures:
        sent.append({"role": "user", "content": pictures})
    return sent


def _object_text(arguments: str) -> str:
    """Return arguments as valid JSON: several providers reject a whole conversation over one call without it."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return msgspec.json.encode({"not_a_json_object": arguments}).decode()


def _assistant(message: Message, names: ToolNames, *, thinking: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": "assistant", "content": message.text or None}
    if thinking and message.thinking:
        entry["reasoning_content"] = message.thinking
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": names.sent(use.name), "arguments": _object_text(use.arguments)},
            }
            for use in message.tool_calls
        ]
    return entry


def _content(content: Content, *, images: bool) -> Any:
    if isinstance(content, str):
        return content
    return [_part(block, images=images) for block in content]


def _part(block: Block, *, images: bool) -> dict[str, Any]:
    if isinstance(block, Text):
        return {"type": "text", "text": block.text}
    if not images:
        return {"type": "text", "text": _in_words(block)}
    url: dict[str, Any] = {"url": block.url}
    if block.detail:
        url["detail"] = block.detail
    return {"type": "image_url", "image_url": url}


def _in_words(image: Image) -> str:
    kind = image.url.removeprefix("data:").partition(";")[0] if image.url.startswith("data:") else image.url
    return f"[an image ({kind}) that this model cannot see]"
