"""`farhand ps`, `attach` and `call --follow`: commands on a real node, seen from the command line."""

from __future__ import annotations

import json
import os
import pty
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import GatewayProcess, NodeProcess, PluginProcess, marked, wait_until


@pytest.fixture(scope="module")
def hands(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node


def begin(node: NodeProcess, command: str) -> str:
    return str(node.ok("Bash", {"command": command, "background": True})["sessionId"])


def running(node: NodeProcess, session: str) -> bool:
    return bool(node.ok("Process", {"action": "poll", "sessionId": session})["running"])


def ended(node: NodeProcess, session: str) -> None:
    wait_until(lambda: not running(node, session), 20, "the end of the command")


class Typist:
    """A command of ours in front of a terminal."""

    def __init__(self, command: Command, *arguments: str) -> None:
        self.main, terminal = pty.openpty()
        files = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        self.process = start_process([*FARHAND, *arguments], command.env, **files, own_terminal=True)
        os.close(terminal)
        self.shown = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                self.shown += os.read(self.main, 65536).decode("utf-8", "replace")
            except OSError:
                return

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def sees(self, text: str) -> None:
        wait_until(lambda: text in self.shown, 20, f"{text!r} on the terminal")

    def status(self) -> int:
        return self.process.wait(60)


# -- ps ------------------------------------------------------------------------------------------------------------


def test_ps_shows_what_runs_as_a_table(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "sleep 1000")
    over = begin(hands, "true")
    ended(hands, over)
    done = command("ps")
    lines = done.out.splitlines()
    assert (done.status, done.err) == (0, "")
    assert lines[0].split() == ["NODE", "JOB", "STATE", "STARTED", "COMMAND"]
    [line] = [line for line in lines if session in line]
    assert line.split()[:3] == ["hands", session, "running"] and line.endswith("sleep 1000")
    assert over not in done.out


def test_ps_all_shows_how_commands_ended(command: Command, hands: NodeProcess) -> None:
    sessions = [begin(hands, text) for text in ("true", "exit 3", "kill -9 $$")]
    for session in sessions:
        ended(hands, session)
    lines = {line.split()[1]: line for line in command("ps", "--all").out.splitlines()}
    states = [lines[session] for session in sessions]
    assert " ok " in states[0] and "error: exit 3" in states[1] and "error: SIGKILL" in states[2]


def test_ps_of_one_node(command: Command, shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path: Path) -> None:
    mine = begin(hands, "sleep 1000")
    with NodeProcess(shared_gateway, tmp_path, "other") as other:
        theirs = begin(other, "sleep 1000")
        assert {mine, theirs} <= {job["job_id"] for job in command("ps", "--json").json()["jobs"]}
        assert [job["job_id"] for job in command("ps", "--node", "other", "--json").json()["jobs"]] == [theirs]
    done = command("ps", "--node", "nobody")
    assert (done.status, done.out, done.err) == (0, "", "no matching commands\n")


def test_ps_as_json_is_one_document(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "sleep 1000")
    over = begin(hands, "true")
    ended(hands, over)
    document = command("ps", "--json").json()
    assert document["count"] == len(document["jobs"]) and all(job["running"] for job in document["jobs"])
    assert session in {job["job_id"] for job in document["jobs"]}
    everything = {job["job_id"] for job in command("ps", "--all", "--json").json()["jobs"]}
    assert {session, over} <= everything


def test_escape_codes_in_a_command_do_not_reach_the_terminal(command: Command, hands: NodeProcess) -> None:
    begin(hands, "sleep 1000; echo '\x1b[31mred'")
    assert "\x1b" not in command("ps").out


# -- attach --------------------------------------------------------------------------------------------------------


def test_attach_shows_everything_from_the_beginning_and_ends_with_the_command(
    command: Command, hands: NodeProcess
) -> None:
    go = hands.workspace / f"go-{uuid.uuid4()}"
    session = begin(hands, f"echo ☃ first; until test -e {go}; do sleep 0.02; done; echo last; exit 3")
    process = command.start("attach", "hands", session)
    assert process.stdout is not None
    assert process.stdout.readline() == "☃ first\n"
    go.touch()
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("last\n", 0)
    assert "error: exit 3" in err


def test_attach_to_what_has_ended_shows_its_output(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "printf 'all of it'")
    ended(hands, session)
    done = command("attach", "hands", session)
    assert (done.status, done.out, done.err) == (0, "all of it", "ended: ok\n")


def test_attach_takes_the_end_of_an_id(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "echo found")
    ended(hands, session)
    assert command("attach", "hands", session[-12:]).out == "found\n"


def test_attach_near_the_end(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "seq 10000")
    ended(hands, session)
    lines = command("attach", "hands", session, "--tail").out.splitlines()
    assert lines == [str(number) for number in range(10_001 - len(lines), 10_001)] and 100 < len(lines) < 2000


def test_attach_sends_lines_from_a_pipe(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, 'read a; echo "one: $a"; read b; echo "two: $b"')
    done = command("attach", "hands", session, stdin="erste Zeile ☃\nzweite\n")
    assert (done.status, done.out) == (0, "one: erste Zeile ☃\ntwo: zweite\n")


def test_attach_sends_what_is_typed(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, 'read name; echo "hello, $name!"')
    typist = Typist(command, "attach", "hands", session)
    typist.sees("attached")
    typist.type("world\n")
    typist.sees("hello, world!")
    assert typist.status() == 0
    ended(hands, session)


@pytest.mark.parametrize("key", ["\x04", "\x03"])
def test_ctrl_d_and_ctrl_c_leave_and_the_command_continues(command: Command, hands: NodeProcess, key: str) -> None:
    session = begin(hands, "echo up; cat")
    typist = Typist(command, "attach", "hands", session)
    typist.sees("up")
    typist.type(key)
    assert typist.status() == 0
    typist.sees("detached; the command continues")
    assert running(hands, session)
    hands.ok("Process", {"action": "submit", "sessionId": session, "data": "its input is open"})
    wait_until(
        lambda: "its input is open" in hands.ok("Process", {"action": "log", "sessionId": session})["log"],
        15,
        "the echo",
    )


def test_sigint_leaves_without_a_terminal_too(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "echo up; sleep 1000")
    process = command.start("attach", "hands", session)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "detached; the command continues\n"
    assert process.returncode == 0 and running(hands, session)


def test_input_that_is_not_accepted_is_reported(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "exec 0<&-; echo closed; sleep 3")
    wait_until(lambda: "closed" in hands.ok("Process", {"action": "log", "sessionId": session})["log"], 15, "closed")
    done = command("attach", "hands", session, stdin="words\n")
    assert done.status == 0 and "stdin is not writable" in done.err and done.out == "closed\n"


@pytest.mark.parametrize("node", ["hands", "nobody"])
def test_attach_to_nothing_fails(command: Command, hands: NodeProcess, node: str) -> None:
    for job in ("nonsense", "", "../x"):
        done = command("attach", node, job, "--json")
        assert done.status == 1 and done.json()["error"]["code"] == "not_found", done


def test_attach_as_json_is_one_document(command: Command, hands: NodeProcess) -> None:
    session = begin(hands, "echo shown; exit 4")
    done = command("attach", "hands", session, "--json")
    assert done.status == 0 and done.err == "shown\n"
    assert done.json()["job_id"] == session and done.json()["exit_code"] == 4


@pytest.mark.parametrize("crash", [False, True])
def test_attach_survives_a_restart_of_the_gateway(tmp_path: Path, crash: bool) -> None:
    gateway = GatewayProcess(tmp_path / "home")
    gateway.start()
    try:
        with NodeProcess(gateway, tmp_path / "node", "hands") as node:
            session = begin(node, "for i in $(seq 200); do echo $i; sleep 0.02; done")
            process = Command(gateway.home).start("attach", "hands", session)
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "1\n"
            if crash:
                gateway.kill()
            else:
                gateway.stop()
            gateway.start()
            with process.stdout, process.stderr:
                out, err = process.stdout.read(), process.stderr.read()
            process.wait(60)
            assert out.splitlines() == [str(number) for number in range(2, 201)], err
            assert process.returncode == 0 and "Traceback" not in err
    finally:
        gateway.stop()


# -- call --follow -------------------------------------------------------------------------------------------------


def test_follow_prints_the_output_as_it_comes_and_then_how_it_ended(command: Command, hands: NodeProcess) -> None:
    go = hands.workspace / f"go-{uuid.uuid4()}"
    text = f"echo first ☃; until test -e {go}; do sleep 0.02; done; echo last; exit 3"
    process = command.start("call", "hands__Bash", f"command={text}", "--follow")
    assert process.stdout is not None
    assert process.stdout.readline() == "first ☃\n"
    go.touch()
    out, err = process.communicate(timeout=60)
    assert out == "last\n" and err.startswith("failed: exit status 3 after ")
    assert process.returncode == 1  # as the command failed


def test_follow_of_a_call_that_fails_has_status_1(command: Command, hands: NodeProcess) -> None:
    done = command("call", "hands__Bash", "command=echo before; sleep 1000", "--follow", "--timeout", "2")
    assert (done.status, done.out) == (1, "before\n")
    assert done.err.startswith("timeout: the call did not end within 2 s") and "ended" in done.err
    refused = command("call", "hands__Bash", "command=", "--follow")
    assert (refused.status, refused.out) == (1, "") and "command must not be empty" in refused.err
    unknown = command("call", "hands__Nope", "--follow")
    assert unknown.status == 1 and unknown.err.startswith("not_found: ")


def test_follow_of_a_tool_that_prints_nothing_shows_its_result(command: Command, hands: NodeProcess) -> None:
    (hands.workspace / "note.txt").write_text("text\n")
    done = command("call", "hands__Read", "path=note.txt", "--follow")
    assert done.status == 0 and done.json()["content"] == "1\ttext"


def test_follow_of_a_plug_ins_tool_shows_its_result(command: Command, hello: PluginProcess) -> None:
    done = command("call", "node.echo", "n=1", "--follow")
    assert done.status == 0 and done.json() == {"n": 1}


def test_follow_as_json_is_one_document(command: Command, hands: NodeProcess) -> None:
    done = command("call", "hands__Bash", "command=echo live", "--follow", "--json")
    assert (done.status, done.err) == (0, "live\n")
    assert done.json()["state"] == "ok" and done.json()["result"]["output"] == "live\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_cancels_the_call_that_is_followed(
    command: Command, shared_gateway: GatewayProcess, hands: NodeProcess, as_json: bool
) -> None:
    mark = f"mark-{uuid.uuid4()}"
    arguments = ["call", "hands__Bash", f"command=echo up; MARK={mark} setsid sleep 1000; true", "--follow"]
    process = command.start(*arguments, *(["--json"] if as_json else []))
    stream: Any = process.stderr if as_json else process.stdout
    assert stream.readline() == "up\n"
    wait_until(lambda: marked(f"MARK={mark}"), 15, "the command")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    reported = json.loads(out)["error"]["message"] if as_json else err
    assert process.returncode == 130 and "interrupted; cancelled on request" in reported and "ended" in reported
    wait_until(lambda: not marked(mark), 15, "the end of the tree")
    [record] = [call for call in shared_gateway.get("/v1/calls?state=cancelled")["calls"] if mark in str(call["args"])]
    assert record["error"]["kind"] == "cancelled"


def test_follow_and_background_exclude_each_other(command: Command, hands: NodeProcess) -> None:
    assert command("call", "hands__Bash", "command=true", "--follow", "--background").status == 2
