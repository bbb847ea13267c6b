"""Runs that outlive their gateway: killed or stopped at the worst moment, then resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.integration.agent.test_agent import House, Session, assert_valid, open_house, roles
from tests.support.harness import NodeProcess, Proxy, marked, wait_until
from tests.support.model_server import calls, text


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    yield from open_house(tmp_path / "home")


def killed(house: House) -> None:
    house.gateway.kill()
    house.gateway.start()


def stopped(house: House) -> None:
    assert house.gateway.stop(signal.SIGTERM) == 0
    house.gateway.start()


restarts = pytest.mark.parametrize("restart", [killed, stopped])


@restarts
def test_a_run_that_waited_for_the_model_asks_again(house: House, restart: object) -> None:
    session = house.session(text("lost", gate=threading.Event()), text("found"))
    run_id = session.send(wait=0)["run_id"]
    wait_until(session.asked)
    restart(house)  # type: ignore[operator]
    assert session.outcome(run_id)["reply"] == "found"
    assert roles(session.history()) == ["user", "assistant"]


@restarts
def test_a_result_that_a_node_finished_meanwhile_is_used(house: House, tmp_path: Path, restart: object) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "laptop") as laptop:
        go, count = laptop.workspace / "go", laptop.workspace / "count"
        command = f"echo ran >> {count}; until [ -e {go} ]; do sleep 0.05; done; echo finished"
        session = house.session(calls(("laptop__Bash", {"command": command})), text("all well"))
        run_id = session.send(wait=0)["run_id"]
        wait_until(count.exists)
        if restart is killed:
            house.gateway.kill()
            go.touch()
            house.gateway.start()
        else:
            threading.Timer(0.5, go.touch).start()
            stopped(house)
        assert session.outcome(run_id)["reply"] == "all well"
        assert_valid(session.history())
        assert "finished" in session.history()[2]["content"] and not session.history()[2]["is_error"]
        assert count.read_text() == "ran\n"


def test_a_call_with_an_unknown_outcome_says_so(house: House) -> None:
    """A tool of the gateway's own ends with it: the model learns that the outcome is unknown."""
    session, other = house.session(), house.session()
    send = {"sessionKey": other.key, "message": other.key, "waitSeconds": 100}
    house.script(session.key, calls(("gsv__SessionSend", send)), text("I checked"))
    house.script(other.key, text("lost", gate=threading.Event()), text("answered"))
    run_id = session.send(wait=0)["run_id"]
    wait_until(other.asked)
    killed(house)
    assert session.outcome(run_id)["reply"] == "I checked"
    result = session.history()[2]
    assert result["is_error"] and result["content"].startswith("outcome unknown:")
    assert_valid(session.history())
    wait_until(lambda: roles(other.history()) == ["user", "assistant"])


def test_messages_that_waited_are_answered_after_the_restart(house: House) -> None:
    session = house.session(text("lost", gate=threading.Event()), text("one"), text("two"), text("three"))
    runs = [session.send(str(number), wait=0)["run_id"] for number in range(3)]
    wait_until(session.asked)
    killed(house)
    assert [session.outcome(run_id)["reply"] for run_id in runs] == ["one", "two", "three"]


def test_stop_after_a_restart_ends_what_was_started_before(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "laptop"):
        session = house.session(
            calls(
                ("laptop__Bash", {"command": "exec sleep 2234567", "background": True}),
                ("exec", {"command": "exec sleep 2234568", "background": True}),
            ),
            text("lost", gate=threading.Event()),
            text("lost", gate=threading.Event()),
        )
        session.send(wait=0)
        wait_until(lambda: len(session.asked()) == 2)
        assert len(marked("sleep\0002234567\0")) == len(marked("sleep\0002234568\0")) == 1
        killed(house)
        wait_until(lambda: len(session.asked()) == 3)
        house.gateway.wait_for_node("laptop")
        session.stop()
        assert marked("sleep\0002234567\0") == marked("sleep\0002234568\0") == []


def test_a_run_is_stopped_although_its_machine_does_not_answer(house: House, tmp_path: Path) -> None:
    with Proxy(house.gateway.port) as proxy, NodeProcess(house.gateway, tmp_path, "far", url=proxy.url):
        session = house.session(
            calls(("far__Bash", {"command": "exec sleep 3234567", "background": True})),
            calls(("far__Bash", {"command": "sleep 3234568"})),
        )
        run_id = session.send(wait=0)["run_id"]
        wait_until(lambda: marked("sleep\0003234568\0"))
        proxy.freeze()
        assert session.stop()["stopped"] == [run_id]
        assert session.outcome(run_id)["state"] == "stopped"
        assert_valid(session.history())
        assert marked("sleep\0003234568\0") != []
        proxy.thaw()
        wait_until(lambda: not marked("sleep\0003234567\0") and not marked("sleep\0003234568\0"))


def test_a_sub_agents_result_is_not_lost(house: House) -> None:
    session, word = house.session(), uuid.uuid4().hex
    house.script(session.key, calls(("sessions_spawn", {"prompt": word})), text("reported"))
    house.script(word, text("lost", gate=threading.Event()), text("what was found"))
    run_id = session.send(wait=0)["run_id"]
    wait_until(lambda: house.asked(word))
    killed(house)
    assert session.outcome(run_id)["reply"] == "reported"
    assert [one["content"] for one in session.history() if one["role"] == "tool"] == ["what was found"]
    assert_valid(session.history())


def test_a_run_that_ends_the_gateway_each_time_is_given_up(house: House) -> None:
    session = house.session(calls(("agents_list", {})), *[text("x", gate=threading.Event()) for _ in range(2)])
    run_id = session.send(wait=0)["run_id"]
    wait_until(lambda: len(session.asked()) == 2)
    killed(house)
    wait_until(lambda: len(session.asked()) == 3)
    house.gateway.kill()
    with apsw.Connection(str(house.gateway.home / "farhand.db")) as store:
        assert store.execute("SELECT attempts FROM runs WHERE id = ?", (run_id,)).fetchall() == [(2,)]
        store.execute("UPDATE runs SET attempts = 10")  # eight more times of the same
    house.gateway.start()
    outcome = session.outcome(run_id)
    assert outcome["state"] == "failed" and "10 times" in outcome["error"]["message"]
    assert len(session.asked()) == 3
    assert_valid(session.history())


def test_a_key_stands_for_its_message_after_a_restart(house: House) -> None:
    session = Session(house, "main")
    body = {"message": "only once", "wait_seconds": 20}
    house.script("only once", text("done"), text("again"))
    path, headers = "/v1/sessions/main/messages", {"Idempotency-Key": "k1"}
    first = house.gateway.request("POST", path, body, headers=headers).json()
    killed(house)
    again = house.gateway.request("POST", path, body, headers=headers).json()
    assert first["run_id"] == again["run_id"] and again["reply"] == "done" and len(session.history()) == 2


def test_a_long_conversation_is_compacted_by_itself_and_stays_so(tmp_path: Path) -> None:
    with contextlib.contextmanager(open_house)(tmp_path / "home", FARHAND_AGENT_CONTEXT_TOKENS="4000") as house:
        session = house.session(
            *(calls(("agents_list", {})), text("one"), text("two")),
            *(text("a first part"), text("THE SUMMARY")),
            *(text("three"), text("four")),
        )
        for number in range(3):
            session.send(f"message {number}: " + "word " * 1200)
        assert session.show()["compactions"] == 1
        said = str(session.asked()[-1].messages[1:])
        assert "THE SUMMARY" in said and "message 0" not in said and "message 2" in said
        killed(house)
        session.send("and now?")
        assert "THE SUMMARY" in str(session.asked()[-1].messages) and "message 0" not in str(
            session.asked()[-1].messages
        )
        history = session.history()
        assert_valid([message for message in history if not message.get("summary")])
        users = [message["content"] for message in history if message["role"] == "user" and not message.get("summary")]
        assert len(users) == 4 and "message 0" in users[0]


def test_history_is_read_page_by_page(house: House) -> None:
    session = house.session(*[text(str(number)) for number in range(5)])
    for number in range(5):
        session.send(str(number))
    whole = session.history()
    pages: list[Any] = []
    before = ""
    while True:
        page = house.gateway.get(f"/v1/sessions/{session.key}/history?limit=4{before}")
        pages = [*page["messages"], *pages]
        if page["before"] is None:
            break
        before = f"&before={page['before']}"
    assert pages == whole and len(whole) == 10


@restarts
def test_a_run_that_was_open_waits_for_the_machines_to_return(house: House, tmp_path: Path, restart: Any) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "laptop") as laptop:
        (laptop.workspace / "n.txt").write_text("a note\n")
        session = house.session(
            text("lost", gate=threading.Event()), calls(("laptop__Read", {"path": "n.txt"})), text("all well")
        )
        run_id = session.send(wait=0)["run_id"]
        wait_until(session.asked)
        os.kill(laptop.pid, signal.SIGSTOP)  # it comes back later than the gateway does
        try:
            restart(house)
            assert not house.gateway.get("/v1/nodes")["nodes"][0]["online"]
        finally:
            os.kill(laptop.pid, signal.SIGCONT)
        assert session.outcome(run_id, 60)["reply"] == "all well"
        reported = [one["content"] for one in session.history() if one["role"] == "tool"]
        assert "a note" in reported[0], reported
        prompt = str(session.asked()[1].messages[0]["content"])
        assert "- laptop (" in prompt and "Known but offline" not in prompt


def test_a_run_does_not_wait_long_for_a_machine_that_stays_away(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "laptop") as laptop:
        session = house.session(text("lost", gate=threading.Event()), text("alone"))
        run_id = session.send(wait=0)["run_id"]
        wait_until(session.asked)
        house.gateway.kill()
        laptop.kill()
        house.gateway.start()
        assert session.outcome(run_id, 60)["reply"] == "alone"
        assert "Known but offline: laptop" in str(session.asked()[1].messages[0]["content"])


def test_a_late_job_waits_for_the_machines_to_return(house: House, tmp_path: Path) -> None:
    with NodeProcess(house.gateway, tmp_path / "node", "laptop") as laptop:
        (laptop.workspace / "n.txt").write_text("a note\n")
        word = f"late-{uuid.uuid4().hex[:8]}"
        house.script(word, calls(("laptop__Read", {"path": "n.txt"})), text("done"))
        due = datetime.now(UTC) + timedelta(seconds=3)
        job = {
            "name": "late",
            "schedule": {"kind": "at", "at": due.isoformat()},
            "spec": {"mode": "task", "message": word},
        }
        added = house.gateway.request("POST", "/v1/cron", job)
        assert added.status in (200, 201), added
        os.kill(laptop.pid, signal.SIGSTOP)
        try:
            assert house.gateway.stop() == 0
            wait_until(lambda: datetime.now(UTC) > due)
            house.gateway.start()
        finally:
            os.kill(laptop.pid, signal.SIGCONT)
        wait_until(lambda: len(house.asked(word)) == 2, 60, "the late job's second request")
        results = [one["content"] for one in house.asked(word)[1].messages if one["role"] == "tool"]
        assert "a note" in results[0], results
