"""`Process` through a real gateway and a real node: every action, every error condition of the seed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, marked, wait_until

LISTED = {
    "sessionId",
    "status",
    "pid",
    "startedAt",
    "endedAt",
    "runtimeMs",
    "workdir",
    "command",
    "tail",
    "truncated",
    "exitCode",
    "signal",
    "timedOut",
}
UNKNOWN_SESSION = "00000000-0000-4000-8000-000000000000"
NEEDING = ("poll", "log", "write", "submit", "kill")


def begin(node: NodeProcess, command: str, **args: Any) -> str:
    return str(node.ok("Bash", {"command": command, "background": True, **args})["sessionId"])


def act(node: NodeProcess, action: str, session: str, **args: Any) -> Any:
    return node.ok("Process", {"action": action, "sessionId": session, **args})


def over(node: NodeProcess, session: str) -> Any:
    def ended() -> Any:
        answer = act(node, "poll", session)
        return None if answer["running"] else answer

    return wait_until(ended, 30, f"the end of session {session}")


def says(node: NodeProcess, session: str, text: str) -> None:
    wait_until(lambda: text in act(node, "log", session)["log"], 30, f"{text!r} in the log")


# -- list ----------------------------------------------------------------------------------------------------------


def test_a_node_without_sessions_lists_none(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(shared_gateway, tmp_path, "fresh") as node:
        node.ok("Bash", {"command": "echo a synchronous command is no session"})
        answer = node.ok("Process", {"action": "list"})
        assert answer == {"status": "completed", "sessions": [], "text": "No running or recent sessions."}


def test_the_list_has_running_and_finished_sessions_newest_first(hands: NodeProcess) -> None:
    first = begin(hands, "echo one; exit 5")
    over(hands, first)
    second = begin(hands, "sleep 1000")
    third = begin(hands, "sleep 1000")
    sessions = hands.ok("Process", {"action": "list"})["sessions"]
    assert [session["sessionId"] for session in sessions[:3]] == [third, second, first]
    starts = [session["startedAt"] for session in sessions]
    assert starts == sorted(starts, reverse=True)


def test_a_listed_session_has_every_field(hands: NodeProcess) -> None:
    finished = begin(hands, "echo out; exit 5")
    over(hands, finished)
    running = begin(hands, "echo still; sleep 1000")
    says(hands, running, "still")
    answer = hands.ok("Process", {"action": "list"})
    listed = {session["sessionId"]: session for session in answer["sessions"]}
    assert set(listed[finished]) == set(listed[running]) == LISTED
    done = listed[finished]
    assert (done["status"], done["exitCode"], done["signal"], done["timedOut"]) == ("failed", 5, None, False)
    assert (done["command"], done["tail"], done["truncated"]) == ("echo out; exit 5", "out\n", False)
    assert done["workdir"] == str(hands.workspace)
    assert done["endedAt"] - done["startedAt"] == done["runtimeMs"] >= 0
    alive = listed[running]
    assert (alive["status"], alive["endedAt"], alive["exitCode"]) == ("running", None, None)
    assert alive["tail"] == "still\n" and Path(f"/proc/{alive['pid']}").exists() and alive["runtimeMs"] >= 0
    assert f"{running} running" in answer["text"] and "echo out; exit 5" in answer["text"]


def test_a_synchronous_command_is_not_listed(hands: NodeProcess) -> None:
    session = hands.ok("Bash", {"command": "true"})["sessionId"]
    assert session not in json.dumps(hands.ok("Process", {"action": "list"}))


@pytest.mark.parametrize(("minutes", "there"), [(29, True), (31, False)])
def test_a_finished_session_is_kept_for_30_minutes(
    shared_gateway: GatewayProcess, tmp_path: Path, minutes: int, there: bool
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "aged") as node:
        session = begin(node, "echo long ago; exit 6")
        over(node, session)
        node.stop()
        [record] = node.state.rglob(f"{session}/record.jsonl")
        facts = [json.loads(line) for line in record.read_text().splitlines() if line]
        for fact in facts:  # as if all of it had happened before
            for name in ("askedAt", "startedAt", "endedAt"):
                if name in fact:
                    fact[name] -= minutes * 60_000
        record.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
        node.start()
        listed = [found["sessionId"] for found in node.ok("Process", {"action": "list"})["sessions"]]
        assert listed == ([session] if there else [])
        if there:
            assert act(node, "poll", session)["exitCode"] == 6
        else:
            for action in NEEDING:
                message = node.fails("Process", {"action": action, "sessionId": session}, "not_found")
                assert session in message


# -- poll ----------------------------------------------------------------------------------------------------------


def test_poll_of_a_running_session(hands: NodeProcess) -> None:
    session = begin(hands, "echo first; sleep 1000")
    says(hands, session, "first")
    assert act(hands, "poll", session) == {
        "status": "running",
        "sessionId": session,
        "exitCode": None,
        "signal": None,
        "timedOut": False,
        "tail": "first\n",
        "running": True,
    }


@pytest.mark.parametrize(
    ("command", "status", "code", "name"),
    [
        ("echo x", "completed", 0, None),
        ("echo x; exit 9", "failed", 9, None),
        ("echo x; kill -INT $$; kill -KILL $$", "failed", None, "SIGINT"),
    ],
)
def test_poll_of_a_finished_session(
    hands: NodeProcess, command: str, status: str, code: int | None, name: str | None
) -> None:
    session = begin(hands, command)
    answer = over(hands, session)
    assert (answer["status"], answer["exitCode"], answer["signal"]) == (status, code, name)
    assert (answer["running"], answer["timedOut"], answer["tail"]) == (False, False, "x\n")


def test_poll_of_a_session_that_timed_out(hands: NodeProcess) -> None:
    answer = over(hands, begin(hands, "sleep 1000", timeout=300))
    assert (answer["status"], answer["timedOut"], answer["signal"]) == ("timed_out", True, "SIGTERM")


def test_the_tail_of_a_poll_is_the_last_4000_characters(hands: NodeProcess) -> None:
    session = begin(hands, "for i in $(seq 2000); do echo ☃ $i; done")
    assert over(hands, session)["tail"] == "".join(f"☃ {i}\n" for i in range(1, 2001))[-4000:]


# -- log -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted(hands: NodeProcess) -> str:
    """A finished session with the lines 0 to 499."""
    session = begin(hands, "for i in $(seq 0 499); do echo line $i; done; exit 2")
    over(hands, session)
    return session


def test_log_gives_the_first_200_lines_by_default(hands: NodeProcess, counted: str) -> None:
    answer = act(hands, "log", counted)
    assert answer["log"].split("\n") == [f"line {i}" for i in range(200)]
    assert (answer["status"], answer["sessionId"]) == ("failed", counted)
    assert (answer["exitCode"], answer["signal"], answer["truncated"]) == (2, None, False)


def test_log_tells_the_number_of_lines_and_characters(hands: NodeProcess, counted: str) -> None:
    answer = act(hands, "log", counted, offset=499)
    assert answer["totalLines"] == 500
    assert answer["totalChars"] == len("".join(f"line {i}\n" for i in range(500)))


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [
        (0, 3, [0, 1, 2]),
        (250, 2, [250, 251]),
        (498, 200, [498, 499]),
        (500, 10, []),
        (10**9, 10, []),
        (5, 0, [5]),
        (0, 10**9, list(range(500))),
    ],
)
def test_log_pages_by_offset_and_limit(
    hands: NodeProcess, counted: str, offset: int, limit: int, expected: list[int]
) -> None:
    """A limit under 1 is 1."""
    log = act(hands, "log", counted, offset=offset, limit=limit)["log"]
    assert log == "\n".join(f"line {i}" for i in expected)


@pytest.mark.parametrize("args", [{"offset": -1}, {"limit": -1}, {"offset": 1.5}, {"limit": "all"}])
def test_log_refuses_numbers_that_make_no_sense(hands: NodeProcess, counted: str, args: dict[str, Any]) -> None:
    message = hands.fails("Process", {"action": "log", "sessionId": counted, **args}, "invalid_args")
    assert next(iter(args)) in message


def test_log_of_a_running_session_grows(hands: NodeProcess) -> None:
    session = begin(hands, "while read line; do echo heard $line; done")
    assert act(hands, "log", session)["log"] == "(no output yet)"
    act(hands, "submit", session, data="one")
    says(hands, session, "heard one")
    act(hands, "submit", session, data="two")
    says(hands, session, "heard two")
    answer = act(hands, "log", session)
    assert (answer["status"], answer["log"], answer["totalLines"]) == ("running", "heard one\nheard two", 2)
    assert "exitCode" not in answer


def test_log_without_any_output_says_so(hands: NodeProcess) -> None:
    session = begin(hands, "true")
    over(hands, session)
    answer = act(hands, "log", session)
    assert (answer["log"], answer["totalLines"], answer["totalChars"]) == ("(no output recorded)", 0, 0)


def test_log_beyond_200_000_characters_keeps_the_tail(hands: NodeProcess) -> None:
    session = begin(hands, "for i in $(seq 30000); do echo 1234567890; done; echo the end")
    over(hands, session)
    answer = act(hands, "log", session, offset=0, limit=10**6)
    assert answer["truncated"] is True and answer["totalChars"] == 200_000
    assert answer["log"].endswith("1234567890\nthe end")


# -- write and submit ----------------------------------------------------------------------------------------------


def test_write_sends_raw_data_and_submit_appends_a_newline(hands: NodeProcess) -> None:
    session = begin(hands, 'read -r a; echo "first: $a"; read -r b; echo "second: $b"')
    assert act(hands, "write", session, data="no ")["bytesWritten"] == 3
    assert act(hands, "write", session, data="newline ü") == {
        "status": "running",
        "sessionId": session,
        "bytesWritten": 10,
    }
    assert act(hands, "log", session)["log"] == "(no output yet)"
    assert act(hands, "submit", session, data=" yet")["bytesWritten"] == 5
    says(hands, session, "first: no newline ü yet")
    act(hands, "write", session, data="two\n")
    assert over(hands, session)["tail"] == "first: no newline ü yet\nsecond: two\n"


def test_data_is_empty_by_default(hands: NodeProcess) -> None:
    session = begin(hands, 'read line; echo "[$line]"')
    assert act(hands, "write", session)["bytesWritten"] == 0
    assert act(hands, "submit", session)["bytesWritten"] == 1
    assert over(hands, session)["tail"] == "[]\n"


def test_more_input_than_a_pipe_holds_arrives_whole(hands: NodeProcess) -> None:
    session = begin(hands, "sleep 0.3; head -c 500000 | sha256sum")
    act(hands, "write", session, data="abcdefghij" * 50_000)
    assert over(hands, session)["tail"].split()[0] == hashlib.sha256(b"abcdefghij" * 50_000).hexdigest()


@pytest.mark.parametrize("action", ["write", "submit"])
def test_input_for_a_session_that_has_exited_fails(hands: NodeProcess, action: str) -> None:
    session = begin(hands, "true")
    over(hands, session)
    message = hands.fails("Process", {"action": action, "sessionId": session, "data": "x"}, "failed")
    assert message == f"Session {session} has already exited"


@pytest.mark.parametrize("action", ["write", "submit"])
def test_input_for_a_closed_stdin_fails(hands: NodeProcess, action: str) -> None:
    session = begin(hands, "exec 0<&-; echo closed; sleep 1000")
    says(hands, session, "closed")
    message = hands.fails("Process", {"action": action, "sessionId": session, "data": "x"}, "failed")
    assert message == f"Session {session} stdin is not writable"


def test_a_yielded_session_takes_input(hands: NodeProcess) -> None:
    session = hands.ok("Bash", {"command": "read line; echo got $line", "yieldMs": 10})["sessionId"]
    act(hands, "submit", session, data="it")
    assert over(hands, session)["tail"] == "got it\n"


# -- kill ----------------------------------------------------------------------------------------------------------


def test_kill_ends_the_whole_tree_by_sigkill(hands: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    command = f"export MARK={mark}; trap '' TERM; setsid sleep 1000 & (setsid sleep 1000 &); echo up; sleep 1000"
    session = begin(hands, command)
    says(hands, session, "up")
    answer = act(hands, "kill", session)
    assert answer["sessionId"] == session and answer["message"].startswith("Kill signal sent")
    assert re.search(r"ended \d+ processes", answer["message"]) and len(answer["ended"]) >= 3
    ended = over(hands, session)
    assert (ended["signal"], ended["exitCode"], ended["status"]) == ("SIGKILL", None, "failed")
    wait_until(lambda: not marked(mark), 15, "the end of the tree")


def test_kill_of_a_session_that_has_exited_fails(hands: NodeProcess) -> None:
    session = begin(hands, "true")
    over(hands, session)
    message = hands.fails("Process", {"action": "kill", "sessionId": session}, "failed")
    assert session in message and "already exited" in message


def test_kill_ends_what_a_finished_session_left_running(hands: NodeProcess) -> None:
    mark = f"mark-{uuid.uuid4()}"
    session = begin(hands, f"MARK={mark} setsid sleep 1000 & echo done")
    over(hands, session)
    assert marked(mark)
    assert [process["name"] for process in act(hands, "kill", session)["ended"]] == ["sleep"]
    wait_until(lambda: not marked(mark), 15, "the end of what was left")


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [{}, {"sessionId": ""}, {"sessionId": None}])
@pytest.mark.parametrize("action", NEEDING)
def test_every_action_but_list_needs_a_session(hands: NodeProcess, action: str, args: dict[str, Any]) -> None:
    message = hands.fails("Process", {"action": action, **args}, "invalid_args")
    assert message == "sessionId is required for this action"


@pytest.mark.parametrize("session", [UNKNOWN_SESSION, "nonsense", "../../etc", "a\0b", "☃", "x" * 1000])
@pytest.mark.parametrize("action", NEEDING)
def test_an_unknown_session_is_not_found(hands: NodeProcess, action: str, session: str) -> None:
    message = hands.fails("Process", {"action": action, "sessionId": session}, "not_found")
    assert message == f"No session found for {session}"


@pytest.mark.parametrize("action", NEEDING)
def test_a_session_that_is_not_backgrounded_is_refused(hands: NodeProcess, action: str) -> None:
    session = hands.ok("Bash", {"command": "true"})["sessionId"]
    message = hands.fails("Process", {"action": action, "sessionId": session}, "not_found")
    assert message == f"Session {session} is not backgrounded"


def test_a_command_with_a_waiting_caller_is_not_backgrounded(
    shared_gateway: GatewayProcess, hands: NodeProcess
) -> None:
    call = hands.begin("Bash", {"command": "echo waiting; sleep 1000"})

    def job() -> Any:
        jobs = shared_gateway.get("/v1/jobs?node_id=hands")["jobs"]
        return next((found["job_id"] for found in jobs if found["call_id"] == call), None)

    session = wait_until(job, 15, "the job of the call")
    message = hands.fails("Process", {"action": "kill", "sessionId": session}, "not_found")
    assert message == f"Session {session} is not backgrounded"
    assert shared_gateway.request("DELETE", f"/v1/calls/{call}").json()["state"] == "cancelled"


@pytest.mark.parametrize("action", ["", "nope", "list poll", 5, None])
def test_an_unknown_action_is_refused(hands: NodeProcess, action: Any) -> None:
    assert "action" in hands.fails("Process", {"action": action}, "invalid_args")


# -- the keeper ----------------------------------------------------------------------------------------------------


@pytest.fixture
def apart(shared_gateway: GatewayProcess, tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path, "apart") as node:
        yield node


def test_a_session_whose_keeper_was_killed_is_lost_and_says_so(apart: NodeProcess) -> None:
    """How it ended cannot be known; what it said until then can."""
    session = begin(apart, "echo said; sleep 1000")
    says(apart, session, "said")
    pid = next(found["pid"] for found in apart.ok("Process", {"action": "list"})["sessions"])
    worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL)
    answer = over(apart, session)
    assert (answer["status"], answer["exitCode"], answer["tail"]) == ("lost", None, "said\n")
