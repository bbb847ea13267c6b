"""Tools of the client, and its parameters for the model, through the unmodified `openai` client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.agent.test_agent import TWENTY, House, Session, assert_valid, open_house
from tests.support.harness import wait_until
from tests.support.model_server import Reply, calls, text

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("clients") / "home", FARHAND_AGENT_MAX_ROUNDS="3")


@pytest.fixture
def client(house: House) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{house.gateway.url}/v1", api_key=house.gateway.token, max_retries=0)


def weather(city: str, identity: str) -> Reply:
    return calls(("get_weather", {"city": city}), ids=[identity])


def said(session: Session, words: str = "hello") -> dict[str, Any]:
    return {"role": "user", "content": f"[{session.key}] {words}"}


def create(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="farhand", messages=messages, **more)


def answer(identity: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content}


# -- tools of the client ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_a_call_of_the_clients_tool_comes_back_to_it_and_its_result_is_answered(
    house: House, client: openai.OpenAI, kept: bool
) -> None:
    session = house.session(weather("Graz", "call_1"), text("It rains in Graz."))
    more: Any = {"user": session.key} if kept else {}
    messages: list[Any] = [said(session, "the weather?")]
    first = create(client, messages, tools=[WEATHER], **more).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    (call,) = first.message.tool_calls
    assert (call.id, call.type, call.function.name) == ("call_1", "function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Graz"}
    messages += [first.message, answer(call.id, "rain, 12 degrees")]
    second = create(client, messages, tools=[WEATHER], **more).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It rains in Graz.")
    asked = session.asked()
    assert asked[0].tools == [*TWENTY, "tool_search", "get_weather"] == asked[1].tools
    assert [one["role"] for one in asked[1].messages] == ["system", "user", "assistant", "tool"]
    assert asked[1].messages[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "rain, 12 degrees"}
    if kept:
        assert_valid(session.history())
        assert [one["role"] for one in session.history()] == ["user", "assistant", "tool", "assistant"]


def test_a_kept_conversation_needs_only_the_results(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_2"), text("dry"), text("yes"))
    create(client, [said(session)], tools=[WEATHER], user=session.key)
    found = create(client, [answer("call_2", "sun")], user=session.key)
    assert found.choices[0].message.content == "dry"
    assert "get_weather" not in session.asked()[1].tools
    assert create(client, [said(session, "sure?")], user=session.key).choices[0].message.content == "yes"
    assert_valid(session.history())


def test_results_and_words_may_come_together(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_3"), text("ok"))
    create(client, [said(session)], tools=[WEATHER], user=session.key)
    create(client, [answer("call_3", "sun"), said(session, "and tomorrow?")], user=session.key)
    assert [one["role"] for one in session.asked()[1].messages[-2:]] == ["tool", "user"]


def test_calls_stream_to_the_client(house: House, client: openai.OpenAI) -> None:
    both = calls(("get_weather", {"city": "Graz"}), ("get_weather", {"city": "Linz"}), say="I look.", ids=["a1", "a2"])
    session = house.session(both)
    chunks = list(create(client, [said(session)], tools=[WEATHER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
    found = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [(part.index, part.id, part.function.name) for part in found] == [
        (0, "a1", "get_weather"),
        (1, "a2", "get_weather"),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_agents_own_calls_beside_them_are_made(house: House, client: openai.OpenAI) -> None:
    mixed = calls(("ls", {"path": "."}), ("get_weather", {"city": "Graz"}), say="Both.", ids=["own", "theirs"])
    session = house.session(calls(("agents_list", {})), mixed, text("done"))
    chunks = list(create(client, [said(session)], tools=[WEATHER], user=session.key, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip() == "Both."
    found = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.id for part in found] == ["theirs"]
    create(client, [answer("theirs", "sun")], user=session.key)
    reported = [one["tool_call_id"] for one in session.asked()[-1].messages if one["role"] == "tool"]
    assert reported[1:] == ["own", "theirs"]
    assert_valid(session.history())


def test_a_call_that_the_client_skips_gets_an_error(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_4"), text("then not"))
    create(client, [said(session)], tools=[WEATHER], user=session.key)
    create(client, [said(session, "forget it")], user=session.key)
    result = session.asked()[1].messages[-2]
    assert result["role"] == "tool" and "gave no result" in result["content"]
    assert_valid(session.history())


def test_a_call_waits_for_its_result_over_a_kill(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_5"), text("dry"))
    create(client, [said(session)], tools=[WEATHER], user=session.key)
    house.gateway.kill()
    house.gateway.start()
    assert create(client, [answer("call_5", "sun")], user=session.key).choices[0].message.content == "dry"
    assert_valid(session.history())


def test_the_same_request_again_has_the_same_calls(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_6"))
    more: Any = {"tools": [WEATHER], "user": session.key, "extra_headers": {"Idempotency-Key": session.key}}
    first = create(client, [said(session)], **more)
    house.gateway.kill()
    house.gateway.start()
    assert create(client, [said(session)], **more).choices[0].message == first.choices[0].message
    with pytest.raises(openai.ConflictError):
        create(client, [said(session)], **{**more, "tools": []})


def test_the_same_request_with_its_names_in_another_order_is_the_same(house: House, client: openai.OpenAI) -> None:
    session = house.session(weather("Graz", "call_10"))
    more: Any = {"user": session.key, "extra_headers": {"Idempotency-Key": session.key}}
    function = WEATHER["function"]
    turned = {
        **function,
        "parameters": {name: function["parameters"][name] for name in reversed(function["parameters"])},
    }
    first = create(client, [said(session)], tools=[WEATHER], **more)
    again = create(client, [said(session)], tools=[{"type": "function", "function": turned}], **more)
    assert again.choices[0].message == first.choices[0].message


def test_calls_that_are_none_go_back_to_the_model(house: House, client: openai.OpenAI) -> None:
    session = house.session(calls(("get_weather", "{broken")), weather("Graz", "call_7"))
    found = create(client, [said(session)], tools=[WEATHER]).choices[0]
    assert found.message.tool_calls[0].id == "call_7"
    assert "not valid JSON" in session.asked()[1].messages[-1]["content"]


def test_the_clients_tool_wins_over_one_of_the_same_name(house: House, client: openai.OpenAI) -> None:
    own = {"type": "function", "function": {"name": "read", "description": "Mine.", "parameters": {}}}
    session = house.session(calls(("read", {"path": "x"})))
    assert create(client, [said(session)], tools=[own]).choices[0].message.tool_calls[0].function.name == "read"
    sent = [one for one in session.asked()[0].json["tools"] if one["function"]["name"] == "read"]
    assert [one["function"]["description"] for one in sent] == ["Mine."]


def test_a_choice_of_tools_is_obeyed(house: House, client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice, sent in (("required", "required"), (named, named)):
        session = house.session(weather("Graz", "call_8"))
        create(client, [said(session)], tools=[WEATHER], tool_choice=choice)
        assert session.asked()[0].tools == ["get_weather"] and session.asked()[0].json["tool_choice"] == sent
    session = house.session(text("no"))
    create(client, [said(session)], tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in session.asked()[0].tools and "tool_choice" not in session.asked()[0].json


def test_who_may_only_chat_may_lend_tools(house: House) -> None:
    token = house.gateway.request("POST", "/v1/tokens", {"name": "talker", "scopes": ["chat"]}).json()["token"]
    talker = openai.OpenAI(base_url=f"{house.gateway.url}/v1", api_key=token, max_retries=0)
    session = house.session(weather("Graz", "call_9"))
    assert create(talker, [said(session)], tools=[WEATHER]).choices[0].finish_reason == "tool_calls"
    assert session.asked()[0].tools == ["get_weather"]


def test_stopping_answers_what_would_have_been_the_clients(house: House, client: openai.OpenAI) -> None:
    session = house.session(calls(("exec", {"command": "sleep 4434567"}), ("get_weather", {"city": "Graz"})))
    failures: list[Exception] = []

    def ask() -> None:
        try:
            create(client, [said(session)], tools=[WEATHER], user=session.key)
        except openai.APIStatusError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: session.asked() and any(one.get("tool_calls") for one in session.history()))
    session.stop()
    asking.join(60)
    assert len(failures) == 1
    assert_valid(session.history())


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": "no good"}}]},
        {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [WEATHER], "tool_choice": "always"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
        {"functions": [{"name": "old"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "?", "content": ""}]},
        {"messages": [{"role": "tool", "content": "no id"}]},
        {"messages": [{"role": "tool", "tool_call_id": "nobody", "content": "x"}], "user": "fresh-session"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        {"temperature": 3},
        {"max_tokens": 0},
        {"top_p": "much"},
        {"logprobs": True},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "endless"},
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(house: House, body: Any) -> None:
    base = {"model": "farhand", "messages": [{"role": "user", "content": "x"}]}
    asked = len(house.model.requests)
    found = house.gateway.request("POST", "/v1/chat/completions", {**base, **body})
    assert found.status in (400, 404) and found.json()["error"]["message"], found
    assert len(house.model.requests) == asked


# -- wishes for the model -----------------------------------------------------------------------------------------


def test_parameters_of_the_client_reach_the_model_at_every_step(house: House, client: openai.OpenAI) -> None:
    session = house.session(calls(("agents_list", {})), text("ok"))
    wishes: Any = {
        "temperature": 0.25,
        "top_p": 0.5,
        "stop": ["END"],
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "response_format": {"type": "json_object"},
        "max_completion_tokens": 77,
        "reasoning_effort": "low",
    }
    messages: Any = [
        {"role": "system", "content": "Speak French."},
        {"role": "developer", "content": "And briefly."},
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "one"},
        said(session, "two"),
    ]
    create(client, messages, **wishes, metadata={"a": "b"}, store=False, service_tier="auto")
    for request in session.asked():
        sent = {name: request.json.get(name) for name in wishes if name != "max_completion_tokens"}
        assert sent == {name: value for name, value in wishes.items() if name != "max_completion_tokens"}
        assert request.json["max_tokens"] == 77 and not {"metadata", "store", "service_tier"} & set(request.json)
        assert request.messages[0]["content"].endswith("Speak French.\n\nAnd briefly.")
    first = session.asked()[0].messages
    assert [one["role"] for one in first] == ["system", "user", "assistant", "user"]
    assert first[-1]["content"] == f"one\n\n[{session.key}] two"


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_finish_reason_is_the_models(house: House, client: openai.OpenAI, reason: str, stream: bool) -> None:
    session = house.session(text("so far", finish_reason=reason))
    found = create(client, [said(session)], user=session.key, stream=stream)
    choice = list(found)[-1].choices[0] if stream else found.choices[0]
    assert choice.finish_reason == reason
    run = session.gateway.get(f"/v1/runs/{session.history()[0]['run_id']}")
    assert run["finish_reason"] == reason


def test_a_limit_on_rounds_is_a_length(house: House, client: openai.OpenAI) -> None:
    session = house.session(*(calls(("agents_list", {})) for _ in range(3)))
    found = create(client, [said(session)]).choices[0]
    assert found.finish_reason == "length" and "3 rounds" in found.message.content


def test_usage_is_in_the_last_chunk_and_null_before(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("counted", usage=(70, 7)), text("not"))
    *others, last = create(client, [said(session)], stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (70, 7)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others)
    assert all("usage" not in chunk.model_fields_set for chunk in create(client, [said(session)], stream=True))
