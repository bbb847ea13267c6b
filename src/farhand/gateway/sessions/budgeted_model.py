"""A model whose requests count against budgets: money and tokens are reserved before each request."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec

from farhand.agent.tokens import messages_tokens, text_tokens, tools_tokens
from farhand.gateway.access.budgets import Budgets
from farhand.llm.errors import BudgetSpent, ModelError
from farhand.llm.messages import Finished, StreamEvent, TextDelta, ThinkingDelta, Usage
from farhand.llm.model import Model, ModelRequest, ModelWrapper
from farhand.llm.settings import Prices
from farhand.store.tables.accounts.budgets import SCALE, BudgetExceeded, Limit, Unit, Want

# What is reserved for a reply without a limit of its own.
REPLY_TOKENS: Final = 4096
_DOLLAR: Final = SCALE[Unit.MONEY]


class BudgetedModel(ModelWrapper):
    """Delegates to a model if the limits allow the request; a reply gets no more tokens than are left."""

    def __init__(
        self,
        model: Model,
        budgets: Budgets,
        limits: Callable[[], Awaitable[tuple[Limit, ...]]],
        prices: Prices,
    ) -> None:
        """`limits` returns those that apply to a request. `prices` are those of the model."""
        super().__init__(model)
        self._budgets = budgets
        self._limits = limits
        self._prices = prices

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        limits = [limit for limit in await self._limits() if limit.unit in (Unit.MONEY, Unit.TOKENS)]
        if not limits:
            async with contextlib.aclosing(self._model.stream(request)) as stream:
                async for event in stream:
                    yield event
            return
        prompt = messages_tokens(request.messages) + tools_tokens(request.tools)
        hold = f"model:{uuid.uuid4().hex}"
        request = await self._reserve(hold, limits, request, prompt)
        said, usage = 0, Usage()
        try:
            async with contextlib.aclosing(self._model.stream(request)) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta | ThinkingDelta):
                        said += text_tokens(event.text)
                    elif isinstance(event, Finished):
                        usage = event.usage
                        if not usage.total_tokens:  # the provider does not count
                            usage = self._estimate(prompt, max(said, messages_tokens([event.message])), usage.cost)
                    yield event
        except ModelError:  # the provider refused the request, or did not answer
            usage = self._estimate(prompt, said) if said else Usage()
            raise
        finally:
            if not usage.total_tokens and said:  # the reader stopped in the middle
                usage = self._estimate(prompt, said)
            await self._budgets.settle(
                hold, {Unit.TOKENS: usage.total_tokens, Unit.MONEY: math.ceil(usage.cost * _DOLLAR)}
            )

    async def _reserve(self, hold: str, limits: list[Limit], request: ModelRequest, prompt: int) -> ModelRequest:
        """Reserve a request and its reply; return the request, with a shorter reply if less is left."""
        wanted = request.max_tokens or REPLY_TOKENS
        price, reply_price = self._cost(Usage(prompt)), self._cost(Usage(0, 1_000_000)) / 1_000_000
        wants = {
            Unit.TOKENS: Want(prompt + wanted, prompt + 1),
            Unit.MONEY: Want(price + math.ceil(wanted * reply_price), max(1, price)),
        }
        try:
            granted = await self._budgets.take(hold, limits, wants)
        except BudgetExceeded as exceeded:
            raise BudgetSpent(f"{self._budgets.explain(exceeded)}; the model was not asked") from None
        room = [granted[Unit.TOKENS] - prompt] if Unit.TOKENS in granted else []
        if Unit.MONEY in granted and reply_price:
            room.append(max(1, math.floor((granted[Unit.MONEY] - price) / reply_price)))
        if room and min(room) < wanted:
            return msgspec.structs.replace(request, max_tokens=min(room))
        return request

    def _estimate(self, prompt: int, reply: int, cost: float = 0.0) -> Usage:
        usage = Usage(prompt, reply)
        return msgspec.structs.replace(usage, cost=cost or self._prices.cost(usage))

    def _cost(self, usage: Usage) -> int:
        return math.ceil(self._prices.cost(usage) * _DOLLAR)
