"""Models behind Anthropic's Messages API, with streaming, tools, images, thinking and prompt caching."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from farhand.llm.anthropic_wire import messages_to_wire, system_of, tool_choice_to_wire, tools_to_wire
from farhand.llm.errors import ModelError
from farhand.llm.http_model import HttpModel
from farhand.llm.messages import (
    Finished,
    FinishReason,
    Message,
    SignedThinking,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolUse,
    Usage,
)
from farhand.llm.model import ModelRequest
from farhand.llm.openai_stream import error_of
from farhand.llm.tool_names import ToolNames

VERSION: Final = "2023-06-01"
# The API requires a limit.
DEFAULT_MAX_TOKENS: Final = 8192
THINKING_TOKENS: Final = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_768}
_FINISH: Final[dict[str, FinishReason]] = {
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
# The HTTP statuses of errors that arrive in a stream.
_STATUSES: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 529,
}


class AnthropicModel(HttpModel):
    PATH = "/messages"

    def _api_headers(self, api_key: str) -> dict[str, str]:
        key = {"x-api-key": api_key} if api_key else {}
        return {"anthropic-version": VERSION, **key}

    def _builder(self, names: ToolNames) -> MessageBuilder:
        return MessageBuilder(names)

    def _body(self, request: ModelRequest, names: ToolNames) -> dict[str, Any]:
        settings, given = self._settings, request.parameters
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens or settings.max_tokens or DEFAULT_MAX_TOKENS,
        }
        if system := system_of(request.messages):
            body["system"] = system
        if request.tools:
            body["tools"] = tools_to_wire(request.tools, names)
            if choice := tool_choice_to_wire(given, names):
                body["tool_choice"] = choice
        if settings.stream:
            body["stream"] = True
        temperature = given.get("temperature", settings.temperature)
        if temperature is not None:
            body["temperature"] = min(temperature, 1.0)
        if "top_p" in given and temperature is None:
            body["top_p"] = given["top_p"]
        if stop := given.get("stop"):
            body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        budget = self._thinking_tokens(request, body)
        body["messages"] = messages_to_wire(request.messages, names, images=settings.images, thinking=budget > 0)
        if budget:
            body["thinking"] = {"type": "enabled", "budget_tokens": budget}
            body["max_tokens"] = max(body["max_tokens"], budget + DEFAULT_MAX_TOKENS)
            body.pop("temperature", None)
            body.pop("top_p", None)
        return body

    def _thinking_tokens(self, request: ModelRequest, body: dict[str, Any]) -> int:
        """Return how much the model may think; 0: not at all.

        In a round of tool calls the API wants its earlier thinking back with a signature; another model made none. Nor
        does it allow thinking beside a forced call.
        """
        asked = next((message for message in reversed(request.messages) if message.role != "tool"), None)
        unsigned = asked is not None and asked.role == "assistant" and not asked.signed_thinking
        forced = body.get("tool_choice", {}).get("type") in ("any", "tool")
        return 0 if unsigned or forced else THINKING_TOKENS.get(request.thinking or "off", 0)


class MessageBuilder:
    """Turns the events of a stream, or a whole message, into deltas and finally into the reply."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._text: list[str] = []
        # Thinking by the index of its block.
        self._thinking: dict[int, SignedThinking] = {}
        # Tool calls by the index of their block: id, name and arguments.
        self._uses: dict[int, list[str]] = {}
        self._stop_reason: str | None = None
        self._usage: dict[str, int] = {}

    @property
    def finished(self) -> bool:
        return self._stop_reason is not None

    def add(self, chunk: Any) -> list[StreamEvent]:
        match chunk:
            case {"type": "error", "error": error}:
                raise _error(error)
            case {"type": "message_start", "message": {"usage": dict(usage)}}:
                self._count(usage)
            case {"type": "content_block_start", "index": int(index), "content_block": dict(block)}:
                return self._block(index, block, streamed=True)
            case {"type": "content_block_delta", "index": int(index), "delta": dict(delta)}:
                return self._delta(index, delta)
            case {"type": "message_delta", "delta": dict(delta)}:
                self._stop_reason = _text(delta.get("stop_reason")) or self._stop_reason
                self._count(chunk.get("usage"))
            case {"type": "message", "content": list(blocks)}:
                events = [
                    event
                    for index, block in enumerate(blocks)
                    if isinstance(block, dict)
                    for event in self._block(index, block, streamed=False)
                ]
                self._stop_reason = _text(chunk.get("stop_reason")) or "end_turn"
                self._count(chunk.get("usage"))
                return events
        return []

    def finish(self, cost: Callable[[Usage], float]) -> Finished:
        reason = _FINISH.get(self._stop_reason or "", "stop")
        if reason in ("stop", "tool_calls"):
            reason = "tool_calls" if self._uses else "stop"
        uses = tuple(
            ToolUse(identity or f"toolu_{uuid.uuid4().hex}", self._names.meant(name), arguments.strip() or "{}")
            for identity, name, arguments in self._uses.values()
        )
        blocks = tuple(self._thinking.values())
        message = Message(
            "assistant",
            "".join(self._text),
            tool_calls=uses,
            thinking="".join(block.text for block in blocks),
            signed_thinking=tuple(block for block in blocks if block.signature or block.data),
        )
        cached = self._usage.get("cache_read_input_tokens", 0)
        prompt = self._usage.get("input_tokens", 0) + cached + self._usage.get("cache_creation_input_tokens", 0)
        usage = Usage(prompt, self._usage.get("output_tokens", 0), cached)
        return Finished(message, msgspec.structs.replace(usage, cost=cost(usage)), reason)

    def _block(self, index: int, block: dict[str, Any], *, streamed: bool) -> list[StreamEvent]:
        match block.get("type"):
            case "text":
                return self._say(_text(block.get("text")))
            case "thinking":
                return self._think(index, _text(block.get("thinking")), _text(block.get("signature")))
            case "redacted_thinking":
                self._thinking[index] = SignedThinking(data=_text(block.get("data")))
            case "tool_use":
                # In a stream the arguments follow as pieces of JSON.
                given = block.get("input")
                arguments = "" if streamed and not given else msgspec.json.encode(given or {}).decode()
                self._uses[index] = [_text(block.get("id")), _text(block.get("name")), arguments]
        return []

    def _delta(self, index: int, delta: dict[str, Any]) -> list[StreamEvent]:
        match delta.get("type"):
            case "text_delta":
                return self._say(_text(delta.get("text")))
            case "thinking_delta":
                return self._think(index, _text(delta.get("thinking")))
            case "signature_delta":
                return self._think(index, "", _text(delta.get("signature")))
            case "input_json_delta" if index in self._uses:
                self._uses[index][2] += _text(delta.get("partial_json"))
        return []

    def _say(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._text.append(text)
        return [TextDelta(text)]

    def _think(self, index: int, text: str, signature: str = "") -> list[StreamEvent]:
        block = self._thinking.get(index, SignedThinking())
        self._thinking[index] = SignedThinking(block.text + text, block.signature + signature)
        return [ThinkingDelta(text)] if text else []

    def _count(self, usage: Any) -> None:
        for name, value in usage.items() if isinstance(usage, dict) else ():
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                self._usage[name] = value


def _error(error: Any) -> ModelError:
    kind = error.get("type") if isinstance(error, dict) else None
    return error_of(error, _STATUSES.get(kind) if isinstance(kind, str) else None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
