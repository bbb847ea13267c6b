"""Sessions and runs over HTTP, with a scripted model: one test for each promise."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farhand.agent.tokens import text_tokens
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, Plugin, wait_until
from tests.support.model_server import ModelServer, Reply, Request, calls, error, text


class House:
    """A gateway with a model that follows scripts, one for each session: found by a word in what was said to it."""

    def __init__(self, gateway: GatewayProcess, model: ModelServer, scripts: dict[str, list[Reply]]) -> None:
        self.gateway = gateway
        self.model = model
        self._scripts = scripts

    def session(self, *replies: Reply) -> Session:
        """A new session in which the model gives these replies."""
        key = f"s-{uuid.uuid4().hex[:12]}"
        self._scripts[key] = list(replies)
        return Session(self, key)

    def script(self, word: str, *replies: Reply) -> None:
        self._scripts.setdefault(word, []).extend(replies)

    def asked(self, word: str) -> list[Request]:
        return [request for request in self.model.requests if word.encode() in request.body]


class Session:
    def __init__(self, house: House, key: str) -> None:
        self.house = house
        self.key = key
        self.gateway = house.gateway

    def send(self, message: str = "hello", *, wait: float = 20, token: str = "owner", **more: Any) -> Any:
        """Say something; the answer, which must be good."""
        body = {"message": f"[{self.key}] {message}", "wait_seconds": wait, **more}
        answer = self.gateway.request("POST", f"/v1/sessions/{self.key}/messages", body, token=token)
        assert answer.status == 200, answer
        return answer.json()

    def command(self, text: str) -> str:
        answer = self.gateway.request(
            "POST", f"/v1/sessions/{self.key}/messages", {"message": text, "wait_seconds": 20}
        ).json()
        return str(answer["reply"])

    def stop(self) -> Any:
        return self.gateway.request("POST", f"/v1/sessions/{self.key}/stop", {}).json()

    def history(self, **query: Any) -> list[Any]:
        more = "&".join(f"{name}={value}" for name, value in query.items())
        return list(self.gateway.get(f"/v1/sessions/{self.key}/history?limit=1000&{more}")["messages"])

    def show(self) -> Any:
        return self.gateway.get(f"/v1/sessions/{self.key}")

    def outcome(self, run_id: str, seconds: float = 20) -> Any:
        def over() -> Any:
            found = self.gateway.get(f"/v1/runs/{run_id}")
            return found if found["state"] not in ("queued", "running") else None

        return wait_until(over, seconds, f"the end of run {run_id}")

    def asked(self) -> list[Request]:
        return self.house.asked(self.key)


def open_house(home: Path, *, arguments: tuple[str, ...] = (), **env: str | None) -> Iterator[House]:
    scripts: dict[str, list[Reply]] = {}

    def answer(request: Request) -> Reply | None:
        said = json.dumps([one for one in request.messages if one["role"] == "user"])
        for word, replies in scripts.items():
            if word in said and replies:
                return replies.pop(0)
        return error(400, "no script fits")

    if not (home / "farhand.toml").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "farhand.toml").write_text("[models.other-model]\n")
    with (
        ModelServer(answer=answer) as model,
        GatewayProcess(home, *arguments, env={**model.environment, **env}) as gateway,
    ):
        yield House(gateway, model, scripts)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("agent") / "home")


@pytest.fixture(scope="module")
def laptop(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(house.gateway, tmp_path_factory.mktemp("laptop"), "laptop") as node:
        yield node


def roles(history: list[Any]) -> list[str]:
    return [message["role"] for message in history]


def assert_valid(history: list[Any]) -> None:
    """Every tool call has exactly one result, after it."""
    asked = [use["id"] for message in history for use in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in history if message["role"] == "tool"]
    assert sorted(asked) == sorted(answered), history
    seen: set[str] = set()
    for message in history:
        seen |= {use["id"] for use in message.get("tool_calls", ())}
        assert message["role"] != "tool" or message["tool_call_id"] in seen


# -- messages and runs --------------------------------------------------------------------------------------


def test_a_message_is_answered_and_both_are_in_the_history(house: House) -> None:
    session = house.session(text("It is four.", usage=(100, 7)))
    answer = session.send("two and two?")
    assert answer["reply"] == "It is four." and answer["state"] == "ok" and answer["run_id"]
    history = session.history()
    assert roles(history) == ["user", "assistant"]
    assert history[1]["content"] == "It is four." and history[0]["run_id"] == answer["run_id"]
    shown = session.show()
    assert (shown["message_count"], shown["usage"]["prompt_tokens"], shown["usage"]["completion_tokens"]) == (2, 100, 7)
    assert any(entry["key"] == session.key for entry in house.gateway.get("/v1/sessions")["sessions"])


def test_the_conversation_continues_in_its_session_and_in_no_other(house: House) -> None:
    one, other = house.session(text("first"), text("second")), house.session(text("else"))
    one.send("alpha")
    other.send("beta")
    one.send("gamma")
    said = [message["content"] for message in one.asked()[-1].messages if message["role"] != "system"]
    assert [part.partition("] ")[2] or part for part in said] == ["alpha", "first", "gamma"]


def test_a_tool_call_passes_the_gate_and_is_recorded_with_its_session(house: House, laptop: NodeProcess) -> None:
    (laptop.workspace / "note.txt").write_text("the answer is 42\n")
    session = house.session(calls(("laptop__Read", {"path": "note.txt"}), say="Looking."), text("It is 42."))
    assert session.send("look")["reply"] == "It is 42."
    assert_valid(session.history())
    assert roles(session.history()) == ["user", "assistant", "tool", "assistant"]
    assert "the answer is 42" in session.history()[2]["content"]
    assert "the answer is 42" in session.asked()[1].messages[-1]["content"]
    (call,) = house.gateway.get(f"/v1/calls?session_key={session.key}")["calls"]
    assert (call["tool"], call["state"], call["agent_id"]) == ("laptop__Read", "ok", "main")


def test_a_message_that_is_not_waited_for_is_worked_on_all_the_same(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("done", gate=gate))
    answer = session.send(wait=0)
    assert answer["state"] == "running" and "reply" not in answer
    assert session.show()["state"] == "running"
    gate.set()
    assert session.outcome(answer["run_id"])["reply"] == "done"


def test_a_wait_that_is_too_short_leaves_the_run_going(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("late", gate=gate))
    answer = session.send(wait=0.05)
    assert "reply" not in answer
    gate.set()
    assert session.outcome(answer["run_id"])["reply"] == "late"


def test_sessions_work_side_by_side_and_each_alone(house: House) -> None:
    gates = [threading.Event() for _ in range(4)]
    sessions = [house.session(text("one", gate=gate), text("two")) for gate in gates]
    runs = [session.send("1", wait=0)["run_id"] for session in sessions]
    wait_until(lambda: all(len(session.asked()) == 1 for session in sessions), what="four runs at once")
    later = [session.send("2", wait=0)["run_id"] for session in sessions]
    assert all(len(session.asked()) == 1 for session in sessions)
    for gate in gates:
        gate.set()
    for session, first, second in zip(sessions, runs, later, strict=True):
        assert (session.outcome(first)["reply"], session.outcome(second)["reply"]) == ("one", "two")
        assert roles(session.history()) == ["user", "assistant", "user", "assistant"]


def test_a_message_during_a_run_joins_it_between_tool_rounds(house: House) -> None:
    gate = threading.Event()
    session = house.session(calls(("agents_list", {}), gate=gate), text("both answered"))
    first = session.send("the first", wait=0)["run_id"]
    wait_until(session.asked)
    second = session.send("and the second", wait=0)["run_id"]
    gate.set()
    assert session.outcome(first)["reply"] == session.outcome(second)["reply"] == "both answered"
    history = session.history()
    assert roles(history) == ["user", "assistant", "tool", "user", "assistant"] and len(session.asked()) == 2
    assert "and the second" in session.asked()[1].messages[-1]["content"] and history[3]["run_id"] == second


def test_a_reply_belongs_to_its_message(house: House) -> None:
    """A message that comes while the last reply is being said gets a run and a reply of its own."""
    gate = threading.Event()
    session = house.session(text("to the first", gate=gate), text("to the second"))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(session.send, "first")
        wait_until(session.asked)
        second = pool.submit(session.send, "second")
        wait_until(lambda: session.show()["waiting"] == 1)
        gate.set()
        assert first.result()["reply"] == "to the first" and second.result()["reply"] == "to the second"


def test_events_of_a_run_can_be_followed_from_its_beginning(house: House) -> None:
    session = house.session(calls(("agents_list", {})), text("done"))
    run_id = session.send()["run_id"]
    stream = house.gateway.request("GET", f"/v1/runs/{run_id}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in stream.body.decode().splitlines() if line.startswith("data: ")]
    kinds = [event.get("type", "ended") for event in events]
    assert kinds[0] == "step_started" and kinds[-2:] == ["completed", "ended"]
    assert [event["use"]["name"] for event in events if event.get("type") == "tool_called"] == ["agents_list"]
    assert "".join(event["text"] for event in events if event.get("type") == "text_delta") == "done"
    assert events[-1]["reply"] == "done" and events[-1]["state"] == "ok"


def test_an_idempotency_key_sends_a_message_once(house: House) -> None:
    session = house.session(text("once"), text("twice"))
    path, key = f"/v1/sessions/{session.key}/messages", uuid.uuid4().hex
    body = {"message": f"[{session.key}] hi", "wait_seconds": 20}
    answers = [house.gateway.request("POST", path, body, headers={"Idempotency-Key": key}).json() for _ in range(2)]
    assert answers[0] == answers[1] and answers[0]["reply"] == "once" and len(session.asked()) == 1
    other = house.gateway.request("POST", path, {**body, "message": "other"}, headers={"Idempotency-Key": key})
    assert other.status == 409


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("main", {"message": ""}, 400),
        ("main", {"message": "  \n"}, 400),
        ("main", {}, 400),
        ("main", {"message": 3}, 400),
        ("main", {"message": "x", "wait_seconds": -1}, 400),
        ("main", {"message": "x", "wait_seconds": 1e9}, 400),
        ("%20", {"message": "x"}, 400),
        ("a%0Ab", {"message": "x"}, 400),
        ("k" * 300, {"message": "x"}, 400),
    ],
)
def test_an_invalid_message_is_refused(house: House, key: str, body: Any, status: int) -> None:
    answer = house.gateway.request("POST", f"/v1/sessions/{key}/messages", body)
    assert answer.status == status and answer.json()["error"]["message"]


def test_unknown_sessions_and_runs_are_not_found(house: House) -> None:
    for method, path in [
        ("GET", "/v1/sessions/nobody"),
        ("GET", "/v1/sessions/nobody/history"),
        ("POST", "/v1/sessions/nobody/stop"),
        ("GET", "/v1/runs/none"),
        ("GET", "/v1/runs/none/events"),
    ]:
        assert house.gateway.request(method, path, {} if method == "POST" else None).status == 404, path
    assert house.gateway.get("/v1/sessions/main")["key"] == "main"


def test_one_session_has_several_names(house: House) -> None:
    word = uuid.uuid4().hex
    house.script(word, text("a"), text("b"))
    body = {"message": word, "wait_seconds": 20}
    house.gateway.request("POST", "/v1/sessions/agent:helper:main/messages", body)
    house.gateway.request("POST", "/v1/sessions/agent:Helper:cli:dm:me/messages", body)
    found = house.gateway.get("/v1/sessions/agent:helper:main")
    assert (found["agent_id"], found["message_count"], found["session_key"]) == ("helper", 4, "agent:helper:main")
    assert house.gateway.get("/v1/sessions/agent:main:main")["key"] == "main"


def test_a_failing_model_is_a_failed_run_and_the_session_continues(house: House) -> None:
    session = house.session(error(401, "wrong key"), text("better"))
    failed = session.send()
    assert failed["state"] == "failed" and "wrong key" in failed["error"]["message"] and "reply" not in failed
    assert session.send("again")["reply"] == "better"


# -- stopping -----------------------------------------------------------------------------------------------


def test_stop_ends_the_run_and_every_process_it_started(house: House, laptop: NodeProcess) -> None:
    session = house.session(
        calls(("laptop__Bash", {"command": "exec sleep 1234567", "background": True})),
        calls(("laptop__Bash", {"command": "sleep 1234568 & wait"})),
        text("never said"),
    )
    run_id = session.send(wait=0)["run_id"]

    def running() -> list[Any]:
        jobs = house.gateway.get("/v1/jobs?node_id=laptop")["jobs"]
        return [job for job in jobs if job["running"] and "sleep 12345" in job["command"]]

    wait_until(lambda: len(running()) == 2, what="two commands")
    stopped = session.stop()
    assert stopped["stopped"] == [run_id]
    assert running() == []
    outcome = session.outcome(run_id)
    assert (outcome["state"], outcome["error"]["kind"]) == ("stopped", "cancelled")
    history = session.history()
    assert_valid(history)
    assert history[-1]["is_error"] and "stopped" in history[-1]["content"]
    assert session.stop()["stopped"] == []


def test_stop_ends_a_reply_in_the_middle_and_what_waits_behind_it(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("half of it", pieces=2, gate=gate, before_gate=2), text("after"))
    run_id, behind = session.send("1", wait=0)["run_id"], session.send("2", wait=0)["run_id"]
    (request,) = wait_until(session.asked)
    assert set(session.stop()["stopped"]) == {run_id, behind}
    assert request.left.wait(5), "the request at the provider is ended too"
    assert session.outcome(behind)["state"] == "stopped"
    assert session.send("3")["reply"] == "after"


def test_a_run_has_the_time_it_is_given(house: House, laptop: NodeProcess) -> None:
    session = house.session(calls(("laptop__Bash", {"command": "sleep 1234569"})), text("no"))
    outcome = session.send(timeout_seconds=0.5)
    assert (outcome["state"], outcome["error"]["kind"]) == ("timeout", "timeout")
    assert_valid(session.history())


# -- commands -----------------------------------------------------------------------------------------------


def test_new_begins_a_conversation_and_keeps_the_old_one(house: House) -> None:
    session = house.session(text("old reply"), text("new reply"))
    session.send("old")
    before = session.show()["session_id"]
    assert "New" in session.command("/new")
    assert session.history() == [] and session.show()["previous_session_ids"] == [before]
    session.send("new")
    assert "old reply" not in session.asked()[-1].body.decode()
    assert [one["content"] for one in session.history(conversation=before)][1] == "old reply"
    assert len(session.history(conversation="all")) == 4


def test_status_stop_help_and_model(house: House) -> None:
    gate = threading.Event()
    session = house.session(text("x", usage=(1000, 10)), text("y", gate=gate))
    session.send()
    status = session.command("/status")
    assert "idle" in status and "1000" in status and "scripted" in status
    assert "/compact" in session.command("/help")
    assert "scripted" in session.command("/model")
    assert "other-model" in session.command("/model other-model")
    assert "other-model" in session.show()["model"]
    assert "scripted" in session.command("/model default")
    assert session.command("/stop") == "Nothing is running."
    run_id = session.send("again", wait=0)["run_id"]
    wait_until(lambda: len(session.asked()) == 2)
    assert "Stopped 1 run" in session.command("/stop")
    assert session.outcome(run_id)["state"] == "stopped"
    assert [one for one in session.history() if one["content"].startswith("/")] == []


def test_an_unknown_command_is_an_ordinary_message(house: House) -> None:
    session = house.session(text("what?"))
    house.script("/frobnicate", text("what?"))
    assert session.command("/frobnicate now please") == "what?"


def test_compact_puts_a_summary_in_place_and_keeps_the_originals(house: House) -> None:
    session = house.session(
        calls(("agents_list", {})), text("one"), text("two"), text("THE SUMMARY", usage=(50, 5)), text("three")
    )
    session.send("the oldest words")
    session.send("second")
    assert "Compacted" in session.command("/compact")
    session.send("third")
    asked = session.asked()[-1].messages
    assert any("THE SUMMARY" in str(message["content"]) for message in asked) and "the oldest words" not in str(asked)
    history = session.history()
    assert_valid([message for message in history if not message.get("summary")])
    assert "the oldest words" in history[0]["content"] and session.show()["compactions"] == 1
    assert sum(bool(message.get("summary")) for message in history) == 1


# -- what the model sees --------------------------------------------------------------------------------------


def test_mistakes_of_the_model_go_back_to_it(house: House) -> None:
    session = house.session(
        calls(("read", "{not json"), ("no_such_tool", {}), ("read", {}), ("read", {"path": "/etc/shadow"})),
        text("sorry"),
    )
    assert session.send()["reply"] == "sorry"
    results = [message["content"] for message in session.history() if message["role"] == "tool"]
    assert_valid(session.history())
    for words in ("not valid JSON", "tool not found: no_such_tool", "parameter path is required", "shadow"):
        assert any(words in result for result in results), results


def test_the_workspace_is_in_the_prompt_within_its_limits(tmp_path: Path) -> None:
    folder = tmp_path / "agents" / "main"
    (folder / "skills" / "baking").mkdir(parents=True)
    for name in ("SOUL", "AGENTS", "USER", "MEMORY", "HEARTBEAT"):
        (folder / f"{name}.md").write_text(f"the words of {name}\n")
    (folder / "USER.md").write_text("begin " + "x" * 30_000 + " end")
    (folder / "skills" / "baking" / "SKILL.md").write_text("---\nname: baking\ndescription: Bread.\n---\nThe secret.\n")
    for house in open_house(tmp_path):
        house.script("a-word-to-main", calls(("sessions_spawn", {"prompt": "a-word-to-the-child"})), text("done"))
        house.script("a-word-to-another", text("done"))
        house.script("a-word-to-the-child", text("found"))
        for key, word in (("main", "a-word-to-main"), ("other", "a-word-to-another")):
            body = {"message": word, "wait_seconds": 20}
            assert house.gateway.request("POST", f"/v1/sessions/{key}/messages", body).json()["reply"] == "done"
        own, other = (house.asked(word)[0].messages[0]["content"] for word in ("a-word-to-main", "a-word-to-another"))
        child = next(
            str(one.messages[0]["content"])
            for one in house.asked("a-word-to-the-child")
            if b"a-word-to-main" not in one.body
        )
        assert all(f"the words of {name}" in own for name in ("SOUL", "AGENTS", "MEMORY", "HEARTBEAT"))
        assert "begin x" in own and "x end" in own and "[truncated 10" in own and len(own) < 25_000
        assert "baking: Bread." in own and "The secret." not in own
        assert "the words of MEMORY" not in other and "the words of SOUL" in other
        assert "the words of AGENTS" in child and "the words of SOUL" not in child and "baking" not in child


TWENTY = [
    *("read", "write", "edit", "apply_patch", "grep", "glob", "ls", "exec", "process", "cron", "message"),
    *("agents_list", "sessions_list", "sessions_history", "sessions_send", "sessions_spawn", "subagents"),
    *("sessions_status", "memory_search", "memory_get"),
]
SIX = ["read", "grep", "glob", "ls", "memory_search", "memory_get"]


def test_the_main_agent_is_offered_the_twenty_and_the_search(house: House, laptop: NodeProcess) -> None:
    session = house.session(text("hello"))
    session.send()
    assert session.asked()[0].tools == [*TWENTY, "tool_search"]
    for sent in session.asked()[0].json["tools"]:
        schema = sent["function"]["parameters"]
        assert schema["type"] == "object" and isinstance(schema["properties"], dict), sent
        assert sent["function"]["description"], sent


def test_a_sub_agent_is_offered_the_six_and_has_no_other(house: House, laptop: NodeProcess) -> None:
    session, word = house.session(), uuid.uuid4().hex
    house.script(session.key, calls(("sessions_spawn", {"prompt": word})), text("done"))
    others = [
        ("write", {"path": "w", "content": ""}),
        ("exec", {"command": "true"}),
        ("sessions_spawn", {"prompt": "x"}),
    ]
    others += [("laptop__Read", {"path": "w"}), ("gsv__ReadFile", {"path": "w"}), ("tool_search", {"query": "exec"})]
    house.script(word, calls(*others, ("ls", {"path": "."})), text("found"))
    assert session.send()["reply"] == "done"
    first, second = [one for one in house.asked(word) if session.key not in one.body.decode()]
    assert first.tools == second.tools == SIX
    reported = [one["content"] for one in second.messages if one["role"] == "tool"]
    assert all(f"tool not found: {name}" in result for (name, _), result in zip(others, reported[:-1], strict=True))
    assert "not found" not in reported[-1]


def test_a_tool_that_is_switched_off_is_not_offered(tmp_path: Path) -> None:
    tmp_path.joinpath("farhand.toml").write_text('[tools]\ndisabled = ["grep", "exec"]\n')
    for house in open_house(tmp_path):
        session, word = house.session(), uuid.uuid4().hex
        house.script(session.key, calls(("sessions_spawn", {"prompt": word})), text("done"))
        house.script(word, calls(("grep", {"pattern": "x"})), text("found"))
        session.send()
        assert not {"grep", "exec"} & set(session.asked()[0].tools)
        child = next(one for one in house.asked(word) if session.key not in one.body.decode())
        assert child.tools == [name for name in SIX if name != "grep"]


def test_names_of_any_kind_are_callable(house: House, laptop: NodeProcess, tmp_path: Path) -> None:
    """The API takes letters, digits, - and _ only; plug-ins have dots in their names."""
    (laptop.workspace / "n.txt").write_text("a note\n")
    with Plugin(house.gateway, tmp_path, "macos"):
        session = house.session(
            calls(("tool_search", {"query": "macos.echo, laptop__Read"})),
            calls(("macos_echo", {"text": "sent name"}), ("laptop__Read", {"path": "n.txt"})),
            calls(("macos.echo", {"text": "own name"})),
            text("ok"),
        )
        session.send()
    names = session.asked()[1].tools
    assert {"macos_echo", "laptop__Read"} <= set(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    reported = [one["content"] for one in session.history() if one["role"] == "tool"]
    assert any("sent name" in one for one in reported[1:3]) and any(
        "a note" in one for one in reported[1:3]
    )  # in any order
    assert "own name" in reported[3]
    assert [use["name"] for one in session.history() for use in one.get("tool_calls", ())][1] == "macos.echo"


def test_the_tools_of_a_plain_node_are_in_reach(house: House) -> None:
    """Such a node announces capabilities and lists no tools; a caller that knows the name of one can call it."""
    session = house.session(
        calls(("rusty.notes.search", {"query": "by name"})),
        calls(("tool_search", {"query": "rusty notes"})),
        calls(("tool_search", {"query": "rusty.ping, rusty.notes.count"})),
        calls(("rusty_notes_count", {"since": 5}), ("rusty.ping", {})),
        calls(("rustier.ping", {})),
        text("done"),
    )

    async def scenario() -> tuple[Any, list[Any]]:
        async with PlainNode.connect(house.gateway, "rust:box", ["rusty.notes", "rusty.ping"]) as node:
            sending = asyncio.create_task(asyncio.to_thread(session.send))
            requests = [await node.receive("tool_request")]
            await node.answer(requests[0], {"hits": ["a note"]})
            for _ in range(2):
                requests.append(await node.receive("tool_request"))
                await node.answer(requests[-1], len(requests))
            return await sending, requests

    answer, requests = asyncio.run(scenario())
    assert answer["reply"] == "done"
    assert [(one["tool"], one["args"]) for one in requests[:1]] == [("rusty.notes.search", {"query": "by name"})]
    assert {one["tool"] for one in requests[1:]} == {"rusty.notes.count", "rusty.ping"}
    prompt = session.asked()[0].messages[0]["content"]
    assert "rust:box" in prompt and "rusty.notes.*" in prompt and "rusty.ping.*" in prompt
    reported = [one["content"] for one in session.history() if one["role"] == "tool"]
    assert "a note" in reported[0] and "rusty.notes.*" in reported[1] and "rusty.notes.count" in reported[2]
    assert "tool not found: rustier.ping" in reported[5]
    offered = [request.tools for request in session.asked()]
    assert "rusty_notes_search" in offered[1] and {"rusty_notes_count", "rusty_ping"} <= set(offered[3])
    assert not any("*" in name for names in offered for name in names)


def test_a_picture_that_a_tool_read_is_shown_to_the_model(house: House, laptop: NodeProcess) -> None:
    picture = b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    (laptop.workspace / "dot.png").write_bytes(picture)
    session = house.session(calls(("laptop__Read", {"path": "dot.png"})), text("a red dot"))
    assert session.send()["reply"] == "a red dot"
    assert f"data:image/png;base64,{b64encode(picture).decode()}".encode() in session.asked()[1].body


def test_the_beginning_of_the_prompt_stays_the_same(house: House, laptop: NodeProcess) -> None:
    session = house.session(calls(("agents_list", {})), text("one"), text("two"))
    session.send()
    session.send()
    first, *others = session.asked()
    for request in others:
        assert (
            request.json["tools"] == first.json["tools"] and request.messages[: len(first.messages)] == first.messages
        )


def test_hello_is_cheap_with_all_tools_and_two_machines(house: House, laptop: NodeProcess, tmp_path: Path) -> None:
    session = house.session(text("hello"))
    with NodeProcess(house.gateway, tmp_path, "server"):
        session.send()
        cost = house.gateway.get("/v1/tools/cost")
    request = session.asked()[0]
    assert request.tools == [*TWENTY, "tool_search"]
    prompt = request.messages[0]["content"]
    assert "laptop" in prompt and "server" in prompt and "gsv__" in prompt
    sent = [json.dumps(request.json["tools"], separators=(",", ":")), prompt]
    estimated = sum(text_tokens(one) for one in sent)
    # Tokenizers find four characters and more to a token in text like this; three errs on the dear side.
    assert estimated < 4000 and sum(len(one) for one in sent) / 3 < 4000
    # What `farhand tools --cost` tells is what is sent.
    assert abs(cost["total_tokens"] - estimated) < 0.15 * estimated
    assert [tool["name"] for tool in cost["tools"] if tool["offered"]] == request.tools


def test_tools_that_are_not_listed_are_found_and_called(house: House, laptop: NodeProcess) -> None:
    session = house.session(
        calls(("tool_search", {"query": "laptop Bash"})), calls(("laptop__Bash", {"command": "echo here"})), text("ok")
    )
    session.send()
    assert "laptop__Bash" not in session.asked()[0].tools and "laptop__Bash" in session.asked()[1].tools
    assert "here" in session.history()[4]["content"]
