"""A model that repeats the last message, for tests without a provider."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from farhand.llm.http_model import Connections
from farhand.llm.messages import Finished, Message, StreamEvent, TextDelta
from farhand.llm.model import ModelRequest
from farhand.llm.settings import ModelSettings, ProviderSettings


class ParrotModel:
    def __init__(
        self,
        name: str,
        model: str,
        provider: ProviderSettings,
        settings: ModelSettings,
        api_key: str,
        connections: Connections,
    ) -> None:
        """`name`: `provider/model`; `model`: its name at the provider; `connections`: shared HTTP connections."""
        self.name = name
        self.context_tokens = settings.context_tokens or 32_000
        self._model = model

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        text = f"{self._model} says: {request.messages[-1].text}"
        yield TextDelta(text)
        yield Finished(Message("assistant", text), model=self.name)
