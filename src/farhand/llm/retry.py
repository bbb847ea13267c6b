"""Repeat requests to a model that was busy, disconnected or unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator

import msgspec

from farhand.llm.errors import Unavailable
from farhand.llm.messages import Retrying, StreamEvent, TextDelta, ThinkingDelta
from farhand.llm.model import Model, ModelRequest, ModelWrapper

JITTER = 0.2


class RetryPolicy(msgspec.Struct, frozen=True):
    """Number of retries and their delays: doubling seconds, or what the provider asks for."""

    retries: int = 5
    # Retries if nothing listens at the address.
    unreachable_retries: int = 2
    initial_delay: float = 1.0
    max_delay: float = 32.0
    # Give up if the provider asks for a longer wait.
    max_retry_after: float = 60.0

    def delay(self, attempt: int, error: Unavailable) -> float | None:
        """Return the seconds before retry number `attempt`, counted from 1; None: give up."""
        if attempt > (self.unreachable_retries if error.unreachable else self.retries):
            return None
        if error.retry_after is not None:
            return error.retry_after if error.retry_after <= self.max_retry_after else None
        base = min(self.initial_delay * 2.0 ** (attempt - 1), self.max_delay)
        return base * (1 + JITTER * random.random())  # noqa: S311


class RetryingModel(ModelWrapper):
    """A model with retries. Each wait is announced with `Retrying`."""

    def __init__(self, model: Model, policy: RetryPolicy) -> None:
        super().__init__(model)
        self._policy = policy

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        attempt = 0
        while True:
            void = False
            try:
                async with contextlib.aclosing(self._model.stream(request)) as events:
                    async for event in events:
                        void = void or isinstance(event, TextDelta | ThinkingDelta)
                        yield event
                return
            except Unavailable as error:
                attempt += 1
                delay = self._policy.delay(attempt, error)
                if delay is None:
                    raise
                yield Retrying(error.message, delay, self.name, void)
            await asyncio.sleep(delay)
