"""`farhand chat`, `farhand sessions` and `farhand tools --cost`, with a scripted model."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess, NodeProcess, marked, wait_until
from tests.support.model_server import calls, error, text


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    yield from open_house(tmp_path_factory.mktemp("chat") / "home")


@pytest.fixture(scope="module")
def command(house: House) -> Command:
    return Command(house.gateway.home)


def test_one_message_prints_its_answer_and_what_was_done(house: House, command: Command) -> None:
    session = house.session(
        calls(("agents_list", {}), say="Looking."), calls(("read", {"path": "none"})), text("Done.")
    )
    done = command("chat", "-m", session.key, "--session", session.key)
    assert (done.status, done.out) == (0, "Looking.\nDone.\n")
    assert "· agents_list" in done.err and "· read path=" in done.err and "No such file" in done.err


def test_json_is_one_document(house: House, command: Command) -> None:
    session = house.session(text("four"), error(401, "no key"))
    done = command("chat", "-m", f"{session.key} 2+2", "--session", session.key, "--json")
    assert (done.status, done.json()["reply"], done.json()["state"]) == (0, "four", "ok")
    failed = command("chat", "-m", session.key, "--session", session.key, "--json")
    assert failed.status == 1 and "no key" in failed.json()["error"]["message"]
    usage = command("chat", "--json", "-m", " ")
    assert usage.status == 2 and usage.json()["error"]["code"] == "usage"


def test_a_message_can_come_through_a_pipe(house: House, command: Command) -> None:
    session = house.session(text("read"), text("again"))
    assert command("chat", "-m", "-", "--session", session.key, stdin=f"{session.key}\nlong text").out == "read\n"
    assert command("chat", "--session", session.key, stdin=session.key).out == "again\n"
    assert "long text" in session.asked()[0].messages[-1]["content"]


def test_a_failed_run_has_status_1(house: House, command: Command) -> None:
    session = house.session(error(401, "bad key"))
    done = command("chat", "-m", session.key, "--session", session.key)
    assert done.status == 1 and done.out == "" and "bad key" in done.err


def test_without_a_model_it_says_what_to_set(tmp_path: Path) -> None:
    nothing = {"OPENAI_API_KEY": None, "OPENAI_BASE_URL": None, "FARHAND_MODEL": None}
    with GatewayProcess(tmp_path / "home", env=nothing) as gateway:
        done = Command(gateway.home)("chat", "-m", "hello")
    assert done.status == 1 and "FARHAND_MODEL" in done.out and done.err == ""


def test_ctrl_c_stops_the_run_and_its_processes(house: House, command: Command, tmp_path: Path) -> None:
    mark = f"sleep 12345.{os.getpid()}"
    with NodeProcess(house.gateway, tmp_path, "laptop"):
        session = house.session(calls(("laptop__Bash", {"command": mark}), ("exec", {"command": mark})))
        process = command.start("chat", "-m", session.key, "--session", session.key)
        wait_until(lambda: len(marked(f"sleep\0{mark.split()[1]}\0")) >= 2, what="two commands")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1 and "stopping" in err and "stopped" in err and out == ""
        assert marked(f"sleep\0{mark.split()[1]}\0") == []
        assert session.show()["state"] == "idle"


def test_a_conversation_is_typed_line_by_line(house: House, command: Command) -> None:
    session = house.session(text("first answer"), text("second answer"))
    main, terminal = pty.openpty()
    arguments = [*FARHAND, "chat", "--session", session.key]
    process = start_process(arguments, command.env, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = ""

    def expect(words: str) -> None:
        nonlocal shown
        while words not in shown:
            shown += os.read(main, 65536).decode()
        shown = shown.partition(words)[2]

    for line, answer in [(f"{session.key} one", "first answer"), ("two", "second answer"), ("/status", "Messages: 4")]:
        expect(">")
        os.write(main, f"{line}\n".encode())
        expect(answer)
    os.write(main, b"\x04")
    assert process.wait(60) == 0
    os.close(main)


def test_a_recorded_run_is_repeated_without_a_network(house: House, command: Command, tmp_path: Path) -> None:
    session = house.session(calls(("agents_list", {}), ("read", {"path": "x"}), say="So."), text("It was said."))
    file = tmp_path / "run.jsonl"
    first = command("chat", "-m", session.key, "--session", session.key, "--record", str(file))
    nothing = {"OPENAI_API_KEY": None, "OPENAI_BASE_URL": None, "FARHAND_MODEL": f"replay:{file}"}
    with GatewayProcess(tmp_path / "home", env=nothing) as gateway:
        again = Command(gateway.home)("chat", "-m", session.key, "--session", session.key)
        repeated = gateway.get(f"/v1/sessions/{session.key}/history")["messages"]
        assert gateway.get("/v1/calls")["calls"] == []
    assert (again.status, again.out, again.err) == (0, first.out, first.err)
    reported = [
        [(one["role"], one["content"], one.get("tool_calls")) for one in way] for way in (session.history(), repeated)
    ]
    assert sorted(map(str, reported[0])) == sorted(map(str, reported[1]))
    unwritable = command("chat", "-m", "x", "--record", "/nowhere/x")
    assert unwritable.status == 2 and "/nowhere/x" in unwritable.err


def test_a_chat_continues_through_a_restart_of_the_gateway(tmp_path: Path) -> None:
    with contextlib.contextmanager(open_house)(tmp_path / "home") as house:
        session = house.session(calls(("agents_list", {})), text("lost", gate=threading.Event()), text("and found"))
        process = Command(house.gateway.home).start("chat", "-m", session.key, "--session", session.key)
        wait_until(lambda: len(session.asked()) == 2)
        house.gateway.kill()
        assert process.stderr is not None
        while (
            "waiting for the gateway" not in process.stderr.readline()
        ):  # else it may be back before its absence is noticed
            assert process.poll() is None
        house.gateway.start()
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "and found\n")


def test_sessions_are_listed_shown_read_stopped_and_renewed(house: House, command: Command) -> None:
    gate = threading.Event()
    session = house.session(calls(("agents_list", {})), text("an answer", usage=(50, 5)), text("late", gate=gate))
    session.send("a question")
    assert any(line.split()[:4] == [session.key, "main", "idle", "4"] for line in command("sessions").out.splitlines())
    assert "60 prompt and 10 completion tokens" in command("sessions", "show", session.key).out
    history = command("sessions", "history", session.key).out
    assert "a question" in history and "· agents_list {}" in history and "result of agents_list" in history
    assert len(command("sessions", "history", session.key, "--limit", "1", "--json").json()["messages"]) == 1
    run_id = session.send("again", wait=0)["run_id"]
    wait_until(lambda: len(session.asked()) == 3)
    assert command("sessions", "stop", session.key).out == f"stopped: {run_id}\n"
    assert "nothing was running" in command("sessions", "stop", session.key).err
    assert "New" in command("sessions", "new", session.key).out
    assert command("sessions", "history", session.key).out == ""
    assert "a question" in command("sessions", "history", session.key, "--all").out
    missing = command("sessions", "show", "nobody", "--json")
    assert missing.status == 1 and missing.json()["error"]["code"] == "not_found"


def test_cost_tells_what_each_request_carries(command: Command) -> None:
    cost = command("tools", "--cost", "--json").json()
    offered = sum(tool["tokens"] for tool in cost["tools"] if tool["offered"])
    assert cost["total_tokens"] == cost["prompt_tokens"] + offered < 4000
    shown = command("tools", "--cost").out
    assert f"Each request: {cost['total_tokens']} tokens" in shown and "once found" in shown
