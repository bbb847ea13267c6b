"""Several models as one: if a model does not answer, ask the next."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from farhand.llm.errors import ContextOverflow, ModelError, Unavailable
from farhand.llm.messages import Retrying, StreamEvent, TextDelta, ThinkingDelta
from farhand.llm.model import Model, ModelRequest


class FallbackModel:
    """A chain of models, the preferred one first. Raises the error of the last, with the errors of the others.

    A conversation that is too long for a model is not passed on, since compaction is the better answer.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        """Take a non-empty sequence of models."""
        self._models = tuple(models)

    @property
    def name(self) -> str:
        return self._models[0].name

    @property
    def context_tokens(self) -> int:
        """Return the smallest context of all members."""
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
