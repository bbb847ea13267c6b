"""The Responses API, used by the unmodified `openai` client, with a scripted model."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.integration.agent.test_agent import House, assert_valid, open_house
from tests.support.harness import wait_until
from tests.support.model_server import calls, error, text

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("responses") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text('[agents.main]\n[agents.helper]\nmodel = "other-model"\n')
    yield from open_house(home)


def client_of(house: House, token: str = "") -> openai.OpenAI:
    key = token or house.gateway.token
    return openai.OpenAI(base_url=f"{house.gateway.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[openai.OpenAI]:
    with client_of(house) as client:
        yield client


@pytest.fixture
def word() -> str:
    return uuid.uuid4().hex


def token(house: House, *scopes: str) -> str:
    made = house.gateway.request("POST", "/v1/tokens", {"label": "test", "scopes": list(scopes)})
    return str(made.json()["token"])


def called(response: Response) -> ResponseFunctionToolCall:
    call = response.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    return call


def test_a_repeated_key_gets_the_first_answer(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, text("once"))
    headers = {"Idempotency-Key": word}
    asked: Any = {"model": "farhand", "input": f"{word} do it"}
    first, again = (client.responses.create(**asked, extra_headers=headers) for _ in range(2))
    assert first.output_text == again.output_text == "once" and first.id == again.id
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="farhand", input=f"{word} another", extra_headers=headers)
    house.script(f"{word}-chat", text("twice"))
    said: Any = [{"role": "user", "content": "hello"}, {"role": "user", "content": f"{word}-chat"}]
    headers = {"Idempotency-Key": f"{word}-chat"}
    one, two = (client.chat.completions.create(model="farhand", messages=said, extra_headers=headers) for _ in range(2))
    assert one.choices[0].message.content == two.choices[0].message.content == "twice" and one.id == two.id
    with pytest.raises(openai.ConflictError):
        client.chat.completions.create(model="farhand", messages=said[1:], extra_headers=headers)


# -- one answer -----------------------------------------------------------------------------------------------


def test_a_response_is_the_answer_of_the_agent(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, calls(("agents_list", {}), say="I look."), text("It is done.", usage=(20, 6)))
    done = client.responses.create(
        model="farhand", input=f"{word} do it", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert done.status == "completed" and done.output_text == "I look.\n\nIt is done."
    assert [item.phase for item in done.output if item.type == "message"] == ["commentary", "final_answer"]
    assert done.usage is not None and (done.usage.input_tokens, done.usage.total_tokens) == (30, 41)
    assert (done.instructions, done.metadata, done.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    asked = house.asked(word)[-1]
    assert asked.json["temperature"] == 0.5 and asked.messages[0]["content"].endswith("Be brief.")
    # Strictly: the client itself does not validate what it gets.
    pydantic.TypeAdapter(Response).validate_json(done.to_json())


def test_the_events_of_a_stream_are_those_of_openai(house: House, client: openai.OpenAI, word: str) -> None:
    gate = threading.Event()
    house.script(word, calls(("agents_list", {}), say="First."), text("one two", pieces=2, gate=gate, before_gate=2))
    kinds = []
    with client.responses.stream(model="farhand", input=f"{word} count") as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_item.added" and event.output_index == 1:
                gate.set()  # the second message began before the model has said all of it
        final = stream.get_final_response()
    message = [
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    deltas = [kind for place, kind in enumerate(kinds) if kind not in kinds[place - 1 : place]]
    expected = [kind for place, kind in enumerate(message) if kind not in message[place - 1 : place]]
    assert deltas == ["response.created", "response.in_progress", *expected, *expected, "response.completed"]
    assert final.output_text == "First.\n\none two" and final.usage is not None
    fetched = client.responses.retrieve(final.id)
    assert [item.id for item in fetched.output] == [item.id for item in final.output]  # type: ignore[union-attr]
    assert fetched.output_text == final.output_text


def test_images_and_parts_reach_the_model(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, text("a pixel"))
    client.responses.create(
        model="farhand",
        input=[
            {"role": "developer", "content": f"You see well, {word}."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": f"{word} what is it?"},
                    {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                ],
            },
        ],
    )
    asked = house.asked(word)[-1].messages
    assert asked[0]["content"].endswith(f"You see well, {word}.")
    assert [part["type"] for part in asked[-1]["content"]] == ["text", "image_url"]
    assert asked[-1]["content"][1]["image_url"]["url"] == PIXEL


def test_structured_output_is_passed_to_the_model(house: House, client: openai.OpenAI, word: str) -> None:
    class City(pydantic.BaseModel):
        name: str

    house.script(word, text('{"name": "Oslo"}'))
    parsed = client.responses.parse(model="farhand", input=word, text_format=City)
    assert parsed.output_parsed == City(name="Oslo")
    assert house.asked(word)[-1].json["response_format"]["json_schema"]["name"] == "City"


def test_an_agent_is_a_model(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, text("yes"))
    assert client.responses.create(model="farhand/helper", input=word).model == "farhand/helper"
    assert house.asked(word)[-1].json["model"] == "other-model"


def test_a_session_key_names_a_stored_session(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("noted"), text("seven"))
    headers = {"X-Session-Key": session.key}
    client.responses.create(model="farhand", input=f"[{session.key}] remember 7", extra_headers=headers)
    client.responses.create(model="farhand", input="what was it?", extra_headers=headers)
    assert [message["content"] for message in session.asked()[-1].messages[1:]] == [
        f"[{session.key}] remember 7",
        "noted",
        "what was it?",
    ]


# -- tools of the client --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_the_client_are_called_by_it(house: House, client: openai.OpenAI, word: str, stream: bool) -> None:
    house.script(word, calls(("weather", {"city": "Oslo"}), say="I ask."), text("It rains in Oslo."))
    if stream:
        with client.responses.stream(model="farhand", input=f"{word} weather?", tools=[WEATHER]) as events:
            kinds = [event.type for event in events]
            first: Response = events.get_final_response()
        assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
    else:
        first = client.responses.create(model="farhand", input=f"{word} weather?", tools=[WEATHER])
    call = called(first)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    second = client.responses.create(
        model="farhand",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tools=[WEATHER],
    )
    assert second.output_text == "It rains in Oslo." and second.previous_response_id == first.id
    asked = house.asked(word)[-1].messages
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    assert asked[-1]["content"] == "rain"
    assert_valid(asked)


def test_a_client_that_keeps_the_conversation_sends_all_of_it(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, calls(("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})), text("Wet and dry."))
    items: list[Any] = [{"role": "user", "content": f"{word} weather?"}]
    first = client.responses.create(model="farhand", input=items, tools=[WEATHER], store=False)
    items += [item.to_dict() for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.arguments}
        for item in first.output
        if isinstance(item, ResponseFunctionToolCall)
    ]
    second = client.responses.create(model="farhand", input=items, tools=[WEATHER], store=False)
    assert second.output_text == "Wet and dry."
    asked = house.asked(word)[-1].messages
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool", "tool"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_custom_tools_take_plain_text(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, calls(("patch", {"input": "*** Begin"})), text("Patched."))
    tool: Any = {"type": "custom", "name": "patch", "description": "Apply a patch."}
    first = client.responses.create(model="farhand", input=f"{word} patch it", tools=[tool])
    call = first.output[-1]
    assert call.type == "custom_tool_call" and call.input == "*** Begin"
    second = client.responses.create(
        model="farhand",
        previous_response_id=first.id,
        input=[{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}],
        tools=[tool],
    )
    assert second.output_text == "Patched."


def test_tools_in_a_namespace_keep_their_names(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, calls(("sky__weather", {"city": "Oslo"})), text("It rains."))
    tool: Any = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [WEATHER]}
    first = client.responses.create(model="farhand", input=word, tools=[tool])
    call = called(first)
    assert (call.namespace, call.name) == ("sky", "weather")
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [{"role": "user", "content": word}, call.to_dict(), answer]
    assert client.responses.create(model="farhand", input=history, tools=[tool]).output_text == "It rains."
    assert house.asked(word)[-1].messages[2]["tool_calls"][0]["function"]["name"] == "sky__weather"


# -- earlier responses ----------------------------------------------------------------------------------------


def test_a_response_can_be_continued_twice_and_after_a_restart(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, calls(("agents_list", {})), text("noted"), text("left"), text("right"), text("later"))
    first = client.responses.create(model="farhand", input=f"{word} remember 7", instructions="Once only.")
    for way in ("left", "right"):
        branch = client.responses.create(model="farhand", input=f"go {way}", previous_response_id=first.id)
        assert branch.output_text == way
        asked = house.asked(word)[-1].messages
        # The agent's own tool calls are part of the conversation; the instructions and the other branch are not.
        assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert "Once only." not in asked[0]["content"] and asked[-1]["content"] == f"go {way}"
    house.gateway.kill()
    house.gateway.start()
    assert client.responses.retrieve(first.id).output_text == "noted"
    assert client.responses.create(model="farhand", input="on", previous_response_id=first.id).output_text == "later"


def test_a_response_belongs_to_the_credential_that_made_it(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, text("mine"))
    made = client.responses.create(model="farhand", input=word)
    with client_of(house, token(house, "chat", "read")) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError) as refused:
            other.responses.create(model="farhand", input="go on", previous_response_id=made.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    with client_of(house, token(house, "read")) as reader, pytest.raises(openai.PermissionDeniedError):
        reader.responses.retrieve(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_in_the_background_is_fetched_and_cancelled(house: House, client: openai.OpenAI, word: str) -> None:
    gate = threading.Event()
    house.script(word, text("slowly done", gate=gate), text("never", gate=threading.Event()))
    begun = client.responses.create(model="farhand", input=word, background=True)
    assert begun.status == "in_progress"
    gate.set()
    wait_until(lambda: client.responses.retrieve(begun.id).status == "completed", what="the end of the response")
    assert client.responses.retrieve(begun.id).output_text == "slowly done"
    second = client.responses.create(model="farhand", input=word, background=True)
    assert client.responses.cancel(second.id).status == "cancelled"


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "model": "gpt-nothing"}, "model"),
        ({"input": "x", "temperature": "hot"}, "temperature"),
        ({"input": "x", "temperature": 9}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "x", "tools": [{"type": "computer"}]}, "tools[0].type"),
        ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "x", "previous_response_id": "resp_nothing"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "x" * 10_000}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "none", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_parameter(house: House, body: Any, param: str) -> None:
    answer = house.gateway.request("POST", "/v1/responses", body)
    problem = answer.json()["error"]
    assert answer.status == (404 if param == "model" else 400), answer
    assert (problem["type"], problem["param"]) == ("invalid_request_error", param), problem


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "x"}], "top_p": 7}, "top_p"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "gpt-nothing"}, "model"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_of_chat_completions_name_the_parameter(house: House, body: Any, param: str) -> None:
    problem = house.gateway.request("POST", "/v1/chat/completions", body).json()["error"]
    assert (problem["type"], problem["param"]) == ("invalid_request_error", param), problem


def test_a_failed_model_is_an_error(house: House, client: openai.OpenAI, word: str) -> None:
    house.script(word, error(400, "no such thing"), error(400, "no such thing"))
    with pytest.raises(openai.InternalServerError) as failed:
        client.responses.create(model="farhand", input=word)
    assert failed.value.type == "server_error"
    with client.responses.stream(model="farhand", input=word) as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed" and last.response.error is not None
