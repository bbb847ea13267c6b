"""Which model a name means, and chains of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from farhand.config import SettingsError, load
from farhand.llm.errors import ContextOverflow, NotConfigured, Unavailable
from farhand.llm.messages import Finished, Message, Retrying, StreamEvent
from farhand.llm.model import ModelRequest
from farhand.llm.registry import Models
from farhand.llm.retry import RetryPolicy
from farhand.llm.settings import ModelSettings, ProviderSettings, known
from tests.support.harness import free_port
from tests.support.model_server import ModelServer, error, text

HELLO = ModelRequest((Message("user", "hello"),))


def ask(models: Models, name: str = "") -> list[StreamEvent]:
    async def main() -> list[StreamEvent]:
        try:
            return [event async for event in models.named(name).stream(HELLO)]
        finally:
            await models.close()

    return asyncio.run(main())


def answer(events: list[StreamEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_the_standard_environment_is_enough() -> None:
    with ModelServer(text("hi")) as server:
        end = answer(ask(Models(environ=server.environment)))
        assert server.requests[0].headers["authorization"] == "Bearer scripted-key"
        assert server.requests[0].json["model"] == "scripted"
    assert (end.message.content, end.model) == ("hi", "openai/scripted")


def test_without_a_model_one_sentence_says_what_to_set() -> None:
    with pytest.raises(NotConfigured, match=r"FARHAND_MODEL.*OPENAI_API_KEY.*OPENAI_BASE_URL.*\[agent\] model"):
        Models(environ={"OPENAI_API_KEY": "k"}).named()


def test_a_model_of_openai_without_a_key_names_the_variable() -> None:
    with pytest.raises(NotConfigured, match="set OPENAI_API_KEY"):
        Models(environ={"FARHAND_MODEL": "gpt-4o"}).named()


def test_a_caller_chooses_among_the_models_that_were_set_up(tmp_path: Path) -> None:
    replayed = f"replay:{tmp_path}/kept.jsonl"
    models = Models(
        models={"fast": ModelSettings(provider="ollama", model="qwen3", fallback=["ollama/small"])},
        default="ollama/large",
        others=["ollama/helper", replayed, ""],
    )
    for name in ("", "fast", "ollama/large", "ollama/small", "ollama/helper", "ollama/qwen3", " fast ", replayed):
        assert models.chosen(name) is not None
    for name in (
        "replay:/dev/zero",
        "replay:/etc/passwd",
        "replay:/gone",
        "REPLAY:x",
        "ollama/gpt",
        "gpt-4o",
        "x" * 9000,
    ):
        with pytest.raises(NotConfigured, match=r"There is no model .* Choose one of: ollama/large, fast, ") as refused:
            models.chosen(name)
        assert len(refused.value.message) < 500
        assert str(tmp_path) not in refused.value.message
    with pytest.raises(NotConfigured, match="Did you mean 'fast'"):
        models.chosen("fastt")


@pytest.mark.parametrize(
    ("name", "sent", "shown"),
    [
        ("mine/llama-3", "llama-3", "mine/llama-3"),
        ("mine/org/llama-3", "org/llama-3", "mine/org/llama-3"),
        ("bare", "bare", "openai/bare"),
        ("unknown-org/model", "unknown-org/model", "openai/unknown-org/model"),
        ("fast", "tiny", "fast"),
        ("aliased", "org/big", "aliased"),
    ],
)
def test_names(name: str, sent: str, shown: str) -> None:
    with ModelServer(text("hi")) as server:
        models = Models(
            providers={"mine": ProviderSettings(server.url)},
            models={
                "fast": ModelSettings(provider="mine", model="tiny"),
                "aliased": ModelSettings(model="mine/org/big"),
            },
            environ={"OPENAI_BASE_URL": server.url},
        )
        assert answer(ask(models, name)).model == shown
        assert server.requests[0].json["model"] == sent


def test_an_unknown_provider_of_a_table_is_named() -> None:
    with pytest.raises(NotConfigured, match=r"'gone'.*\[providers\.gone\]"):
        Models(models={"m": ModelSettings(provider="gone")}).named("m")


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "farhand.toml").write_text('[agent]\nmodel = "ollama/file"\n')
    config = load(tmp_path, {})
    assert Models(default=config.agent.model).named().name == "ollama/file"
    assert Models(default=config.agent.model, environ={"FARHAND_MODEL": "vllm/environment"}).named().name == (
        "vllm/environment"
    )


def test_settings_of_the_file_reach_the_model(tmp_path: Path) -> None:
    with ModelServer(text("hi", usage=(1_000_000, 0))) as server:
        (tmp_path / "farhand.toml").write_text(
            f"""
            [providers.mine]
            base_url = "{server.url}"
            api_key_env = "MY_KEY"
            headers = {{ X-Team = "blue" }}
            [models.fast]
            provider = "mine"
            model = "tiny"
            context_tokens = 4096
            input_cost = 3.0
            """
        )
        config = load(tmp_path, {})
        models = Models(providers=config.providers, models=config.models, environ={"MY_KEY": "k"})
        assert models.named("fast").context_tokens == 4096
        assert models.listed == ["fast"]
        assert answer(ask(models, "fast")).usage.cost == 3.0
        assert server.requests[0].headers["x-team"] == "blue"
        assert server.requests[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("[providers.mine]\nbase_urll = 'x'", r"'base_urll' in \[providers\.\*\]; did you mean 'base_url'"),
        ("[models.a]\ncontext_tokens = 'x'", r"models\[\.\.\.\]\.context_tokens: Expected 'int'"),
        ("[agent]\nmodell = 'x'", r"'modell' in \[agent\]; did you mean 'model'"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, written: str, reason: str) -> None:
    (tmp_path / "farhand.toml").write_text(written)
    with pytest.raises(SettingsError, match=reason):
        load(tmp_path, {})


def chain(first: ModelServer | str, second: ModelServer) -> Models:
    url = first if isinstance(first, str) else first.url
    return Models(
        providers={"a": ProviderSettings(url), "b": ProviderSettings(second.url)},
        models={"a/m": ModelSettings(fallback=["b/m"])},
        policy=lambda _: RetryPolicy(retries=1, unreachable_retries=0, initial_delay=0.001),
    )


@pytest.mark.parametrize("trouble", [401, 404, 500])
def test_the_next_model_is_asked(trouble: int) -> None:
    with ModelServer(*[error(trouble, "no")] * 3) as first, ModelServer(text("from b")) as second:
        events = ask(chain(first, second), "a/m")
    assert [event.model for event in events if isinstance(event, Retrying)][-1] == "b/m"
    assert (answer(events).message.content, answer(events).model) == ("from b", "b/m")


def test_the_next_model_is_asked_when_a_server_is_unreachable() -> None:
    with ModelServer(text("from b")) as second:
        assert answer(ask(chain(f"http://127.0.0.1:{free_port()}/v1", second), "a/m")).model == "b/m"


def test_text_of_an_interrupted_reply_is_void_at_the_next_model() -> None:
    cut: dict[str, Any] = {"cut": True, "usage": None, "finish_reason": ""}
    with ModelServer(text("half", **cut), text("half", **cut)) as first, ModelServer(text("whole")) as second:
        events = ask(chain(first, second), "a/m")
    assert [(event.model, event.void) for event in events if isinstance(event, Retrying)] == [
        ("a/m", True),
        ("b/m", True),
    ]


def test_a_chain_that_fails_tells_what_each_said() -> None:
    with (
        ModelServer(error(401, "bad key")) as first,
        ModelServer(error(404, "gone")) as second,
        pytest.raises(Unavailable, match=r"no model answered: a/m answered 401: bad key.*; b/m answered 404: gone"),
    ):
        ask(chain(first, second), "a/m")


def test_a_conversation_that_is_too_long_is_not_passed_on() -> None:
    with (
        ModelServer(error(400, "maximum context length is 10")) as first,
        ModelServer() as second,
        pytest.raises(ContextOverflow),
    ):
        ask(chain(first, second), "a/m")


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt-4o", 128_000), ("gpt-4.1-mini-2025-04-14", 1_047_576), ("openai/gpt-5-mini", 400_000), ("gpt-4oo", None)],
)
def test_known_models(name: str, size: int | None) -> None:
    found = known(name)
    assert (found.context_tokens if found else None) == size
