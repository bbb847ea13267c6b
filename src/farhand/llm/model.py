"""The contract of a model: one method that streams a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

import msgspec

from farhand.llm.messages import Message, StreamEvent
from farhand.protocol.calls import ToolSpec

Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh"]


class ModelRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model is asked: the conversation, the tools it may use, and how to answer."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    # The longest reply; None leaves it to the model's settings.
    max_tokens: int | None = None
    thinking: Thinking | None = None
    # More of the API's own, by their names there: `temperature`, `stop`, `response_format`, `tool_choice` …
    parameters: dict[str, Any] = {}


class Model(Protocol):
    """Something that answers. Implementations hold no state of a conversation and may stream many replies at once."""

    @property
    def name(self) -> str:
        """`provider/model`, as people name it."""
        ...

    @property
    def context_tokens(self) -> int:
        """How much a request and its reply may hold together."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        """Deltas as they come, then one `Finished`. Raises ModelError.

        Whoever stops reading early calls `aclose()`, which ends the request at the provider too.
        """
        ...
