"""The OpenAI-compatible client against a scripted server, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from email.utils import formatdate
from typing import Any

import pytest

from farhand.llm.errors import ContextOverflow, ModelError, ModelRefused, Unavailable
from farhand.llm.messages import (
    Finished,
    Image,
    Message,
    Retrying,
    StreamEvent,
    Text,
    TextDelta,
    ThinkingDelta,
    ToolUse,
    Usage,
)
from farhand.llm.model import ModelRequest
from farhand.llm.registry import Models
from farhand.llm.retry import RetryPolicy
from farhand.llm.settings import ModelSettings, ProviderSettings
from farhand.protocol.calls import ToolSpec
from tests.support.harness import free_port, wait_until
from tests.support.model_server import ModelServer, Reply, calls, error, raw, text

HELLO = ModelRequest((Message("user", "hello"),))
QUICK = RetryPolicy(retries=3, initial_delay=0.001, max_delay=0.002)
NEVER = RetryPolicy(retries=0, unreachable_retries=0)


def ask(
    url: str,
    request: ModelRequest = HELLO,
    *,
    policy: RetryPolicy = NEVER,
    **settings: Any,
) -> list[StreamEvent]:
    """All events of one reply."""

    async def main() -> list[StreamEvent]:
        models = Models(
            providers={"openai": ProviderSettings(url, api_key="secret-key")},
            models={"scripted": ModelSettings(**settings)},
            policy=lambda _: policy,
        )
        try:
            return [event async for event in models.named("scripted").stream(request)]
        finally:
            await models.close()

    return asyncio.run(main())


def reply(*events: Reply, request: ModelRequest = HELLO, **options: Any) -> Finished:
    with ModelServer(*events) as server:
        return finished(ask(server.url, request, **options))


def finished(events: list[StreamEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_deltas_come_in_order_and_make_the_message() -> None:
    with ModelServer(text("one two three", pieces=5, thinking="hm", usage=(12, 7), cached=4)) as server:
        events = ask(server.url)
    deltas = [event.text for event in events if isinstance(event, TextDelta)]
    assert len(deltas) == 5
    assert "".join(deltas) == "one two three"
    assert [event.text for event in events if isinstance(event, ThinkingDelta)] == ["hm"]
    end = finished(events)
    assert end.message == Message("assistant", "one two three", thinking="hm")
    assert end.usage == Usage(12, 7, 4)
    assert (end.finish_reason, end.model) == ("stop", "scripted")


def test_the_request_is_what_the_api_describes() -> None:
    tool = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
    with ModelServer(text("ok")) as server:
        ask(
            server.url,
            ModelRequest(HELLO.messages, (tool,), max_tokens=9, thinking="low", parameters={"temperature": 0.5}),
        )
        sent = server.requests[0]
    assert sent.path == "/v1/chat/completions"
    assert sent.headers["authorization"] == "Bearer secret-key"
    assert sent.json == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "read",
                    "description": "Read a file.",
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
            }
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.5,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_a_stream_cut_into_pieces_loses_no_character(piece: int) -> None:
    words = "größer als 東京 🙂 fin"
    assert reply(text(words, pieces=4, piece=piece)).message.content == words


@pytest.mark.parametrize("split", [True, False])
def test_tool_calls_are_put_together_by_index(split: bool) -> None:
    end = reply(calls(("read", {"path": "a"}), ("ls", {"path": "b"}), ids=["x", "y"], split=split, say="Let me look."))
    assert end.message.content == "Let me look."
    assert end.message.tool_calls == (ToolUse("x", "read", '{"path": "a"}'), ToolUse("y", "ls", '{"path": "b"}'))
    assert end.finish_reason == "tool_calls"


def test_calls_without_ids_get_some_of_their_own() -> None:
    uses = reply(calls(("read", {}), ("read", {}), ids=[None, None])).message.tool_calls
    assert len({use.id for use in uses}) == 2
    assert all(use.id for use in uses)


def test_two_calls_with_one_id_are_distinguished() -> None:
    uses = reply(calls(("read", {}), ("ls", {}), ids=["same", "same"])).message.tool_calls
    assert [use.name for use in uses] == ["read", "ls"]
    assert len({use.id for use in uses}) == 2


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()


def part(name: str | None, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{**fields, "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("deltas", "uses"),
    [
        pytest.param(
            [part("read", "{}", index=0, id="a"), part("ls", "{}", index=0, id="b")],
            [("read", "{}"), ("ls", "{}")],
            id="index 0 for every call",
        ),
        pytest.param(
            [part("read", '{"a":', id="a"), part(None, "1}"), part("ls", "{}", id="b")],
            [("read", '{"a":1}'), ("ls", "{}")],
            id="no index",
        ),
        pytest.param([part("read", {"path": "x"}, index=0, id="a")], [("read", '{"path":"x"}')], id="an object"),
        pytest.param([part("read", None, index=0, id="a")], [("read", "{}")], id="no arguments"),
        pytest.param(
            [part("read", '{"a"', index=0, id="a"), part("read", ":1}", index=0, id="a")],
            [("read", '{"a":1}')],
            id="name and id in each delta",
        ),
        pytest.param([part("read", "not json", index=0, id="a")], [("read", "not json")], id="kept as it is"),
    ],
)
def test_tool_calls_as_servers_really_send_them(deltas: list[dict[str, Any]], uses: list[tuple[str, str]]) -> None:
    stream = b"\n\n".join([*(chunk(delta) for delta in deltas), chunk({}, "stop"), b"data: [DONE]", b""])
    end = reply(raw(stream))
    assert [(use.name, use.arguments) for use in end.message.tool_calls] == uses
    assert end.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(
            b": OPENROUTER PROCESSING\n\n" + chunk({"content": "hi"}) + b"\n\n:\n\n" + chunk({}, "stop") + b"\n\n",
            id="comments, and no [DONE]",
        ),
        pytest.param(
            chunk({"content": "hi"}) + b"\r\n\r\n" + chunk({}, "stop") + b"\r\n\r\ndata: [DONE]\r\n\r\n", id="CRLF"
        ),
        pytest.param(chunk({"content": "hi"}) + b"\n" + chunk({}, "stop") + b"\ndata: [DONE]\n", id="no blank lines"),
        pytest.param(chunk({"content": "hi"}) + b"\n\n" + chunk({}, "stop"), id="no line end at the end"),
        pytest.param(
            b"event: message\nid: 1\n"
            + chunk({"content": "hi"}).replace(b"data: ", b"data:")
            + b"\n\ndata: [DONE]\n\n",
            id="event, id, no space, no finish reason",
        ),
        pytest.param(
            b'data: {"broken\n\ndata: 17\n\ndata: {"choices": null}\n\n' + chunk({"content": "hi"}, "stop") + b"\n\n",
            id="what is no chunk is passed over",
        ),
        pytest.param(chunk({"content": [{"type": "text", "text": "hi"}]}, "stop") + b"\n\n", id="content in parts"),
    ],
)
def test_streams_as_servers_really_send_them(stream: bytes) -> None:
    assert reply(raw(stream)).message.content == "hi"


def test_a_server_that_does_not_stream_is_read_whole() -> None:
    with ModelServer(answer=lambda request: text("whole")) as server:
        end = finished(ask(server.url, stream=False))
        assert "stream" not in server.requests[0].json
    assert end.message.content == "whole"
    assert end.usage == Usage(10, 5)


def test_a_whole_answer_to_a_streaming_request_is_taken() -> None:
    message = {"role": "assistant", "content": "whole", "tool_calls": None}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}})
    end = reply(Reply(body=body.encode()))
    assert (end.message.content, end.usage.prompt_tokens) == ("whole", 3)


def test_a_cut_stream_is_asked_again_and_says_so() -> None:
    with ModelServer(text("half of it", cut=True, usage=None, finish_reason=""), text("all of it")) as server:
        events = ask(server.url, policy=QUICK)
    again = [event for event in events if isinstance(event, Retrying)]
    assert len(again) == 1
    assert again[0].void
    assert "cut" in again[0].reason or "broke" in again[0].reason
    assert finished(events).message.content == "all of it"


def test_a_connection_lost_after_the_reply_loses_nothing() -> None:
    with ModelServer(text("complete", cut=True)) as server:
        assert finished(ask(server.url)).message.content == "complete"


def test_an_end_without_finish_is_a_cut() -> None:
    with (
        ModelServer(raw(chunk({"content": "hal"}) + b"\n\n")) as server,
        pytest.raises(Unavailable, match="ended before the reply was complete"),
    ):
        ask(server.url)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_busy_servers_are_asked_again(status: int) -> None:
    with ModelServer(error(status, "later"), error(status, "later"), text("now")) as server:
        events = ask(server.url, policy=QUICK)
        assert len(server.requests) == 3
    assert [event.void for event in events if isinstance(event, Retrying)] == [False, False]
    assert finished(events).message.content == "now"


def test_patience_ends() -> None:
    with ModelServer(*[error(503, "overloaded")] * 9) as server:
        with pytest.raises(Unavailable, match="scripted answered 503: overloaded") as caught:
            ask(server.url, policy=QUICK)
        assert len(server.requests) == 4
    assert caught.value.status == 503


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(form: str) -> None:
    value = "0.2" if form == "seconds" else formatdate(time.time() + 1, usegmt=True)
    with ModelServer(error(429, "slow down", retry_after=value), text("ok")) as server:
        events = ask(server.url, policy=QUICK)
    (waited,) = [event for event in events if isinstance(event, Retrying)]
    assert waited.delay == 0.2 if form == "seconds" else 0 <= waited.delay <= 1


def test_a_provider_that_asks_for_an_hour_is_not_waited_for() -> None:
    with (
        ModelServer(error(429, "quota", retry_after="3600")) as server,
        pytest.raises(Unavailable, match="429: quota"),
    ):
        ask(server.url, policy=QUICK)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "bad parameter", ModelRefused),
        (401, "wrong key", ModelRefused),
        (404, "no such model", ModelRefused),
        (400, "This model's maximum context length is 8192 tokens", ContextOverflow),
        (400, "the request exceeds the available context size", ContextOverflow),
    ],
)
def test_refusals_are_reported_at_once(status: int, message: str, kind: type[ModelError]) -> None:
    with ModelServer(error(status, message)) as server:
        with pytest.raises(kind, match=message) as caught:
            ask(server.url, policy=QUICK)
        assert len(server.requests) == 1
    assert caught.value.status == status
    assert type(caught.value) is kind


def test_the_key_is_never_repeated() -> None:
    with ModelServer(error(401, "Incorrect API key: secret-key")) as server, pytest.raises(ModelRefused) as caught:
        ask(server.url)
    assert "secret-key" not in caught.value.message
    assert "secret-key" not in str(caught.value)


def test_an_error_without_json_is_shown() -> None:
    with (
        ModelServer(Reply(status=403, body=b"<h1>no</h1>")) as server,
        pytest.raises(ModelRefused, match="<h1>no</h1>"),
    ):
        ask(server.url)


def test_an_error_in_the_stream_is_an_error() -> None:
    stream = chunk({"content": "a"}) + b'\n\ndata: {"error": {"code": 502, "message": "upstream died"}}\n\n'
    with ModelServer(raw(stream), text("whole")) as server:
        events = ask(server.url, policy=QUICK)
    assert [event.reason for event in events if isinstance(event, Retrying)] == ["scripted answered 502: upstream died"]
    assert finished(events).message.content == "whole"


def test_a_redirect_does_not_carry_the_key_away() -> None:
    with ModelServer() as elsewhere:
        moved = Reply(status=307, headers={"location": f"{elsewhere.url}/chat/completions"}, body=b"")
        with ModelServer(moved) as server, pytest.raises(ModelRefused, match="307"):
            ask(server.url)
        assert elsewhere.requests == []


def test_an_unreachable_server_is_reported_with_the_address() -> None:
    port = free_port()
    with pytest.raises(Unavailable, match=rf"cannot be reached at http://127.0.0.1:{port}/v1/chat/completions"):
        ask(f"http://127.0.0.1:{port}/v1")


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(ModelRefused, match="cannot be asked at 'nonsense/chat/completions'"):
        ask("nonsense")


def test_a_silent_server_is_given_up() -> None:
    gate = threading.Event()
    with ModelServer(text("never", gate=gate)) as server:
        with pytest.raises(Unavailable, match=r"sent nothing for 0\.05 s"):
            ask(server.url, first_token_seconds=0.05)
        gate.set()


def test_a_server_that_falls_silent_is_given_up() -> None:
    gate = threading.Event()
    with ModelServer(text("never", gate=gate, before_gate=2)) as server:
        with pytest.raises(Unavailable, match=r"sent nothing for 0\.05 s"):
            ask(server.url, idle_seconds=0.05)
        gate.set()


def test_parameters_a_server_refuses_are_left_out_and_stay_so() -> None:
    def answer(request: Any) -> Reply:
        for name in ("stream_options", "max_tokens"):
            if name in request.json:
                return error(400, f"Unsupported parameter: '{name}'")
        return text("fine")

    async def main(url: str) -> None:
        models = Models(providers={"openai": ProviderSettings(url)}, models={"m": ModelSettings(max_tokens=7)})
        for _ in range(2):
            async for _event in models.named("m").stream(HELLO):
                pass
        await models.close()

    with ModelServer(answer=answer) as server:
        asyncio.run(main(server.url))
        assert len(server.requests) == 4
        assert server.requests[-1].json["max_completion_tokens"] == 7


def test_leaving_early_ends_the_request() -> None:
    gate = threading.Event()

    async def main(url: str) -> None:
        models = Models(providers={"openai": ProviderSettings(url)})
        stream = models.named("m").stream(HELLO)
        await anext(stream)
        await stream.aclose()
        await models.close()

    with ModelServer(text("a long story", gate=gate, before_gate=3)) as server:
        asyncio.run(main(server.url))
        wait_until(server.requests[0].left.is_set)
        gate.set()


def test_one_connection_serves_one_reply_after_the_other() -> None:
    async def main(url: str) -> None:
        models = Models(providers={"openai": ProviderSettings(url)})
        for _ in range(3):
            async for _event in models.named("m").stream(HELLO):
                pass
        await models.close()

    with ModelServer(*[text("hi")] * 3) as server:
        asyncio.run(main(server.url))
        assert (len(server.requests), server.connections) == (3, 1)


def test_many_replies_at_once() -> None:
    async def main(url: str) -> list[str]:
        models = Models(providers={"openai": ProviderSettings(url)})

        async def one(number: int) -> str:
            request = ModelRequest((Message("user", str(number)),))
            events = [event async for event in models.named("m").stream(request)]
            return finished(events).message.text

        try:
            return await asyncio.gather(*(one(number) for number in range(40)))
        finally:
            await models.close()

    with ModelServer(answer=lambda request: text(f"answer {request.messages[0]['content']}")) as server:
        assert asyncio.run(main(server.url)) == [f"answer {number}" for number in range(40)]


def test_costs_from_settings_and_from_the_provider() -> None:
    priced = {"input_cost": 2.0, "output_cost": 10.0, "cached_cost": 1.0}
    end = reply(text("x", usage=(1_000_000, 100_000), cached=500_000), **priced)
    assert end.usage.cost == pytest.approx(0.5 * 2 + 0.5 * 1 + 0.1 * 10)
    assert reply(text("x", usage=(10, 10), cost=0.25), **priced).usage.cost == 0.25


def test_images_of_tools_follow_the_results_of_their_round() -> None:
    picture = Image("data:image/png;base64,AAAA")
    request = ModelRequest(
        (
            Message("user", "look"),
            Message("assistant", tool_calls=(ToolUse("1", "laptop__Read", "{}"), ToolUse("2", "ls", "{}"))),
            Message("tool", (Text("Image file: a.png"), picture), tool_call_id="1", name="laptop__Read"),
            Message("tool", "a.png", tool_call_id="2", name="ls"),
        )
    )
    with ModelServer(text("a cat"), text("blind")) as server:
        ask(server.url, request)
        ask(server.url, request, images=False)
        seen, unseen = (sent.messages for sent in server.requests)
    assert [message["role"] for message in seen] == ["user", "assistant", "tool", "tool", "user"]
    assert seen[2] == {"role": "tool", "tool_call_id": "1", "content": "Image file: a.png"}
    assert seen[4]["content"][1] == {"type": "image_url", "image_url": {"url": picture.url}}
    assert len(unseen) == 4
    assert unseen[2]["content"] == "Image file: a.png\n[an image (image/png) that this model cannot see]"
