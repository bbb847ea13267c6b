"""Assemble a reply from the chunks of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from farhand.llm.errors import ContextOverflow, ModelError, ModelRefused, Unavailable
from farhand.llm.messages import Finished, FinishReason, Message, StreamEvent, TextDelta, ThinkingDelta, ToolUse, Usage
from farhand.llm.tool_names import ToolNames

_FINISH: dict[str, FinishReason] = {
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
}
_THINKING = ("reasoning_content", "reasoning", "thinking")
_OVERFLOW = (
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "maximum context",
    "too many tokens",
    "prompt is too long",
)


class _Use:
    """A tool call under assembly."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = ""


class ReplyBuilder:
    """Turn chunks into deltas, and finally into the message.

    Accepts what servers send in practice: calls without index or id, one index for several calls, arguments as objects,
    usage in any chunk or in none.
    """

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._uses: list[_Use] = []
        self._by_index: dict[int, _Use] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def add(self, chunk: Any) -> list[StreamEvent]:
        """Process a chunk and return its deltas. Raises ModelError for an error in the stream."""
        if not isinstance(chunk, dict):
            return []
        if chunk.get("error"):
            raise error_of(chunk["error"], None)
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        events: list[StreamEvent] = []
        choices = chunk.get("choices")
        for choice in choices[:1] if isinstance(choices, list) else []:
            if not isinstance(choice, dict):
                continue
            # A server that does not stream sends one chunk with the whole message.
            delta = choice.get("delta") or choice.get("message")
            if isinstance(delta, dict):
                events += self._delta(delta)
            if choice.get("finish_reason"):
                self._finish = str(choice["finish_reason"])
            if choice.get("error"):
                raise error_of(choice["error"], None)
        return events

    def finish(self, cost: Callable[[Usage], float]) -> Finished:
        """Return the whole reply; `cost` computes the price of a Usage if the provider sent none."""
        reason = _FINISH.get(self._finish or "", "stop")
        if reason in ("stop", "tool_calls"):
            # Some servers send `stop` with tool calls.
            reason = "tool_calls" if self._uses else "stop"
        message = Message(
            "assistant",
            "".join(self._text),
            tool_calls=self._tool_uses(),
            thinking="".join(self._thinking),
        )
        usage = usage_of(self._usage)
        if not usage.cost:
            usage = msgspec.structs.replace(usage, cost=cost(usage))
        return Finished(message, usage, reason)

    def _delta(self, delta: dict[str, Any]) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        for word in _THINKING:
            value = delta.get(word)
            if isinstance(value, str) and value:
                self._thinking.append(value)
                events.append(ThinkingDelta(value))
                break
        content = delta.get("content")
        if isinstance(content, list):
            content = "".join(
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
        if isinstance(content, str) and content:
            self._text.append(content)
            events.append(TextDelta(content))
        for part in delta.get("tool_calls") or ():
            if isinstance(part, dict):
                self._tool_delta(part)
        return events

    def _tool_delta(self, part: dict[str, Any]) -> None:
        identity = part.get("id") or ""
        index = part.get("index")
        use = self._by_index.get(index) if isinstance(index, int) else (self._uses[-1] if self._uses else None)
        # Some servers give every call the index 0, others none: a new id means a new call.
        if use is None or (identity and use.id and identity != use.id):
            use = _Use()
            self._uses.append(use)
            if isinstance(index, int):
                self._by_index[index] = use
        function = part.get("function")
        function = function if isinstance(function, dict) else {}
        use.id = use.id or str(identity)
        name = function.get("name")
        if isinstance(name, str) and name != use.name:
            use.name += name
        arguments = function.get("arguments")
        if arguments is not None:
            use.arguments += arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

    def _tool_uses(self) -> tuple[ToolUse, ...]:
        uses: list[ToolUse] = []
        seen: set[str] = set()
        for use in self._uses:
            identity = use.id
            if not identity or identity in seen:
                identity = f"call_{uuid.uuid4().hex}"
            seen.add(identity)
            uses.append(ToolUse(identity, self._names.meant(use.name), use.arguments.strip() or "{}"))
        return tuple(uses)


def usage_of(counted: Any) -> Usage:
    """Read the token counts of a provider under any of their common names; non-numbers count as 0."""
    counted = counted if isinstance(counted, dict) else {}
    details = counted.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    return Usage(
        _count(counted.get("prompt_tokens")),
        _count(counted.get("completion_tokens")),
        _count(details.get("cached_tokens")) or _count(counted.get("prompt_cache_hit_tokens")),
        float(cost) if isinstance(cost := counted.get("cost"), int | float) and cost > 0 else 0.0,
    )


def error_of(error: Any, status: int | None, *, who: str = "the model", retry_after: float | None = None) -> ModelError:
    """Convert a provider's error object or text into a ModelError."""
    message, code = _described(error)
    if status is None and isinstance(code, int) and 400 <= code < 600:
        status = code
    shown = f"{who} answered {status}: {message}" if status else f"{who} sent an error: {message}"
    lowered = f"{code} {message}".lower()
    if status in (None, 400, 413, 422) and any(sign in lowered for sign in _OVERFLOW):
        return ContextOverflow(shown, status=status)
    if status is None or status in (408, 409, 425, 429) or status >= 500:
        return Unavailable(shown, status=status, retry_after=retry_after)
    if status in (401, 403):
        return ModelRefused(f"{shown} (check the provider's API key)", status=status)
    return ModelRefused(shown, status=status)


def _described(error: Any) -> tuple[str, Any]:
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail") or msgspec.json.encode(inner).decode()
            return str(message), inner.get("code") or inner.get("type") or ""
        return str(inner), ""
    return str(error), ""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
