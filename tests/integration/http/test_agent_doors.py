"""The OpenAI door, scopes, session tools and sub-agents, with a scripted model."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.agent.test_agent import House, assert_valid, open_house, roles
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, error, text

SETTINGS = """
[agents.main]
[agents.helper]
model = "other-model"
instructions = "You are the helper of the tests."
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("doors") / "home"
    home.mkdir(mode=0o700)
    (home / "farhand.toml").write_text(SETTINGS)
    yield from open_house(home)


@pytest.fixture(scope="module")
def laptop(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("laptop"), "laptop") as node:
        yield node


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[openai.OpenAI]:
    base_url = f"{house.gateway.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key=house.gateway.token, max_retries=0, timeout=30) as client:
        yield client


def token(house: House, *scopes: str) -> str:
    made = house.gateway.request("POST", "/v1/tokens", {"label": "test", "scopes": list(scopes)})
    return str(made.json()["token"])


# -- the OpenAI client ----------------------------------------------------------------------------------------


def test_models_are_the_agents(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["farhand", "farhand/main", "farhand/helper"]
    assert client.models.retrieve("farhand").id == "farhand"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-nothing")


def test_a_completion_is_the_answer_of_the_agent(house: House, client: openai.OpenAI) -> None:
    session = house.session(calls(("agents_list", {})), text("It is done.", usage=(20, 6)))
    done = client.chat.completions.create(
        model="farhand", messages=[{"role": "user", "content": f"[{session.key}] do it"}], user=session.key
    )
    assert done.choices[0].message.content == "It is done." and done.choices[0].finish_reason == "stop"
    assert done.usage is not None and (done.usage.prompt_tokens, done.usage.total_tokens) == (30, 41)
    assert roles(session.history()) == ["user", "assistant", "tool", "assistant"]


def test_a_completion_is_streamed_as_it_arrives(house: House, client: openai.OpenAI) -> None:
    gate = threading.Event()
    session = house.session(text("one two three", pieces=3, gate=gate, before_gate=2))
    stream = client.chat.completions.create(
        model="farhand",
        messages=[{"role": "user", "content": f"[{session.key}] count"}],
        user=session.key,
        stream=True,
        stream_options={"include_usage": True},
    )
    said = ""
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            said += chunk.choices[0].delta.content
            gate.set()  # the first piece is here before the model has said the rest
        last = chunk
    assert said == "one two three" and last.usage is not None and last.usage.completion_tokens == 5


def test_user_and_header_name_the_session_which_remembers(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("noted"), text("seven"))
    client.chat.completions.create(
        model="farhand", messages=[{"role": "user", "content": f"[{session.key}] remember 7"}], user=session.key
    )
    # The client sends its whole conversation; only what is new in it is added.
    client.chat.completions.create(
        model="farhand",
        messages=[
            {"role": "user", "content": "something of the client's own"},
            {"role": "assistant", "content": "noted"},
            {"role": "user", "content": "what was it?"},
        ],
        extra_headers={"X-Session-Key": session.key},
    )
    asked = [message["content"] for message in session.asked()[-1].messages[1:]]
    assert asked == [f"[{session.key}] remember 7", "noted", "what was it?"]


def test_without_a_session_the_client_keeps_the_conversation(house: House, client: openai.OpenAI) -> None:
    word = uuid.uuid4().hex
    house.script(word, text("a"), text("b"))
    for _ in range(2):
        client.chat.completions.create(
            model="farhand",
            messages=[
                {"role": "system", "content": f"Answer briefly, {word}."},
                {"role": "user", "content": f"one {word}"},
                {"role": "assistant", "content": "1"},
                {"role": "user", "content": "two"},
            ],
        )
    asked = house.asked(word)[-1].messages
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    assert asked[0]["content"].endswith(f"Answer briefly, {word}.")
    listed = house.gateway.get("/v1/sessions?limit=1000")["sessions"]
    assert not any(session["kind"] == "once" for session in listed)


def test_an_agent_is_a_model_with_settings_of_its_own(house: House, client: openai.OpenAI) -> None:
    word = uuid.uuid4().hex
    house.script(word, text("at your service"))
    client.chat.completions.create(
        model="farhand/helper", messages=[{"role": "user", "content": word}], user=f"u-{word}"
    )
    request = house.asked(word)[-1].json
    assert request["model"] == "other-model" and "helper of the tests" in request["messages"][0]["content"]
    assert house.gateway.get(f"/v1/sessions/agent:helper:u-{word}")["agent_id"] == "helper"


def test_a_picture_reaches_the_model(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("a dot"))
    url = "data:image/png;base64,iVBORw0KGgo="
    client.chat.completions.create(
        model="farhand",
        user=session.key,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"[{session.key}] what is it?"},
                    {"type": "image_url", "image_url": {"url": url}},
                ],
            }
        ],
    )
    assert url.encode() in session.asked()[-1].body


def test_commands_work_there_too(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("hi"))
    session.send()
    ask: Any = {"model": "farhand", "messages": [{"role": "user", "content": "/new"}], "user": session.key}
    assert "New" in (client.chat.completions.create(**ask).choices[0].message.content or "")
    streamed = client.chat.completions.create(**ask, stream=True)
    assert "New" in "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert session.history() == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": []}, 400),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400),
        ({"messages": [{"role": "user", "content": ""}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400),
        ({"model": "gpt-4o", "messages": [{"role": "user", "content": "x"}]}, 404),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, 400),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, 400),
        ({"messages": [{"role": "user", "content": "x"}], "user": "a/b"}, 400),
    ],
)
def test_a_request_that_cannot_be_served_says_why(house: House, body: Any, status: int) -> None:
    answer = house.gateway.request("POST", "/v1/chat/completions", {"model": "farhand", **body})
    assert answer.status == status and answer.json()["error"]["message"]


def test_a_failing_model_is_an_error_of_the_client(house: House, client: openai.OpenAI) -> None:
    session = house.session(error(401, "bad key"), error(401, "bad key"))
    ask: Any = {"model": "farhand", "messages": [{"role": "user", "content": session.key}], "user": session.key}
    with pytest.raises(openai.APIStatusError, match="bad key"):
        client.chat.completions.create(**ask)
    with pytest.raises(openai.APIError, match="bad key"):
        list(client.chat.completions.create(**ask, stream=True))


def test_a_client_that_hangs_up_stops_the_run(house: House, client: openai.OpenAI) -> None:
    session = house.session(text("a long story", pieces=3, gate=threading.Event(), before_gate=2))
    stream = client.chat.completions.create(
        model="farhand", messages=[{"role": "user", "content": session.key}], user=session.key, stream=True
    )
    next(iter(stream))
    wait_until(session.asked)
    stream.close()
    assert session.asked()[0].left.wait(10)
    wait_until(lambda: session.show()["state"] == "idle")


def test_a_client_that_hangs_up_while_it_waits_leaves_nothing_behind(house: House, client: openai.OpenAI) -> None:
    gate = threading.Event()
    session = house.session(text("first", gate=gate), text("after"))
    first = session.send("first", wait=0)["run_id"]
    wait_until(session.asked)
    stream = client.chat.completions.create(
        model="farhand", messages=[{"role": "user", "content": "second"}], user=session.key, stream=True
    )
    next(iter(stream))
    assert session.show()["waiting"] == 1
    stream.close()
    wait_until(lambda: session.show()["waiting"] == 0)
    gate.set()
    session.outcome(first)
    assert roles(session.history()) == ["user", "assistant"]


def test_without_a_model_a_chat_says_what_to_set(tmp_path: Path) -> None:
    nothing = {"OPENAI_API_KEY": None, "OPENAI_BASE_URL": None, "FARHAND_MODEL": None}
    with GatewayProcess(tmp_path / "home", env=nothing) as gateway:
        answer = gateway.request("POST", "/v1/sessions/main/messages", {"message": "hi", "wait_seconds": 20}).json()
        assert "FARHAND_MODEL" in answer["reply"] and answer["error"]["kind"] == "not_configured"
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.token, max_retries=0) as client:
            ask: Any = {"model": "farhand", "messages": [{"role": "user", "content": "hi"}]}
            said = client.chat.completions.create(**ask).choices[0].message.content
            streamed = "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
            )
        assert said == streamed == answer["reply"] and said.count(".") <= 2
        assert gateway.invoke("sessions_list")["ok"]


# -- scopes -------------------------------------------------------------------------------------------------------


def test_chat_alone_has_no_tools(house: House, laptop: NodeProcess) -> None:
    """A token that may only chat gets no shell by asking the agent for one."""
    only_chat = token(house, "chat")
    mark = laptop.workspace / "owned"
    session = house.session(
        calls(("laptop__Bash", {"command": f"touch {mark}"}), ("exec", {"command": f"touch {mark}"})), text("could not")
    )
    assert session.send(token=only_chat)["reply"] == "could not"
    assert session.asked()[0].tools == [] and not mark.exists()
    results = [message for message in session.history() if message["role"] == "tool"]
    assert len(results) == 2 and all(message["is_error"] for message in results)


def test_the_agent_may_what_its_caller_may(house: House, laptop: NodeProcess) -> None:
    (laptop.workspace / "read.txt").write_text("readable")
    reader = token(house, "chat", "tools.read")
    session = house.session(
        calls(("laptop__Read", {"path": "read.txt"}), ("laptop__Write", {"path": "w.txt", "content": "x"})),
        calls(("sessions_spawn", {"prompt": "x"}), ("gsv__SessionSend", {"sessionKey": "main", "message": "rm"})),
        text("read it"),
    )
    session.send(token=reader)
    failed = {message["name"]: message["is_error"] for message in session.history() if message["role"] == "tool"}
    assert len(failed) == 4 and [name for name, is_error in failed.items() if not is_error] == ["laptop__Read"]
    assert not (laptop.workspace / "w.txt").exists()


def test_a_narrower_message_does_not_join_a_wider_run(house: House) -> None:
    gate = threading.Event()
    session = house.session(calls(("agents_list", {}), gate=gate), text("to the owner"), text("to the guest"))
    first = session.send(wait=0)["run_id"]
    wait_until(session.asked)
    second = session.send("run it with the owner's hands", wait=0, token=token(house, "chat", "read"))["run_id"]
    gate.set()
    assert session.outcome(first)["reply"] == "to the owner"
    assert session.outcome(second)["reply"] == "to the guest"
    assert session.asked()[2].tools == []


def test_chat_needs_its_scope(house: House) -> None:
    reader = token(house, "read", "tools.exec")
    for method, path, body in [
        ("POST", "/v1/sessions/main/messages", {"message": "x"}),
        ("POST", "/v1/sessions/main/stop", {}),
        ("POST", "/v1/chat/completions", {"messages": []}),
    ]:
        assert house.gateway.request(method, path, body, token=reader).status == 403
    assert house.gateway.request("GET", "/v1/sessions", token=token(house, "chat")).status == 403


# -- session tools ------------------------------------------------------------------------------------------------


def content(house: House, tool: str, args: Any = None, **options: Any) -> str:
    answer = house.gateway.invoke(tool, args, **options)
    assert answer["ok"], answer
    return str(answer["result"]["content"])


def failure(house: House, tool: str, args: Any = None, **options: Any) -> tuple[str, str]:
    answer = house.gateway.invoke(tool, args, **options)
    assert not answer["ok"], answer
    return answer["error"]["kind"], answer["error"]["message"]


def test_agents_list(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("x", gate=gate))
    session.send(wait=0)
    wait_until(session.asked)
    lines = content(house, "agents_list").splitlines()
    assert lines == ["name=main\tmodel=scripted\tstatus=active", "name=helper\tmodel=other-model\tstatus=idle"]
    gate.set()


def test_sessions_list_history_and_status(house: House) -> None:
    session = house.session(calls(("agents_list", {}), ids=["c1"]), text("two\nlines", usage=(7, 3)))
    session.send("hello")
    time = r"\d{4}-\d\d-\d\dT[\d:.]+Z"
    line = rf"{session.key}\t\[{session.key}\] hello\tmessages=4\tcreated={time}\tupdated={time}"
    assert re.search(line, content(house, "sessions_list", {"limit": 1000}))
    assert len(content(house, "sessions_list", {"limit": 1}).splitlines()) == 1
    history = content(house, "sessions_history", {"session_id": session.key}).splitlines()
    assert history[0] == f"user\t[{session.key}] hello"
    assert history[1] == "assistant\t[tool_call name=agents_list id=c1]"
    assert history[2].startswith("tool\t[tool_result call=c1 error=false] name=main")
    assert history[3] == "assistant\ttwo\\nlines"
    assert len(content(house, "sessions_history", {"session_id": session.key, "limit": 1}).splitlines()) == 1
    status = dict(
        line.split("=", 1) for line in content(house, "sessions_status", session_key=session.key).splitlines()
    )
    assert list(status) == [
        "id", "title", "message_count", "prompt_tokens", "completion_tokens", "cost", "updated_at"
    ]  # fmt: skip
    assert (status["id"], status["message_count"], status["prompt_tokens"]) == (session.key, "4", "17")
    assert failure(house, "sessions_history", {"session_id": "nobody"})[0] == "not_found"
    assert failure(house, "sessions_history", {})[0] == "invalid_args"
    assert content(house, "sessions_status").startswith("id=main\n")


def test_sessions_send_starts_a_run(house: House) -> None:
    session = house.session(text("first"), text("second"))
    session.send()
    reported = content(house, "sessions_send", {"session_id": session.key, "content": "go on"})
    assert reported == f"message sent to session {session.key}"
    wait_until(lambda: len(session.history()) == 4)
    assert failure(house, "sessions_send", {"session_id": "nobody", "content": "x"})[0] == "not_found"
    assert failure(house, "sessions_send", {"session_id": session.key})[0] == "invalid_args"


def test_native_sessions_list(house: House) -> None:
    session = house.session(text("x"))
    session.send()
    listed = house.gateway.invoke("gsv__SessionsList", {"limit": 1, "messageLimit": 5})["result"]
    assert (listed["limit"], listed["offset"], len(listed["sessions"])) == (1, 0, 1) and listed["count"] > 1
    newest = listed["sessions"][0]
    assert newest["sessionKey"] == session.key and newest["messageCount"] == 2
    assert [message["role"] for message in newest["messages"]] == ["user", "assistant"]
    assert "messages" not in house.gateway.invoke("gsv__SessionsList")["result"]["sessions"][0]
    assert house.gateway.invoke("gsv__SessionsList", {"limit": 5000})["result"]["limit"] == 100


def test_native_session_send_waits_for_this_messages_reply(house: House) -> None:
    session = house.session(text("an old reply"), text("the reply to this"))
    session.send()
    sent = house.gateway.invoke("gsv__SessionSend", {"sessionKey": session.key, "message": "now?"})["result"]
    assert (sent["status"], sent["reply"], sent["sessionKey"]) == ("ok", "the reply to this", session.key)
    assert sent["runId"]


def test_native_session_send_need_not_wait(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("x", gate=gate), text("y"))
    send = {"sessionKey": session.key, "message": session.key}
    accepted = house.gateway.invoke("gsv__SessionSend", {**send, "waitSeconds": 0})["result"]
    assert accepted["status"] == "accepted" and accepted["queued"] is False
    wait_until(session.asked)
    late = house.gateway.invoke("gsv__SessionSend", {**send, "waitSeconds": 0.1})["result"]
    assert late["status"] == "timeout" and late["waitedSeconds"] == 0.1 and "reply" not in late
    gate.set()
    assert failure(house, "gsv__SessionSend", {"sessionKey": " ", "message": "x"})[0] == "invalid_args"
    assert failure(house, "gsv__SessionSend", {"sessionKey": "main", "message": ""})[0] == "invalid_args"


def test_two_sessions_that_wait_for_each_other_do_not_hang(house: House) -> None:
    one, other = house.session(), house.session()
    back = {"sessionKey": one.key, "message": other.key, "waitSeconds": 100}
    there = {"sessionKey": other.key, "message": other.key, "waitSeconds": 100}
    house.script(one.key, calls(("gsv__SessionSend", there)), text("one is done"), text("one again"))
    house.script(other.key, calls(("gsv__SessionSend", back)), text("other is done"))
    assert one.send()["reply"] == "one is done"
    results = [json.loads(message["content"]) for message in other.history() if message["role"] == "tool"]
    assert results[0]["status"] == "accepted"


# -- sub-agents ---------------------------------------------------------------------------------------------------


def test_sub_agents_work_side_by_side_with_six_tools(house: House) -> None:
    gate = threading.Event()
    session = house.session()
    words = [uuid.uuid4().hex for _ in range(3)]
    spawns = [("sessions_spawn", {"prompt": word, "title": f"t-{word}"}) for word in words]
    house.script(session.key, calls(*spawns, ("subagents", {})), text("all found"))
    for word in words:
        house.script(word, calls(("sessions_spawn", {"prompt": "deeper"}), ("exec", {"command": "id"})))
        house.script(word, text(f"found {word}", gate=gate, usage=(100, 10)))
    run_id = session.send("research", wait=0)["run_id"]

    def live() -> list[str]:
        return content(house, "subagents", session_key=session.key).splitlines()

    wait_until(lambda: all(len(house.asked(word)) >= 2 for word in words), what="three sub-agents at once")
    assert len(live()) == 3
    assert all(re.fullmatch(r"id=agent:main:sub:\S+\ttitle=t-\w+\tstarted_at=\S+Z", line) for line in live())
    gate.set()
    assert session.outcome(run_id)["reply"] == "all found"
    results = [message["content"] for message in session.history() if message["role"] == "tool"]
    assert all(any(f"found {word}" == result for result in results) for word in words)
    assert_valid(session.history())
    asked = next(request for request in house.asked(words[0]) if session.key not in request.body.decode())
    assert set(asked.tools) <= {"read", "grep", "glob", "ls", "memory_search", "memory_get"} and "read" in asked.tools
    child = next(
        one for one in house.gateway.get("/v1/sessions?limit=999")["sessions"] if one["title"] == f"t-{words[0]}"
    )
    assert (child["kind"], child["parent_key"]) == ("child", session.key)
    refused = house.gateway.get(f"/v1/sessions/{child['key']}/history")["messages"]
    assert [one["content"].startswith("tool not found") for one in refused if one["role"] == "tool"] == [True, True]
    # What they cost is counted to their parent: its own two replies, and two of each child.
    assert session.show()["usage"]["prompt_tokens"] == 2 * 10 + 3 * 110
    assert live() == []


def test_stopping_the_parent_stops_its_sub_agents(house: House) -> None:
    session, word = house.session(), uuid.uuid4().hex
    house.script(session.key, calls(("sessions_spawn", {"prompt": word})))
    house.script(word, text("never", gate=threading.Event()))
    session.send(wait=0)
    wait_until(lambda: len(house.asked(word)) == 1)
    session.stop()
    wait_until(lambda: content(house, "subagents", session_key=session.key) == "")
    assert house.asked(word)[0].left.wait(5)
    assert_valid(session.history())


def test_a_failing_sub_agent_is_a_failed_call(house: House) -> None:
    word = uuid.uuid4().hex
    house.script(word, error(401, "no key"))
    kind, message = failure(house, "sessions_spawn", {"prompt": word})
    assert kind == "failed" and "no key" in message and "agent:main:sub:" in message
    assert failure(house, "sessions_spawn", {"prompt": " "})[0] == "invalid_args"


def test_a_sub_agent_has_its_time_and_no_more(tmp_path: Path) -> None:
    with contextlib.contextmanager(open_house)(tmp_path / "home", FARHAND_AGENT_SUB_AGENT_SECONDS="1") as house:
        house.script("slowly", calls(("ls", {"path": "."})), text("never", gate=threading.Event()))
        kind, message = failure(house, "sessions_spawn", {"prompt": "slowly"})
        assert kind == "timeout" and "1 s" in message
        key = message.rpartition(" ")[2]
        assert_valid(house.gateway.get(f"/v1/sessions/{key}/history")["messages"])
        assert content(house, "subagents") == ""
