"""The contract of a model: one method that streams a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Literal, Protocol, get_args

import msgspec

from farhand.llm.messages import Message, StreamEvent
from farhand.protocol.calls import ToolSpec

Thinking = Literal["off", "minimal", "low", "medium", "high", "xhigh"]
# The levels by the words that people and models use for them.
THINKING_LEVELS: Final[Mapping[str, Thinking]] = {
    **{level: level for level in get_args(Thinking)},
    **{"none": "off", "0": "off", "min": "minimal", "1": "minimal", "2": "low", "med": "medium", "3": "medium"},
    **{"4": "high", "max": "xhigh", "5": "xhigh"},
}


class ModelRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to a model: the conversation, the tools it may use, and options."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    # Maximum tokens of the reply; None leaves it to the model's settings.
    max_tokens: int | None = None
    thinking: Thinking | None = None
    # Further parameters of the API, by their names there: `temperature`, `stop`, `response_format`, `tool_choice` …
    parameters: dict[str, Any] = {}


class Model(Protocol):
    """The contract of models. Implementations keep no conversation state and may stream many replies concurrently."""

    @property
    def name(self) -> str:
        """Return the name of the model as `provider/model`."""

    @property
    def context_tokens(self) -> int:
        """Return the maximum tokens of a request and its reply together."""

    def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        """Yield deltas as they arrive, then one `Finished`. Raises ModelError.

        A reader that stops early calls `aclose()`, which also ends the request at the provider.
        """


class ModelWrapper:
    """A model that adds something to another one: it has the name and the context of that model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def context_tokens(self) -> int:
        return self._model.context_tokens
