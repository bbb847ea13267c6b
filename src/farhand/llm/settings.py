"""Settings of providers and models: `[providers.NAME]` and `[models.NAME]` in `farhand.toml`."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.llm.messages import Usage

DEFAULT_CONTEXT_TOKENS: Final = 128_000


class ProviderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A provider: an OpenAI-compatible server, unless `api` names another interface."""

    # Up to and including `/v1`.
    base_url: str = ""
    api_key: str = ""
    # The environment variable that holds the key, to keep it out of the file.
    api_key_env: str = ""
    # Sent with each request.
    headers: dict[str, str] = {}
    # Number of retries after a temporary error.
    retries: int = 5
    # The interface it has: an entry point of the group `farhand.models`.
    api: str = "openai"


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model: its provider, limits and prices."""

    provider: str = ""
    # Its name at the provider; by default the name of this table.
    model: str = ""
    # 0: the known value, or 128,000.
    context_tokens: int = 0
    # Maximum tokens of a reply; 0 leaves it to the provider.
    max_tokens: int = 0
    temperature: float | None = None
    # US dollars per million tokens; None: the known price.
    input_cost: float | None = None
    output_cost: float | None = None
    # Price per million cached prompt tokens; by default the same as others.
    cached_cost: float | None = None
    # False: the model accepts no images and gets a line of text instead.
    images: bool = True
    stream: bool = True
    # True: send earlier reasoning back, as some models require during a run of tool calls.
    send_thinking: bool = False
    connect_seconds: float = 10.0
    # Timeout of the first piece of a reply; a local model reads a long prompt slowly.
    first_token_seconds: float = 300.0
    # Timeout of each further piece.
    idle_seconds: float = 120.0
    # Models to ask, in order, if this one does not answer.
    fallback: list[str] = []


class Prices(msgspec.Struct, frozen=True):
    """US dollars per million tokens."""

    input: float = 0.0
    output: float = 0.0
    cached: float = 0.0

    def cost(self, usage: Usage) -> float:
        fresh = max(0, usage.prompt_tokens - usage.cached_tokens)
        paid = fresh * self.input + usage.cached_tokens * self.cached + usage.completion_tokens * self.output
        return paid / 1_000_000


class Known(msgspec.Struct, frozen=True):
    """Built-in list prices and context size of a model."""

    context_tokens: int
    prices: Prices


# Usable without settings; a table of the same name overrides single values.
PROVIDERS: Final[dict[str, ProviderSettings]] = {
    "openai": ProviderSettings("https://api.openai.com/v1", api_key_env="OPENAI_API_KEY"),
    "openrouter": ProviderSettings(
        "https://openrouter.ai/api/v1", api_key_env="OPENROUTER_API_KEY", headers={"X-Title": "Farhand"}
    ),
    "anthropic": ProviderSettings("https://api.anthropic.com/v1", api_key_env="ANTHROPIC_API_KEY", api="anthropic"),
    "lmstudio": ProviderSettings("http://127.0.0.1:1234/v1", api_key="lmstudio"),
    "ollama": ProviderSettings("http://127.0.0.1:11434/v1", api_key="ollama"),
    "vllm": ProviderSettings("http://127.0.0.1:8000/v1", api_key_env="VLLM_API_KEY"),
}

# By name prefix, the longest first. Settings override these; a provider that prices a reply itself overrides both.
KNOWN: Final[dict[str, Known]] = {
    "gpt-4o-mini": Known(128_000, Prices(0.15, 0.60, 0.075)),
    "gpt-4o": Known(128_000, Prices(2.50, 10.0, 1.25)),
    "gpt-4.1-nano": Known(1_047_576, Prices(0.10, 0.40, 0.025)),
    "gpt-4.1-mini": Known(1_047_576, Prices(0.40, 1.60, 0.10)),
    "gpt-4.1": Known(1_047_576, Prices(2.0, 8.0, 0.50)),
    "gpt-5-nano": Known(400_000, Prices(0.05, 0.40, 0.005)),
    "gpt-5-mini": Known(400_000, Prices(0.25, 2.0, 0.025)),
    "gpt-5": Known(400_000, Prices(1.25, 10.0, 0.125)),
    "o4-mini": Known(200_000, Prices(1.10, 4.40, 0.275)),
    "o3": Known(200_000, Prices(2.0, 8.0, 0.50)),
    "claude-opus-4": Known(200_000, Prices(15.0, 75.0, 1.50)),
    "claude-opus-4-5": Known(200_000, Prices(5.0, 25.0, 0.50)),
    "claude-sonnet-4": Known(200_000, Prices(3.0, 15.0, 0.30)),
    "claude-haiku-4": Known(200_000, Prices(1.0, 5.0, 0.10)),
    "claude-3-5-haiku": Known(200_000, Prices(0.80, 4.0, 0.08)),
}


def known(model: str) -> Known | None:
    """Return the built-in data of a provider's model; `openai/gpt-4o-2024-11-20` counts as `gpt-4o`."""
    name = model.rpartition("/")[2]
    fitting = [beginning for beginning in KNOWN if name == beginning or name.startswith(beginning + "-")]
    return KNOWN[max(fitting, key=len)] if fitting else None


def context_of(settings: ModelSettings, model: str) -> int:
    found = known(model)
    return settings.context_tokens or (found.context_tokens if found else DEFAULT_CONTEXT_TOKENS)


def prices_of(settings: ModelSettings, model: str) -> Prices:
    found = known(model)
    listed = found.prices if found else Prices()
    given = settings.input_cost if settings.input_cost is not None else listed.input
    cached = listed.cached if settings.input_cost is None else given
    return Prices(
        given,
        settings.output_cost if settings.output_cost is not None else listed.output,
        settings.cached_cost if settings.cached_cost is not None else cached,
    )
