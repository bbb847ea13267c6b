"""The contract of models. Each API answers over real HTTP, from a server with its wire format."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from anthropic.types import RawMessageStreamEvent

from farhand.llm.errors import ContextOverflow, ModelRefused, Unavailable
from farhand.llm.messages import Finished, Image, Message, StreamEvent, Text, TextDelta, ThinkingDelta, ToolUse, Usage
from farhand.llm.model import Model, ModelRequest
from farhand.llm.recording import RecordedReply, digest
from farhand.llm.registry import Models
from farhand.llm.retry import RetryPolicy
from farhand.llm.settings import ModelSettings, ProviderSettings
from farhand.protocol.calls import ToolSpec
from tests.support import anthropic_server as claude
from tests.support import model_server as openai
from tests.support.harness import wait_until
from tests.support.model_server import ModelServer, Reply

HELLO = ModelRequest((Message("system", "Be brief."), Message("user", "hello")))
WEATHER = ToolSpec("sky.weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
PIXEL = "data:image/png;base64,iVBORw0KGgo="
APIS = ("openai", "anthropic")
NEVER = RetryPolicy(retries=0, unreachable_retries=0)


class Api:
    """How one API words its replies."""

    def __init__(self, name: str) -> None:
        self.name = name

    def text(self, text: str, **options: Any) -> Reply:
        return openai.text(text, cached=6, **options) if self.name == "openai" else claude.said(text, **options)

    def calls(self, *uses: tuple[str, Any], **options: Any) -> Reply:
        return openai.calls(*uses, **options) if self.name == "openai" else claude.used(*uses, **options)

    def long(self) -> Reply:
        if self.name == "openai":
            return openai.text("cut", finish_reason="length")
        return claude.said("cut", stop_reason="max_tokens")

    def filtered(self) -> Reply:
        if self.name == "openai":
            return openai.text("no", finish_reason="content_filter")
        return claude.said("no", stop_reason="refusal")

    def cut(self) -> Reply:
        if self.name == "openai":
            reply = openai.text("half a reply")
            return Reply(reply.chunks[:2], cut=True)
        return claude.stream(
            [({"type": "text", "text": ""}, [{"type": "text_delta", "text": "half"}])], "", cut_after=4
        )

    def fails(self, status: int, kind: str, message: str, **headers: str) -> Reply:
        if self.name == "openai":
            return openai.error(status, message, retry_after=headers.get("retry-after"))
        return claude.failed(status, kind, message, **headers)


@contextlib.asynccontextmanager
async def asking(api: str, *replies: Reply, **settings: Any) -> AsyncIterator[tuple[Model, ModelServer]]:
    with ModelServer(*replies) as server:
        models = Models(
            providers={"tested": ProviderSettings(server.url, api_key="secret-key", api=api)},
            models={"scripted": ModelSettings(provider="tested", **settings)},
            policy=lambda _: NEVER,
        )
        try:
            yield models.named("scripted"), server
        finally:
            await models.close()


def ask(api: str, *replies: Reply, request: ModelRequest = HELLO, **settings: Any) -> tuple[list[StreamEvent], Any]:
    """All events of one reply, and the body of the last request."""

    async def main() -> tuple[list[StreamEvent], Any]:
        async with asking(api, *replies, **settings) as (model, server):
            events = [event async for event in model.stream(request)]
            return events, server.requests[-1]

    return asyncio.run(main())


def finished(events: list[StreamEvent]) -> Finished:
    assert isinstance(events[-1], Finished) and not any(isinstance(event, Finished) for event in events[:-1])
    return events[-1]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    return Api(request.param)


# -- replies --------------------------------------------------------------------------------------------------------


def test_text_arrives_in_pieces_and_then_whole(api: Api) -> None:
    events, _ = ask(api.name, api.text("größer als 🙂", pieces=4))
    pieces = [event.text for event in events if isinstance(event, TextDelta)]
    end = finished(events)
    assert len(pieces) > 1 and "".join(pieces) == "größer als 🙂" == end.message.text
    assert (end.finish_reason, end.model) == ("stop", "scripted")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (10, 5, 6)


def test_a_stream_may_be_cut_anywhere_into_packets(api: Api) -> None:
    reply = api.calls(("sky_weather", {"city": "Zürich"}), say="é")
    reply.piece = 3
    end = finished(ask(api.name, reply, request=msgspec.structs.replace(HELLO, tools=(WEATHER,)))[0])
    assert json.loads(end.message.tool_calls[0].arguments) == {"city": "Zürich"} and end.message.text == "é"


def test_a_reply_that_is_not_streamed(api: Api) -> None:
    reply = api.text("whole") if api.name == "openai" else claude.whole({"type": "text", "text": "whole"})
    events, asked = ask(api.name, reply, stream=False)
    assert finished(events).message.text == "whole" and not asked.json.get("stream")
    if api.name == "anthropic":
        use = {"type": "tool_use", "id": "toolu_9", "name": "sky_weather", "input": {"city": "Oslo"}}
        request = msgspec.structs.replace(HELLO, tools=(WEATHER,))
        end = finished(ask("anthropic", claude.whole(use, stop_reason="tool_use"), request=request, stream=False)[0])
        assert end.message.tool_calls == (ToolUse("toolu_9", "sky.weather", '{"city":"Oslo"}'),)


def test_thinking_is_separate_from_text(api: Api) -> None:
    events, _ = ask(api.name, api.text("42", thinking="let me see"))
    assert [event.text for event in events if isinstance(event, ThinkingDelta)] == ["let me see"]
    end = finished(events)
    assert (end.message.text, end.message.thinking) == ("42", "let me see")


def test_several_tool_calls_keep_their_own_names_and_arguments(api: Api) -> None:
    request = msgspec.structs.replace(HELLO, tools=(WEATHER, ToolSpec("plain", "", {})))
    reply = api.calls(("sky_weather", {"city": "Oslo"}), ("plain", {}), ("plain", "not json"), say="I look.")
    end = finished(ask(api.name, reply, request=request)[0])
    uses = end.message.tool_calls
    assert [use.name for use in uses] == ["sky.weather", "plain", "plain"] and end.finish_reason == "tool_calls"
    assert [use.arguments for use in uses] == ['{"city": "Oslo"}', "{}", "not json"] and end.message.text == "I look."
    assert len({use.id for use in uses}) == 3


def test_why_a_reply_ended(api: Api) -> None:
    assert finished(ask(api.name, api.long())[0]).finish_reason == "length"
    assert finished(ask(api.name, api.filtered())[0]).finish_reason == "content_filter"


# -- requests -------------------------------------------------------------------------------------------------------


def test_a_whole_conversation_reaches_the_model(api: Api) -> None:
    conversation = (
        Message("system", "Be brief."),
        Message("user", (Text("what is this?"), Image(PIXEL))),
        Message("assistant", "I look.", tool_calls=(ToolUse("a:1", "sky.weather", "{}"), ToolUse("b", "x", "broken"))),
        Message("tool", (Text("rain"), Image(PIXEL)), tool_call_id="a:1", name="sky.weather"),
        Message("tool", "it failed", tool_call_id="b", name="x", is_error=True),
        Message("user", "and now?"),
    )
    request = ModelRequest(
        conversation, (WEATHER,), max_tokens=99, parameters={"temperature": 0.5, "stop": "END", "top_p": 0.9}
    )
    events, asked = ask(api.name, api.text("fine"), request=request)
    body, sent = asked.json, asked.body.decode()
    assert finished(events).message.text == "fine"
    assert body["model"] == "scripted" and 99 in (body.get("max_tokens"), body.get("max_completion_tokens"))
    for part in ("Be brief.", "what is this?", "I look.", "rain", "it failed", "and now?", "iVBORw0KGgo=", "END"):
        assert part in sent, part
    assert body["temperature"] == 0.5 and '"sky.weather"' not in sent  # the names are those that the API takes


def test_an_image_for_a_model_without_eyes_is_a_line_of_text(api: Api) -> None:
    request = ModelRequest((Message("user", (Text("see"), Image(PIXEL))),))
    _, asked = ask(api.name, api.text("ok"), request=request, images=False)
    assert "iVBORw0KGgo" not in asked.body.decode() and "an image (image/png)" in asked.body.decode()


def test_the_key_is_sent_and_never_shown(api: Api) -> None:
    _, asked = ask(api.name, api.text("ok"))
    assert "secret-key" in asked.headers.get("authorization", asked.headers.get("x-api-key", ""))
    with pytest.raises(ModelRefused) as refused:
        ask(api.name, api.fails(401, "authentication_error", "bad key secret-key"))
    assert "secret-key" not in str(refused.value)


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "message", "raised"),
    [
        (400, "invalid_request_error", "no such parameter", ModelRefused),
        (404, "not_found_error", "no such model", ModelRefused),
        (400, "invalid_request_error", "prompt is too long: 300000 tokens > 200000 maximum", ContextOverflow),
        (429, "rate_limit_error", "slow down", Unavailable),
        (500, "api_error", "oops", Unavailable),
        (529, "overloaded_error", "busy", Unavailable),
    ],
)
def test_failures_have_a_kind(api: Api, status: int, kind: str, message: str, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=message.partition(":")[0]) as failure:
        ask(api.name, api.fails(status, kind, message))
    assert type(failure.value) is raised


def test_the_provider_says_when_to_come_back(api: Api) -> None:
    with pytest.raises(Unavailable) as busy:
        ask(api.name, api.fails(429, "rate_limit_error", "slow", **{"retry-after": "7"}))
    assert busy.value.retry_after == 7


def test_an_incomplete_stream_and_garbage_are_errors(api: Api) -> None:
    with pytest.raises(Unavailable):
        ask(api.name, api.cut())
    with pytest.raises(Unavailable):
        ask(api.name, openai.raw(b"data: {broken\n\n", b"data: 5\n\n"))
    with pytest.raises(Unavailable):
        ask(api.name, Reply(reset=True))


def test_a_reader_that_leaves_ends_the_request(api: Api) -> None:
    async def main() -> None:
        held = api.text("one two three", gate=threading.Event(), before_gate=5)
        async with asking(api.name, held) as (model, server):
            events = model.stream(HELLO)
            while not isinstance(await anext(events), TextDelta):
                pass
            await events.aclose()
            await asyncio.to_thread(wait_until, server.requests[0].left.is_set, 20)

    asyncio.run(main())


def test_many_replies_at_once(api: Api) -> None:
    async def main() -> None:
        async with asking(api.name, *[api.text(f"reply {number}") for number in range(8)]) as (model, _):

            async def one() -> str:
                return finished([event async for event in model.stream(HELLO)]).message.text

            texts = await asyncio.gather(*(one() for _ in range(8)))
            assert sorted(texts) == [f"reply {number}" for number in range(8)]
            assert model.context_tokens > 0

    asyncio.run(main())


# -- recordings -----------------------------------------------------------------------------------------------------


def test_a_recording_keeps_the_contract(tmp_path: Path) -> None:
    message = Message("assistant", "hi", tool_calls=(ToolUse("a", "sky.weather", "{}"),))
    end = Finished(message, Usage(10, 5, 6), "tool_calls", "openai/m")
    recorded = RecordedReply(digest(HELLO.messages), (TextDelta("h"), TextDelta("i"), end))
    path = tmp_path / "recording.jsonl"
    path.write_bytes(msgspec.json.encode(recorded) + b"\n")

    async def main() -> None:
        model = Models(environ={"FARHAND_MODEL": f"replay:{path}"}).named()
        for _ in range(2):
            events = [event async for event in model.stream(HELLO)]
            assert finished(events) == end and [type(event) for event in events[:-1]] == [TextDelta, TextDelta]
        assert model.context_tokens > 0 and model.name.startswith("replay:")

    asyncio.run(main())


# -- what only Anthropic's API has ----------------------------------------------------------------------------------


def test_the_wire_double_has_the_shapes_of_the_official_package() -> None:
    adapter: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
    blocks: list[Any] = [
        ({"type": "thinking", "thinking": "", "signature": ""}, [{"type": "thinking_delta", "thinking": "x"}]),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "x"}]),
        (
            {"type": "tool_use", "id": "t", "name": "n", "input": {}},
            [{"type": "input_json_delta", "partial_json": "{"}],
        ),
    ]
    for event in claude.events(blocks, "end_turn"):
        if event["type"] != "ping":
            adapter.validate_python(event)


def test_turns_alternate_and_results_are_blocks() -> None:
    conversation = (
        Message("assistant", "earlier"),
        Message("user", "a"),
        Message("user", " "),
        Message("assistant", "", tool_calls=(ToolUse("call:1", "sky.weather", '{"city":"Oslo"}'),)),
        Message("tool", "rain", tool_call_id="call:1"),
        Message("tool", "broken", tool_call_id="call:2", is_error=True),
        Message("user", "thanks"),
    )
    _, asked = ask("anthropic", claude.said("ok"), request=ModelRequest(conversation, (WEATHER,)))
    turns = asked.json["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert turns[3]["content"] == [
        {"type": "tool_use", "id": "call_1", "name": turns[3]["content"][0]["name"], "input": {"city": "Oslo"}}
    ]
    results = turns[4]["content"]
    assert [block["type"] for block in results] == ["tool_result", "tool_result", "text"]
    assert results[0]["tool_use_id"] == "call_1" and results[1]["is_error"] and "is_error" not in results[0]


def test_the_prompt_is_cached_at_four_marks() -> None:
    conversation = [Message("system", "long prompt")]
    for number in range(4):
        conversation += [Message("user", f"question {number}"), Message("assistant", f"answer {number}")]
    request = ModelRequest((*conversation, Message("user", "last")), (WEATHER, ToolSpec("plain", "", {})))
    _, asked = ask("anthropic", claude.said("ok"), request=request)
    body = asked.json
    assert asked.body.decode().count('"cache_control"') == 4
    assert "cache_control" in body["tools"][-1] and "cache_control" in body["system"][-1]
    assert (
        "cache_control" in body["messages"][-1]["content"][-1]
        and "cache_control" in body["messages"][-3]["content"][-1]
    )
    assert asked.headers["anthropic-version"] == "2023-06-01" and asked.path.endswith("/messages")


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": {"type": "function", "function": {"name": "plain"}}}, {"type": "tool", "name": "plain"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        ({"tool_choice": "auto"}, None),
    ],
)
def test_the_choice_of_tools(parameters: Any, sent: Any) -> None:
    request = msgspec.structs.replace(HELLO, tools=(ToolSpec("plain", "", {}),), parameters=parameters)
    assert ask("anthropic", claude.said("ok"), request=request)[1].json.get("tool_choice") == sent


def test_thinking_has_a_budget_but_not_within_a_round_that_another_model_began() -> None:
    request = msgspec.structs.replace(HELLO, thinking="medium", parameters={"temperature": 0.2})
    body = ask("anthropic", claude.said("ok"), request=request)[1].json
    assert body["thinking"] == {"type": "enabled", "budget_tokens": 8192}
    assert body["max_tokens"] > 8192 and "temperature" not in body
    use = ToolUse("a", "sky.weather", "{}")
    round_ = (*HELLO.messages, Message("assistant", "", tool_calls=(use,)), Message("tool", "rain", tool_call_id="a"))
    inside = msgspec.structs.replace(request, messages=round_, tools=(WEATHER,))
    assert "thinking" not in ask("anthropic", claude.said("ok"), request=inside)[1].json


def test_signed_thinking_is_sent_back_within_a_round_of_calls_alone() -> None:
    thought = {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [{"type": "thinking_delta", "thinking": "I ask."}, {"type": "signature_delta", "signature": "c2ln"}]
    hidden = {"type": "redacted_thinking", "data": "ZGF0YQ=="}
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
    signed = [{"type": "thinking", "thinking": "I ask.", "signature": "c2ln"}, hidden]
    for reply in (
        claude.stream([(thought, deltas), (hidden, []), (call, [])], "tool_use"),
        claude.whole(*signed, call, stop_reason="tool_use"),
    ):
        tools = (ToolSpec("weather", "", {}),)
        request = msgspec.structs.replace(HELLO, thinking="low", tools=tools)
        events, _ = ask("anthropic", reply, request=request)
        kept = msgspec.json.decode(msgspec.json.encode(finished(events).message), type=Message)
        assert kept.thinking == "I ask."
        within = (*HELLO.messages, kept, Message("tool", "rain", tool_call_id="a"))
        body = ask("anthropic", claude.said("ok"), request=msgspec.structs.replace(request, messages=within))[1].json
        assert body["thinking"]["budget_tokens"] == 2048
        assert body["messages"][-2]["content"] == [*signed, call]
        later = (*within, Message("assistant", "It rains."), Message("user", "thanks"))
        body = ask("anthropic", claude.said("ok"), request=msgspec.structs.replace(request, messages=later))[1].json
        assert "signature" not in json.dumps(body["messages"]) and "thinking" in body
        without = msgspec.structs.replace(request, messages=within, thinking=None)
        body = ask("anthropic", claude.said("ok"), request=without)[1].json
        assert "signature" not in json.dumps(body["messages"]) and "thinking" not in body


def test_an_error_within_a_stream_has_a_kind() -> None:
    for kind, raised in (("overloaded_error", Unavailable), ("invalid_request_error", ModelRefused)):
        event = {"type": "error", "error": {"type": kind, "message": "it broke"}}
        line = f"event: error\ndata: {json.dumps(event)}\n\n".encode()
        with pytest.raises(raised, match="it broke"):
            ask("anthropic", openai.raw(line))


def test_anthropic_is_a_provider_without_settings() -> None:
    async def main() -> None:
        models = Models(environ={"FARHAND_MODEL": "anthropic/claude-sonnet-4-5", "ANTHROPIC_API_KEY": "k"})
        assert models.named().name == "anthropic/claude-sonnet-4-5" and models.named().context_tokens == 200_000
        await models.close()

    asyncio.run(main())
