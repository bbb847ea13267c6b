"""`Bash` through a real gateway and a real node: the table of the seed, word by word."""

from __future__ import annotations

import re
import shlex
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, marked, wait_until

COMPLETED = {
    "status": str,
    "sessionId": str,
    "exitCode": int,
    "signal": type(None),
    "timedOut": bool,
    "startedAt": int,
    "endedAt": int,
    "durationMs": int,
    "output": str,
    "tail": str,
    "truncated": bool,
    "workdir": str,
}
RUNNING = {"status": str, "sessionId": str, "pid": int, "startedAt": int, "tail": str, "workdir": str}
UUID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")
PYTHON = shlex.quote(sys.executable)


def new_mark() -> str:
    return f"mark-{uuid.uuid4()}"


def over(node: NodeProcess, session: str) -> Any:
    """The poll of a session once its command has ended."""

    def ended() -> Any:
        answer = node.ok("Process", {"action": "poll", "sessionId": session})
        return None if answer["running"] else answer

    return wait_until(ended, 30, f"the end of session {session}")


def dies(mark: str) -> None:
    wait_until(lambda: not marked(mark), 15, f"the end of every process with {mark}")


# -- synchronous -------------------------------------------------------------------------------------------------


def test_a_completed_command_has_every_field_of_the_seed(hands: NodeProcess) -> None:
    before = time.time() * 1000
    result = hands.ok("Bash", {"command": "echo out; echo err >&2; sleep 0.2"})
    assert {name: type(value) for name, value in result.items()} == COMPLETED
    assert (result["status"], result["exitCode"], result["signal"]) == ("completed", 0, None)
    assert (result["timedOut"], result["truncated"]) == (False, False)
    assert sorted(result["output"].splitlines()) == ["err", "out"] and result["tail"] == result["output"]
    assert UUID.fullmatch(result["sessionId"])
    assert before - 1000 < result["startedAt"] <= result["endedAt"] < time.time() * 1000 + 1000
    assert result["durationMs"] == result["endedAt"] - result["startedAt"] >= 200
    assert result["workdir"] == str(hands.workspace)


def test_a_command_never_runs_before_its_start(hands: NodeProcess) -> None:
    for _ in range(5):
        result = hands.ok("Bash", {"command": "date +%s%3N"})
        assert result["startedAt"] <= int(result["output"])


@pytest.mark.parametrize("code", [1, 2, 42, 126, 127, 255])
def test_a_non_zero_exit_is_a_result_with_status_failed(hands: NodeProcess, code: int) -> None:
    result = hands.ok("Bash", {"command": f"echo said; exit {code}"})
    assert (result["status"], result["exitCode"], result["signal"]) == ("failed", code, None)
    assert result["output"] == "said\n" and result["timedOut"] is False


def test_a_command_that_does_not_exist_is_a_result_with_127(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "no-such-command-here"})
    assert result["exitCode"] == 127 and "no-such-command-here" in result["output"]


@pytest.mark.parametrize("name", ["TERM", "KILL", "SEGV", "HUP"])
def test_a_command_ended_by_a_signal_names_it(hands: NodeProcess, name: str) -> None:
    result = hands.ok("Bash", {"command": f"kill -{name} $$; sleep 5"})
    assert (result["status"], result["exitCode"], result["signal"]) == ("failed", None, f"SIG{name}")
    assert result["timedOut"] is False


def test_both_streams_come_in_the_order_they_were_written(hands: NodeProcess) -> None:
    command = "for i in 1 2 3; do echo out $i; echo err $i >&2; done"
    expected = "".join(f"out {i}\nerr {i}\n" for i in (1, 2, 3))
    assert hands.ok("Bash", {"command": command})["output"] == expected


def test_standard_input_is_at_its_end(hands: NodeProcess) -> None:
    assert hands.ok("Bash", {"command": "cat; read x || echo no input"})["output"] == "no input\n"


def test_a_child_that_holds_the_output_does_not_hold_the_answer(hands: NodeProcess) -> None:
    mark = new_mark()
    result = hands.ok("Bash", {"command": f"echo begun; MARK={mark} sleep 1000 &"})
    assert (result["status"], result["exitCode"], result["output"]) == ("completed", 0, "begun\n")
    assert result["durationMs"] < 20_000
    [pid] = [pid for pid in marked(mark) if pid == result["leftRunning"][0]["pid"]]
    assert result["leftRunning"] == [{"pid": pid, "name": "sleep"}]


def test_two_commands_run_at_the_same_time(hands: NodeProcess) -> None:
    """The first waits for what only the second does."""
    call = hands.begin("Bash", {"command": "until test -e together; do sleep 0.02; done; echo met"})
    hands.ok("Bash", {"command": "touch together"})
    assert hands.end_of(call)["result"]["output"] == "met\n"


# -- the shell -----------------------------------------------------------------------------------------------------


def test_the_users_login_shell_runs_the_command(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    shell = tmp_path / "myshell"
    shell.write_text('#!/bin/sh\necho "shell got: $1 $2"\n')
    shell.chmod(0o755)
    with NodeProcess(shared_gateway, tmp_path, "own-shell", env={"SHELL": str(shell)}) as node:
        assert node.ok("Bash", {"command": "echo hello"})["output"] == "shell got: -lc echo hello\n"


def test_a_login_shell_reads_the_profile(hands: NodeProcess) -> None:
    (hands.user_home / ".bash_profile").write_text("export FROM_PROFILE=yes\n")
    try:
        command = "shopt -q login_shell && echo login; echo $FROM_PROFILE"
        assert hands.ok("Bash", {"command": command})["output"] == "login\nyes\n"
    finally:
        (hands.user_home / ".bash_profile").unlink()


@pytest.mark.parametrize("shell", [None, "bash", "/no/such/shell", "/etc/passwd"])
def test_without_a_usable_shell_bin_sh_runs_the_command(
    shared_gateway: GatewayProcess, tmp_path: Path, shell: str | None
) -> None:
    with NodeProcess(shared_gateway, tmp_path, "no-shell", env={"SHELL": shell}) as node:
        assert node.ok("Bash", {"command": "tr '\\0' ' ' < /proc/$$/cmdline"})["output"].startswith("/bin/sh -lc ")


# -- the working directory -----------------------------------------------------------------------------------------


def test_the_workdir_is_the_workspace_by_default(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "pwd"})
    assert result["output"] == f"{hands.workspace}\n" and result["workdir"] == str(hands.workspace)


def test_a_relative_workdir_begins_at_the_workspace(hands: NodeProcess) -> None:
    (hands.workspace / "deep" / "er").mkdir(parents=True, exist_ok=True)
    result = hands.ok("Bash", {"command": "pwd", "workdir": "deep/er"})
    assert result["output"] == f"{hands.workspace}/deep/er\n" and result["workdir"] == f"{hands.workspace}/deep/er"


def test_an_absolute_workdir_is_used_as_it_is(hands: NodeProcess, tmp_path: Path) -> None:
    result = hands.ok("Bash", {"command": "pwd", "workdir": str(tmp_path)})
    assert result["output"] == f"{tmp_path}\n" and result["workdir"] == str(tmp_path)


def test_a_missing_workdir_is_not_found_and_nothing_runs(hands: NodeProcess) -> None:
    witness = hands.workspace / "ran-without-workdir"
    message = hands.fails("Bash", {"command": f"touch {witness}", "workdir": "no/such/folder"}, "not_found")
    assert f"{hands.workspace}/no/such/folder" in message and not witness.exists()


def test_a_file_cannot_be_the_workdir(hands: NodeProcess) -> None:
    (hands.workspace / "plain-file").write_text("")
    assert "not a directory" in hands.fails("Bash", {"command": "pwd", "workdir": "plain-file"}, "invalid_args")


@pytest.mark.parametrize("workdir", ["", "nul\0here"])
def test_a_workdir_that_is_not_a_path_is_refused(hands: NodeProcess, workdir: str) -> None:
    assert "workdir" in hands.fails("Bash", {"command": "pwd", "workdir": workdir}, "invalid_args")


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", " ", "\n\t "])
def test_an_empty_command_is_refused(hands: NodeProcess, command: str) -> None:
    assert hands.fails("Bash", {"command": command}, "invalid_args") == "command must not be empty"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("timeout", -1),
        ("timeout", -0.5),
        *((name, value) for name in ("timeout", "yieldMs") for value in ("soon", True, [1])),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_and_nothing_runs(
    hands: NodeProcess, parameter: str, value: Any
) -> None:
    witness = hands.workspace / f"ran-{uuid.uuid4()}"
    assert parameter in hands.fails("Bash", {"command": f"touch {witness}", parameter: value}, "invalid_args")
    assert not witness.exists()


def test_a_negative_yield_is_clamped_to_the_least(hands: NodeProcess) -> None:
    answer = hands.ok("Bash", {"command": "sleep 1000", "yieldMs": -5})
    assert answer["status"] == "running"
    hands.ok("Process", {"action": "kill", "sessionId": answer["sessionId"]})


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_background_must_be_true_or_false(hands: NodeProcess, value: Any) -> None:
    assert "background" in hands.fails("Bash", {"command": "true", "background": value}, "invalid_args")


def test_a_nul_in_the_command_is_refused(hands: NodeProcess) -> None:
    assert "NUL" in hands.fails("Bash", {"command": "echo a\0b"}, "invalid_args")


def test_a_syntax_error_is_the_shells_to_report(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "echo 'unclosed"})
    assert result["status"] == "failed" and result["exitCode"] != 0 and result["output"]


def test_a_command_too_long_for_the_system_is_refused(hands: NodeProcess) -> None:
    message = hands.fails("Bash", {"command": f"echo {'x' * 300_000}"}, "invalid_args")
    assert "too long" in message and "nothing was started" in message


def test_on_a_full_disk_a_running_command_ends_as_it_would_and_no_other_is_begun(
    shared_gateway: GatewayProcess, tmp_path: Path, mounted: Any
) -> None:
    """What cannot be kept of its output is missing, and the result says so; its exit is not lost."""
    disk = mounted("size=1m")
    with NodeProcess(shared_gateway, tmp_path, "cramped", state=disk / "state") as node:
        result = node.ok("Bash", {"command": "yes | head -c 3000000; exit 4"})
        assert (result["exitCode"], result["truncated"]) == (4, True)
        witness = node.workspace / "ran"
        for background in (False, True):
            message = node.fails("Bash", {"command": f"touch {witness}", "background": background}, "failed")
            assert "No space left on device" in message and "nothing was started" in message
        assert not witness.exists()
        node.ok("Write", {"path": "elsewhere", "content": "there is room here"})


# -- output --------------------------------------------------------------------------------------------------------


def test_output_in_any_script_comes_through(hands: NodeProcess) -> None:
    assert hands.ok("Bash", {"command": "printf 'grüße ☃ 🎉 日本'"})["output"] == "grüße ☃ 🎉 日本"


def test_a_character_written_in_pieces_stays_whole(hands: NodeProcess) -> None:
    command = r"printf '\342'; sleep 0.1; printf '\230'; sleep 0.1; printf '\203'"
    assert hands.ok("Bash", {"command": command})["output"] == "☃"


def test_bytes_that_are_not_text_are_replaced(hands: NodeProcess) -> None:
    assert hands.ok("Bash", {"command": r"printf 'a\377b\000c'"})["output"] == "a\ufffdb\0c"


def test_200_000_characters_are_kept_whole(hands: NodeProcess) -> None:
    text = "é" * 100_000 + "z" * 100_000
    (hands.workspace / "whole").write_text(text)
    result = hands.ok("Bash", {"command": "cat whole"})
    assert result["output"] == text and result["truncated"] is False and result["tail"] == text[-4000:]


@pytest.mark.parametrize("sign", ["z", "é", "🎉"])
def test_beyond_200_000_characters_the_tail_is_preserved(hands: NodeProcess, sign: str) -> None:
    text = "head" + sign * 200_000 + "end"
    (hands.workspace / "more").write_text(text)
    result = hands.ok("Bash", {"command": "cat more"})
    assert result["truncated"] is True
    assert len(result["output"]) == 200_000 and result["output"] == text[-200_000:]
    assert result["tail"] == text[-4000:]


def test_the_tail_is_the_last_4000_characters(hands: NodeProcess) -> None:
    text = "".join(f"line {i} ☃\n" for i in range(1000))
    (hands.workspace / "lines").write_text(text)
    result = hands.ok("Bash", {"command": "cat lines"})
    assert result["output"] == text and result["tail"] == text[-4000:] and result["truncated"] is False


def test_a_flood_does_not_hold_the_command_up(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "yes | head -c 30000000; echo; echo last"})
    assert result["exitCode"] == 0 and result["truncated"] is True and result["output"].endswith("\nlast\n")


# -- timeout -------------------------------------------------------------------------------------------------------


def test_a_timeout_is_a_failed_result_that_says_so(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "echo before; sleep 60; echo after", "timeout": 1500})
    assert (result["status"], result["timedOut"]) == ("failed", True)
    assert (result["exitCode"], result["signal"]) == (None, "SIGTERM")
    assert result["output"] == "before\n" and 1500 <= result["durationMs"] < 30_000
    assert "sleep" in {process["name"] for process in result["ended"]}


def test_sigterm_comes_first_and_may_be_answered(hands: NodeProcess) -> None:
    command = "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    result = hands.ok("Bash", {"command": command, "timeout": 1500})
    assert (result["status"], result["timedOut"], result["exitCode"]) == ("failed", True, 7)
    assert result["output"].startswith("ready\n") and result["output"].endswith("bye\n")


def test_sigkill_comes_250_ms_later(hands: NodeProcess) -> None:
    command = "trap 'echo not yet' TERM; while :; do sleep 0.05; done"
    result = hands.ok("Bash", {"command": command, "timeout": 1500})
    assert (result["timedOut"], result["exitCode"], result["signal"]) == (True, None, "SIGKILL")
    assert "not yet" in result["output"] and 1750 <= result["durationMs"] < 30_000


TREES = {
    "child": "sleep 1000",
    "background": "sleep 1000 & sleep 1000",
    "setsid": "setsid sleep 1000 & sleep 1000",
    "nohup": "nohup sleep 1000 >/dev/null 2>&1 & sleep 1000",
    "reparented": "(setsid sh -c 'sleep 1000 & sleep 1000 &' &) ; sleep 1000",
    "disowned": "sleep 1000 & disown; sleep 1000",
    "double fork": f"{PYTHON} -c 'import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "time.sleep(1000)' & sleep 1000",
    "deaf daemon": f"{PYTHON} -c 'import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
    "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(1000)' & sleep 1000",
}


@pytest.mark.parametrize("tree", TREES)
def test_a_timeout_ends_the_whole_tree(hands: NodeProcess, tree: str) -> None:
    mark = new_mark()
    result = hands.ok("Bash", {"command": f"export MARK={mark}; {TREES[tree]}", "timeout": 1000})
    assert result["timedOut"] is True and result["ended"]
    dies(mark)


def test_a_timeout_ends_a_backgrounded_command_too(hands: NodeProcess) -> None:
    mark = new_mark()
    command = f"export MARK={mark}; setsid sleep 1000 & sleep 1000"
    session = hands.ok("Bash", {"command": command, "background": True, "timeout": 700})["sessionId"]
    answer = over(hands, session)
    assert (answer["timedOut"], answer["exitCode"], answer["signal"]) == (True, None, "SIGTERM")
    dies(mark)


def test_a_timeout_of_0_means_no_timeout(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = hands.begin("Bash", {"command": "sleep 0.5; echo done", "timeout": 0})
    record = hands.end_of(call)
    assert record["result"]["output"] == "done\n" and record["result"]["timedOut"] is False
    assert record["deadline_at"] - record["created_at"] == 24 * 60 * 60 * 1000


def test_the_call_is_given_a_little_more_than_the_command(hands: NodeProcess) -> None:
    """So that the command's own timeout is what ends it, and its result says so."""
    for args, least in (({}, 300_000), ({"timeout": 600_000}, 600_000), ({"timeout": 1}, 1)):
        record = hands.end_of(hands.begin("Bash", {"command": "true", **args}))
        assert least < record["deadline_at"] - record["created_at"] <= least + 60_000


def test_the_calls_own_timeout_ends_the_command_and_says_what_it_ended(hands: NodeProcess) -> None:
    mark = new_mark()
    command = f"export MARK={mark}; setsid sleep 1000 & sleep 1000"
    message = hands.fails("Bash", {"command": command, "timeout": 60_000}, "timeout", timeout_ms=1000)
    assert "did not end within 1 s" in message and re.search(r"ended \d+ processes \(.*sleep \d+", message)
    dies(mark)


# -- background ----------------------------------------------------------------------------------------------------


def test_background_returns_at_once_with_every_field_of_the_seed(hands: NodeProcess) -> None:
    mark = new_mark()
    before = time.time() * 1000
    result = hands.ok("Bash", {"command": f": {mark}; sleep 1000; true", "background": True})
    assert {name: type(value) for name, value in result.items()} == RUNNING
    assert result["status"] == "running" and result["tail"] == "" and UUID.fullmatch(result["sessionId"])
    assert result["pid"] in marked(mark)
    assert before - 1000 < result["startedAt"] < time.time() * 1000 + 1000
    assert result["workdir"] == str(hands.workspace)


def test_background_beats_yield(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "true", "background": True, "yieldMs": 120_000})
    assert result["status"] == "running"
    assert over(hands, result["sessionId"])["exitCode"] == 0


def test_a_background_command_can_be_given_input(hands: NodeProcess) -> None:
    session = hands.ok("Bash", {"command": "read line; echo got $line", "background": True})["sessionId"]
    hands.ok("Process", {"action": "submit", "sessionId": session, "data": "this"})
    assert over(hands, session)["tail"] == "got this\n"


# -- yield ---------------------------------------------------------------------------------------------------------


def test_a_command_that_ends_within_its_yield_is_completed(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "echo quick; exit 3", "yieldMs": 60_000})
    assert {name: type(value) for name, value in result.items()} == COMPLETED
    assert (result["status"], result["exitCode"], result["output"]) == ("failed", 3, "quick\n")
    session = result["sessionId"]
    assert "not backgrounded" in hands.fails("Process", {"action": "poll", "sessionId": session}, "not_found")


def test_a_command_that_outlasts_its_yield_is_backgrounded(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "echo begun; read go; echo went; exit 4", "yieldMs": 2000})
    assert {name: type(value) for name, value in result.items()} == RUNNING
    assert (result["status"], result["tail"]) == ("running", "begun\n")
    hands.ok("Process", {"action": "submit", "sessionId": result["sessionId"]})
    ended = over(hands, result["sessionId"])
    assert (ended["exitCode"], ended["tail"]) == (4, "begun\nwent\n")


@pytest.mark.parametrize("milliseconds", [0, 1, 9.5])
def test_a_yield_under_10_ms_is_10_ms(hands: NodeProcess, milliseconds: float) -> None:
    result = hands.ok("Bash", {"command": "sleep 1000", "yieldMs": milliseconds})
    assert result["status"] == "running"
    assert time.time() * 1000 - result["startedAt"] >= 10


def test_a_yield_over_120_s_is_taken_as_120_s(hands: NodeProcess) -> None:
    assert hands.ok("Bash", {"command": "echo early", "yieldMs": 10**12})["output"] == "early\n"


def test_the_timeout_holds_within_the_yield(hands: NodeProcess) -> None:
    result = hands.ok("Bash", {"command": "sleep 60", "yieldMs": 60_000, "timeout": 300})
    assert (result["status"], result["timedOut"]) == ("failed", True)
