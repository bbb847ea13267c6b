"""Replies of Anthropic's Messages API for `ModelServer`. Their shapes are checked with the `anthropic` package."""

from __future__ import annotations

import json
from typing import Any

from tests.support.model_server import Reply, raw


def said(text: str, *, thinking: str = "", stop_reason: str = "end_turn", pieces: int = 3, **options: Any) -> Reply:
    """A reply in words."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if thinking:
        deltas = [{"type": "thinking_delta", "thinking": thinking}, {"type": "signature_delta", "signature": "c2ln"}]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
    blocks.append(({"type": "text", "text": ""}, _text_deltas(text, pieces)))
    return stream(blocks, stop_reason, **options)


def used(*uses: tuple[str, Any], say: str = "", **options: Any) -> Reply:
    """A reply that calls tools: (name, arguments as an object, or as text that is sent as it is)."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if say:
        blocks.append(({"type": "text", "text": ""}, _text_deltas(say, 1)))
    for index, (name, arguments) in enumerate(uses):
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        half = len(written) // 2
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in ("", written[:half], written[half:])]
        blocks.append(({"type": "tool_use", "id": f"toolu_{index}", "name": name, "input": {}}, deltas))
    return stream(blocks, "tool_use", **options)


def failed(status: int, kind: str, message: str, **headers: str) -> Reply:
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}).encode()
    return Reply(status=status, headers=headers, body=body)


def whole(*content: dict[str, Any], stop_reason: str = "end_turn") -> Reply:
    """A reply that is not streamed."""
    return Reply(body=json.dumps({**_message(), "content": list(content), "stop_reason": stop_reason}).encode())


def events(blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]], stop_reason: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"type": "message_start", "message": _message()}, {"type": "ping"}]
    for index, (block, deltas) in enumerate(blocks):
        found.append({"type": "content_block_start", "index": index, "content_block": block})
        found += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        found.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    found.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}})
    return [*found, {"type": "message_stop"}]


def stream(
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]], stop_reason: str, *, cut_after: int = 0, **options: Any
) -> Reply:
    """A streamed reply; `cut_after`: only that many events, and then the connection is closed."""
    lines = [
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        for event in events(blocks, stop_reason)
    ]
    if cut_after:
        return raw(*lines[:cut_after], cut=True, **options)
    return raw(*lines, **options)


def _message() -> dict[str, Any]:
    usage = {"input_tokens": 4, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 0, "output_tokens": 5}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-test",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _text_deltas(text: str, pieces: int) -> list[dict[str, Any]]:
    size = max(1, -(-len(text) // max(1, pieces)))
    return [{"type": "text_delta", "text": text[start : start + size]} for start in range(0, len(text), size)]
