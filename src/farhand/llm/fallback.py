"""Several models as one: the next is asked when the one before does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from farhand.llm.errors import ContextOverflow, ModelError, Unavailable
from farhand.llm.messages import Retrying, StreamEvent, TextDelta, ThinkingDelta
from farhand.llm.model import Model, ModelRequest


class FallbackModel:
    """A chain of models, the preferred one first. Raises what the last one said, with what the others said before.

    A conversation that is too long for a model is not passed on: making it shorter is the better answer.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        """`models` has at least one member."""
        self._models = tuple(models)

    @property
    def name(self) -> str:
        return self._models[0].name

    @property
    def context_tokens(self) -> int:
        """What every member can take."""
        return min(model.context_tokens for model in self._models)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        said: list[str] = []
        for position, model in enumerate(self._models):
            void = False
            try:
                async with contextlib.aclosing(model.stream(request)) as events:
                    async for event in events:
                        if isinstance(event, TextDelta | ThinkingDelta):
                            void = True
                        elif isinstance(event, Retrying) and event.void:
                            void = False
                        yield event
                return
            except ContextOverflow:
                raise
            except ModelError as error:
                said.append(error.message)
                if position + 1 == len(self._models):
                    raise Unavailable("no model answered: " + "; ".join(said), status=error.status) from None
            yield Retrying(said[-1], 0.0, self._models[position + 1].name, void)
