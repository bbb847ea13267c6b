"""The journal as a timeline, runs repeated from the record, and sessions forked at any moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from farhand.store.sqlite.audit import verify
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, calls, error, text

NO_COPIES = {"FARHAND_BACKUP_EVERY_SECONDS": "0"}


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, model: ModelServer) -> Iterator[GatewayProcess]:
    env = {**NO_COPIES, **model.environment}
    with GatewayProcess(tmp_path_factory.mktemp("travel") / "home", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def node(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("node"), "hands") as running:
        yield running


def say(gateway: GatewayProcess, key: str, message: str, **options: Any) -> Any:
    body = {"message": message, "wait_seconds": 30, **options}
    return gateway.request("POST", f"/v1/sessions/{key}/messages", body).json()


def history(gateway: GatewayProcess, key: str) -> list[Any]:
    messages: list[Any] = gateway.get(f"/v1/sessions/{key}/history?limit=1000")["messages"]
    return messages


def journal(gateway: GatewayProcess, query: str = "") -> list[Any]:
    events: list[Any] = gateway.get(f"/v1/journal?limit=1000&{query}")["events"]
    return events


def replayed(gateway: GatewayProcess, run_id: str) -> Any:
    """Offline and over HTTP, which must be the same."""
    done = Command(gateway.home)("replay", run_id, "--json")
    found = done.json()
    assert found == gateway.get(f"/v1/runs/{run_id}/replay")
    assert done.status == (0 if found["identical"] else 1)
    return found


def change(home: Path, statement: str, values: tuple[Any, ...] = ()) -> None:
    connection = apsw.Connection(str(home / "farhand.db"))
    try:
        connection.set_busy_timeout(5000)
        connection.execute(statement, values)
    finally:
        connection.close()


# -- the log --------------------------------------------------------------------------------------------------


def test_the_journal_of_a_session_a_node_and_a_day(
    gateway: GatewayProcess, node: NodeProcess, model: ModelServer
) -> None:
    command = Command(gateway.home)
    node.ok("Write", {"path": "a.txt", "content": "first"})
    model.add(calls(("hands__Read", {"path": "a.txt"})), text("it says first"))
    say(gateway, "story", "what is in a.txt?")
    model.add(text("nothing to do with it"))
    say(gateway, "another", "hello")
    reported = journal(gateway, "session=story")
    kinds = [event["kind"] for event in reported]
    assert kinds[0] == "session.created" and kinds[-1] == "run.ended"
    assert [event["message"]["role"] for event in reported if event["kind"] == "message.added"] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    (read,) = [event for event in reported if event["kind"] == "call.ended"]
    assert read["call"]["tool"] == "hands__Read" and "first" in read["call"]["result"]["text"]
    assert all("another" not in str(event) for event in reported)
    on_node = journal(gateway, "node=hands")
    assert on_node[0]["kind"] == "node.online"
    assert {event["call"]["tool"] for event in on_node if "call" in event} == {"hands__Write", "hands__Read"}
    today = command("log", "--day", date.today().isoformat(), "--json").json()
    assert today["count"] >= len(reported) + len(on_node) and today["more"] is False
    assert command("log", "--day", "2020-01-01", "--json").json()["events"] == []
    only = command("log", "--since", "1h", "--kind", "call", "--session", "story", "--json").json()["events"]
    assert {event["kind"] for event in only} <= {"call.started", "call.ended"} and only
    shown = command("log", "--session", "story").out.splitlines()
    assert len(shown) == len(reported)
    assert any("user: what is in a.txt?" in line for line in shown)
    assert any("hands__Read on hands" in line and "→ ok" in line and "first" in line for line in shown)


def test_pages_of_the_journal_leave_nothing_out(gateway: GatewayProcess) -> None:
    for number in range(15):
        gateway.invoke("gsv__ReadFile", {"path": f"missing-{number}"})
    wait_until(lambda: "missing-14" in str(journal(gateway)[-2:]), 10, "the last call in the journal")
    everything = [event["id"] for event in journal(gateway)]
    found: list[int] = []
    before = ""
    while True:
        page = gateway.get(f"/v1/journal?limit=7{before}")
        found = [event["id"] for event in page["events"]] + found
        if page["before"] is None:
            break
        before = f"&before={page['before']}"
    assert found[: len(everything)] == everything == sorted(everything)
    after = gateway.get(f"/v1/journal?after={everything[-3]}")
    assert [event["id"] for event in after["events"]][:2] == everything[-2:]


@pytest.mark.parametrize("query", ["since=x", "limit=0", "before=-1", "session=%20", "after=1.5"])
def test_a_question_that_cannot_be_meant_is_refused(gateway: GatewayProcess, query: str) -> None:
    assert gateway.request("GET", f"/v1/journal?{query}").status == 400


@pytest.mark.parametrize("options", [["--day", "x"], ["--since", "soon"], ["--day", "today", "--since", "2h"]])
def test_options_that_cannot_be_meant_are_refused(gateway: GatewayProcess, options: list[str]) -> None:
    done = Command(gateway.home)("log", *options, "--json")
    assert done.status == 2 and done.json()["error"]["code"] == "usage"


# -- replay ---------------------------------------------------------------------------------------------------


def test_a_run_is_repeated_without_model_or_tools(
    gateway: GatewayProcess, node: NodeProcess, model: ModelServer
) -> None:
    model.add(
        calls(("tool_search", {"query": "hands__Write"})),
        calls(("hands__Write", {"path": "once.txt", "content": "1"}), ("hands__Bash", {"command": "echo hi"})),
        calls(("no_such_tool", {}), ("read", "not json")),
        text("done"),
    )
    run = say(gateway, "repeat", "write it")
    assert run["state"] == "ok", run
    asked = len(model.requests)
    made = len(gateway.get("/v1/calls?limit=1000")["calls"])
    found = replayed(gateway, run["run_id"])
    assert found["identical"] and found["requests"] == 4 and found["calls"] >= 2, found
    assert len(model.requests) == asked, "no model was asked"
    assert len(gateway.get("/v1/calls?limit=1000")["calls"]) == made, "no tool ran"
    shown = Command(gateway.home)("replay", run["run_id"])
    assert shown.status == 0 and shown.out.startswith("identical: 4 requests")


def test_a_later_turn_is_repeated_with_what_was_said_before(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(text("one"), text("two"))
    say(gateway, "turns", "first")
    run = say(gateway, "turns", "second")
    assert replayed(gateway, run["run_id"])["identical"]


def test_a_run_that_failed_fails_again(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(error(401, "bad key"))
    run = say(gateway, "failing", "hello")
    assert run["state"] == "failed"
    found = replayed(gateway, run["run_id"])
    assert found["identical"] and found["state"] == "failed", found


def test_a_stopped_run_is_repeated_up_to_where_it_was_stopped(
    gateway: GatewayProcess, node: NodeProcess, model: ModelServer
) -> None:
    model.add(calls(("hands__Bash", {"command": "sleep 60"})))
    sent = gateway.request("POST", "/v1/sessions/halted/messages", {"message": "sleep"}).json()
    wait_until(lambda: any(job["running"] for job in gateway.get("/v1/jobs")["jobs"]), 20, "the command")
    gateway.request("POST", "/v1/sessions/halted/stop", {})
    found = replayed(gateway, sent["run_id"])
    assert found["state"] == "stopped" and found["identical"], found


def test_the_first_difference_is_reported(gateway: GatewayProcess, node: NodeProcess, model: ModelServer) -> None:
    node.ok("Write", {"path": "b.txt", "content": "one"})
    model.add(calls(("hands__Read", {"path": "b.txt"})), text("one"))
    run = say(gateway, "changed", "read b.txt")["run_id"]
    assert replayed(gateway, run)["identical"]
    content = b'{"content":"two"}'
    change(gateway.home, "UPDATE calls SET result = ? WHERE idempotency_key LIKE ?", (content, f"run:{run}:%"))
    found = replayed(gateway, run)
    difference = found["difference"]
    assert not found["identical"] and difference["step"] == 1 and difference["what"] == "message"
    assert "one" in difference["expected"] and "two" in difference["got"]
    shown = Command(gateway.home)("replay", run)
    assert shown.status == 1 and "different at step 1" in shown.out


def test_another_prompt_is_a_difference(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(text("hello"))
    run = say(gateway, "prompted", "hi")["run_id"]
    connection = apsw.Connection(str(gateway.home / "farhand.db"))
    ((settings,),) = connection.execute("SELECT settings FROM run_attempts WHERE run_id = ?", (run,)).fetchall()
    connection.close()
    other = msgspec.json.decode(settings)
    other["prompt"]["parts"]["date"] = "1999-12-31 (UTC)"
    change(gateway.home, "UPDATE run_attempts SET settings = ? WHERE run_id = ?", (msgspec.json.encode(other), run))
    difference = replayed(gateway, run)["difference"]
    assert difference["what"] == "prompt" and difference["step"] == 1
    assert "1999-12-31" in difference["got"] and "1999-12-31" not in difference["expected"]


def test_a_run_that_went_on_after_a_kill_is_repeated(tmp_path: Path) -> None:
    with ModelServer() as model:
        gateway = GatewayProcess(tmp_path / "home", env={**NO_COPIES, **model.environment})
        gateway.start()
        with NodeProcess(gateway, tmp_path / "node", "hands"):
            model.add(calls(("hands__Bash", {"command": "sleep 2; echo slept"})), text("it slept"))
            sent = gateway.request("POST", "/v1/sessions/main/messages", {"message": "sleep"}).json()
            wait_until(lambda: any(job["running"] for job in gateway.get("/v1/jobs")["jobs"]), 20, "the command")
            gateway.kill()
            gateway.start()
            run = f"/v1/runs/{sent['run_id']}"
            wait_until(lambda: gateway.get(run)["state"] == "ok", 30, "the run's end")
            found = replayed(gateway, sent["run_id"])
            assert found["identical"] and found["attempts"] == 2, found
        gateway.stop()
        assert verify(gateway.home, gateway.home / "farhand.db").ok


@pytest.mark.parametrize("run_id", ["nothing", "%00", "x" * 300])
def test_a_run_that_is_not_there(gateway: GatewayProcess, run_id: str) -> None:
    assert gateway.request("GET", f"/v1/runs/{run_id}/replay").status == 404
    done = Command(gateway.home)("replay", "nothing", "--json")
    assert done.status == 1 and "no run" in done.json()["error"]["message"]


# -- forks ----------------------------------------------------------------------------------------------------


def fork(gateway: GatewayProcess, key: str, **body: Any) -> Any:
    return gateway.request("POST", f"/v1/sessions/{key}/fork", body)


def test_a_session_forked_at_an_event_continues_by_itself(
    gateway: GatewayProcess, node: NodeProcess, model: ModelServer
) -> None:
    model.add(calls(("hands__Bash", {"command": "echo one"})), text("did one"), text("did two"))
    say(gateway, "trunk", "one")
    event = journal(gateway, "session=trunk")[-1]["id"]
    say(gateway, "trunk", "two")
    before = history(gateway, "trunk")
    command = Command(gateway.home)
    done = command("sessions", "fork", "trunk", "--at", str(event), "--to", "branch", "--json").json()
    assert done["key"] == "branch" and done["messages"] == 4 and done["left_out"] == 0
    said = history(gateway, "branch")
    assert [message["content"] for message in said] == [message["content"] for message in before[:4]]
    model.add(text("did three instead"))
    asked = len(model.requests)
    assert say(gateway, "branch", "three")["reply"] == "did three instead"
    assert [message["role"] for message in model.requests[asked].messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert history(gateway, "trunk") == before, "the original is as it was"
    assert len(history(gateway, "branch")) == 6
    assert gateway.get("/v1/sessions/branch")["usage"]["prompt_tokens"] < 1000
    model.add(text("again"))
    run = say(gateway, "branch", "four")["run_id"]
    assert replayed(gateway, run)["identical"]


def test_a_fork_at_any_place_of_a_session_is_complete(
    gateway: GatewayProcess, node: NodeProcess, model: ModelServer
) -> None:
    model.add(
        calls(("hands__Bash", {"command": "echo a"}), ("hands__Bash", {"command": "echo b"})),
        calls(("hands__Bash", {"command": "echo c"})),
        text("all done"),
    )
    say(gateway, "places", "go")
    messages = history(gateway, "places")
    assert [message["role"] for message in messages] == [
        "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    taken = [fork(gateway, "places", message=message["seq"]).json() for message in messages]
    assert [one["messages"] for one in taken] == [1, 1, 1, 4, 4, 6, 7]
    assert [one["left_out"] for one in taken] == [0, 1, 2, 0, 1, 0, 0]
    for one in taken:
        open_uses: set[str] = set()
        for message in history(gateway, one["key"]):
            open_uses |= {use["id"] for use in message.get("tool_calls", ())}
            open_uses.discard(message.get("tool_call_id", ""))
        assert not open_uses
    events = [event["id"] for event in journal(gateway, "session=places")]
    counts = [fork(gateway, "places", event=event).json().get("messages") for event in events[3:10]]
    assert [count for count in counts if count] == sorted(count for count in counts if count)
    shown = Command(gateway.home)("sessions", "fork", "places", "--at", f"m{messages[2]['seq']}")
    assert shown.status == 0 and "left out 2 more messages" in shown.err


def test_a_summary_is_forked_with_what_it_stands_for(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(*(text(f"answer {number}") for number in range(3)))
    for number in range(3):
        say(gateway, "long", f"question {number}")
    model.add(text("they talked"))
    say(gateway, "long", "/compact")
    model.add(text("answer 3"))
    say(gateway, "long", "question 3")
    made = fork(gateway, "long").json()
    model.add(text("answer 4"), text("answer 4"))
    asked = len(model.requests)
    say(gateway, "long", "question 4")
    say(gateway, made["key"], "question 4")
    original, copy = (
        [message["content"] for message in request.messages if message["role"] != "system"]
        for request in model.requests[asked:]
    )
    assert original == copy and "they talked" in str(copy[0])


def test_forks_that_cannot_be_made_are_refused(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(text("yes"))
    say(gateway, "refusals", "hello")
    ((first),) = history(gateway, "refusals")[:1]
    for status, key, body in (
        (404, "no-such-session", {}),
        (404, "refusals", {"event": 10**9}),
        (404, "refusals", {"message": 10**9}),
        (400, "refusals", {"event": 1}),
        (400, "refusals", {"event": 5, "message": 5}),
        (400, "refusals", {"event": 0}),
        (400, "refusals", {"event": "x"}),
        (400, "refusals", {"to": "refusals"}),
        (400, "refusals", {"to": "agent:other:main"}),
        (400, "refusals", {"to": "a/b"}),
        (400, "refusals", {"unknown": 1}),
    ):
        answer = fork(gateway, key, **body)
        assert answer.status == status and answer.json()["error"]["message"], (key, body, answer)
    other = gateway.request("POST", "/v1/sessions/another-story/messages", {"message": "/new", "wait_seconds": 5})
    assert other.status == 200
    assert fork(gateway, "another-story", message=first["seq"]).status == 404, "a message of another session"
    done = Command(gateway.home)("sessions", "fork", "refusals", "--at", "soon", "--json")
    assert done.status == 2


def test_a_fork_asked_for_twice_is_made_once(gateway: GatewayProcess, model: ModelServer) -> None:
    model.add(text("yes"))
    say(gateway, "twice", "hello")
    headers = {"Idempotency-Key": f"fork-{time.monotonic_ns()}"}
    one = gateway.request("POST", "/v1/sessions/twice/fork", {}, headers=headers)
    two = gateway.request("POST", "/v1/sessions/twice/fork", {}, headers=headers)
    assert one.status == two.status == 201 and one.json() == two.json()
    other = gateway.request("POST", "/v1/sessions/twice/fork", {"to": "elsewhere"}, headers=headers)
    assert other.status == 409


def test_after_all_that_the_journal_verifies(gateway: GatewayProcess) -> None:
    """But for what was changed above, on purpose."""
    report = verify(gateway.home, gateway.home / "farhand.db")
    assert len(report.faults) <= 1 and all("call" in fault.message for fault in report.faults), report


# -- secrets --------------------------------------------------------------------------------------------------


def test_a_secret_is_in_no_timeline_cut_in_two_or_not_and_no_difference(tmp_path: Path) -> None:
    secret = "sk-very-secret-key-of-the-provider"
    with ModelServer() as model:
        env = {**NO_COPIES, **model.environment, "OPENAI_API_KEY": secret}
        with GatewayProcess(tmp_path / "home", env=env) as gateway:
            for before in (10, 380, 385, 390):
                gateway.invoke("write", {"path": f"{before}.txt", "content": "x" * (before - 40) + secret + "y" * 500})
            model.add(calls(("read", {"path": "10.txt"})), text("read"))
            gateway.invoke("write", {"path": "10.txt", "content": f"key = {secret}\n"})
            run = say(gateway, "main", "read it")
            shown = gateway.request("GET", "/v1/journal?limit=1000").body.decode()
            assert "380.txt" in shown and not any(secret[:length] in shown for length in (12, 20, len(secret)))
            assert replayed(gateway, run["run_id"])["identical"]
