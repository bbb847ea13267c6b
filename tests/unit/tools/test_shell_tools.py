"""`Bash` and `Process` word by word of the seed, over real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from farhand.machine.jobs import process_tree as tree
from farhand.machine.jobs.jobs import Jobs
from farhand.node.limits import ToolLimits
from farhand.node.tools import node_tools
from farhand.protocol.errors import Cancelled, Failed, InvalidArgs, NotFound
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.sdk.context import CancelToken, ToolContext
from farhand.tools.node_family import node_spec
from farhand.tools.node_shell import NodeShellTools
from farhand.tools.schema import Parameters

Scenario = Callable[[NodeShellTools, Jobs], Awaitable[Any]]

COMPLETED = {
    "status",
    "sessionId",
    "exitCode",
    "signal",
    "timedOut",
    "startedAt",
    "endedAt",
    "durationMs",
    "output",
    "tail",
    "truncated",
    "workdir",
}
RUNNING = {"status", "sessionId", "pid", "startedAt", "tail", "workdir"}


class Node:
    """A workspace with the two tools, which can be opened again and again; at its end nothing lives."""

    def __init__(self, path: Path) -> None:
        self.workspace = path / "workspace"
        self.workspace.mkdir()
        self.folder = path / "jobs"
        self.environment = {"HOME": str(path), "PATH": os.environ["PATH"], "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        self.call: str | None = None

    def run(self, scenario: Scenario, *, end: bool = False, **options: Any) -> Any:
        async def main() -> Any:
            async with Jobs(self.folder, environment=self.environment, **{"linger": 0.2, **options}) as jobs:
                tools = NodeShellTools(jobs, self.workspace, call_id=lambda: self.call)
                try:
                    async with asyncio.timeout(100):
                        return await scenario(tools, jobs)
                finally:
                    if end:
                        for job in jobs.listing():
                            await jobs.end(job, grace=0)

        return asyncio.run(main())


@pytest.fixture
def node(tmp_path: Path):
    node = Node(tmp_path)
    yield node

    async def nothing(tools: NodeShellTools, jobs: Jobs) -> None: ...

    node.run(nothing, end=True)


async def called(tools: NodeShellTools, name: str, arguments: dict[str, Any]) -> Any:
    """Call a tool as the node does, with its arguments as JSON."""
    tool = node_tools([tools], ToolLimits()).find(name)
    assert tool is not None
    return await tool.run(ToolContext("call", name, None, CancelToken()), Raw(json.dumps(arguments).encode()))


async def poll_until_over(tools: NodeShellTools, session: str) -> dict[str, Any]:
    give_up = time.monotonic() + 60
    while (answer := await tools.Process(action="poll", sessionId=session))["running"]:
        assert time.monotonic() < give_up, "it never ended"
        await asyncio.sleep(0.01)
    return answer


async def log_until(tools: NodeShellTools, session: str, text: str) -> None:
    give_up = time.monotonic() + 60
    while text not in (answer := await tools.Process(action="log", sessionId=session))["log"]:
        assert time.monotonic() < give_up, f"never said {text!r}: {answer}"
        await asyncio.sleep(0.01)


# Bash, waiting


def test_the_completed_object_has_every_field(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        before = time.time() * 1000
        answer = await tools.Bash(command="echo hello; echo oops >&2")
        assert set(answer) == COMPLETED
        uuid.UUID(answer["sessionId"])
        assert answer["status"] == "completed"
        assert (answer["exitCode"], answer["signal"], answer["timedOut"]) == (0, None, False)
        assert answer["output"] == answer["tail"] == "hello\noops\n"
        assert answer["truncated"] is False
        assert answer["workdir"] == str(node.workspace)
        assert before - 1 <= answer["startedAt"] <= answer["endedAt"] <= time.time() * 1000 + 1
        assert answer["durationMs"] == answer["endedAt"] - answer["startedAt"]

    node.run(scenario)


def test_a_non_zero_exit_is_a_result(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="echo no; exit 42")
        assert (answer["status"], answer["exitCode"], answer["output"]) == ("failed", 42, "no\n")
        answer = await tools.Bash(command="kill -KILL $$")
        assert (answer["status"], answer["exitCode"], answer["signal"]) == ("failed", None, "SIGKILL")

    node.run(scenario)


def test_the_working_directory_is_the_workspace_or_relative_to_it_or_absolute(node: Node) -> None:
    (node.workspace / "sub").mkdir()

    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        assert (await tools.Bash(command="pwd"))["output"] == f"{node.workspace}\n"
        answer = await tools.Bash(command="pwd", workdir="sub")
        assert answer["output"] == f"{node.workspace}/sub\n"
        assert answer["workdir"] == f"{node.workspace}/sub"
        assert (await tools.Bash(command="pwd", workdir="/"))["output"] == "/\n"
        with pytest.raises(NotFound, match=re.escape(f"{node.workspace}/missing' does not exist")):
            await tools.Bash(command="pwd", workdir="missing")

    node.run(scenario)


def test_the_login_shell_runs_the_command(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="shopt -q login_shell && echo $BASH $-")
        assert answer["output"].startswith("/bin/bash ")
        assert "c" in answer["output"].split()[1]

    node.run(scenario)


def test_a_timeout_is_a_failed_result_that_says_what_was_ended(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="echo before; setsid sleep 1000 & sleep 1001", timeout=2000)
        assert answer["status"] == "failed"
        assert answer["timedOut"] is True
        assert answer["output"] == "before\n"
        assert "bash" in [process["name"] for process in answer["ended"]] or len(answer["ended"]) > 1
        assert tree.marked_with(f"FARHAND_JOB={answer['sessionId']}") == []
        assert (await tools.Bash(command="echo fine", timeout=0))["output"] == "fine\n"

    node.run(scenario)


def test_a_child_left_running_is_reported_and_does_not_delay_the_answer(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="sleep 1000 & echo started")
        assert answer["status"] == "completed"
        assert answer["output"] == "started\n"
        assert len(answer["leftRunning"]) == 1

    node.run(scenario, end=True)


def test_a_waiting_command_finds_its_input_at_the_end(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        assert (await tools.Bash(command="cat; echo end"))["output"] == "end\n"

    node.run(scenario)


def test_the_last_200000_characters_are_kept(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        exact = await tools.Bash(command="head -c 200000 /dev/zero | tr '\\0' x")
        assert exact["output"] == "x" * 200_000
        assert exact["truncated"] is False
        assert exact["tail"] == "x" * 4_000
        over = await tools.Bash(command="printf first; head -c 199999 /dev/zero | tr '\\0' x; printf y")
        assert over["output"] == "x" * 199_999 + "y"
        assert over["truncated"] is True
        flood = await tools.Bash(command="yes 0123456789 | head -c 30000000; echo last")
        assert len(flood["output"]) == 200_000
        assert flood["output"].endswith("\nlast\n") or flood["output"].endswith("last\n")
        assert flood["tail"] == flood["output"][-4_000:]
        assert flood["truncated"] is True
        job = await jobs.get(flood["sessionId"])
        assert jobs.read(job, 0, 11).data == b"0123456789\n"

    node.run(scenario)


@pytest.mark.parametrize("character", ["ä", "€", "🙂"])
def test_characters_survive_every_border(node: Node, character: str) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        (node.workspace / "text").write_text(character * 300_000)
        for before in ("", "x", "xx", "xxx"):
            answer = await tools.Bash(command=f"printf '%s' '{before}'; cat text")
            assert answer["output"] == character * 200_000
            assert answer["tail"] == character * 4_000
            assert answer["truncated"] is True
        short = await tools.Bash(command="head -c 120000 text; sleep 0.05; tail -c +120001 text | head -c 60000")
        assert short["output"] == (character * 300_000).encode()[:180_000].decode("utf-8", "replace")

    node.run(scenario)


def test_a_character_that_arrives_in_pieces_is_whole(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command=r"printf '\360\237'; sleep 0.1; printf '\231\202'; printf '\377end'")
        assert answer["output"] == "🙂\ufffdend"

    node.run(scenario)


# Bash, not waiting


def test_background_answers_at_once_with_the_running_object(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="sleep 1000", background=True, yieldMs=100)
        assert set(answer) == RUNNING
        assert answer["status"] == "running"
        assert answer["workdir"] == str(node.workspace)
        os.kill(answer["pid"], 0)

    node.run(scenario, end=True)


def test_yield_answers_with_the_result_when_it_comes_in_time(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="echo quick", yieldMs=120_000)
        assert set(answer) == COMPLETED
        assert answer["output"] == "quick\n"
        with pytest.raises(NotFound, match="is not backgrounded"):
            await tools.Process(action="poll", sessionId=answer["sessionId"])

    node.run(scenario)


def test_yield_backgrounds_what_takes_longer(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        answer = await tools.Bash(command="echo soon; read line; exit 3", yieldMs=300)
        assert set(answer) == RUNNING
        await tools.Process(action="submit", sessionId=answer["sessionId"])
        over = await poll_until_over(tools, answer["sessionId"])
        assert (over["status"], over["exitCode"]) == ("failed", 3)

    node.run(scenario)


def test_yield_is_clamped_at_both_ends(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        assert (await tools.Bash(command="sleep 1000", yieldMs=0))["status"] == "running"
        assert (await tools.Bash(command="sleep 1000", yieldMs=-5))["status"] == "running"
        assert (await tools.Bash(command="true", yieldMs=10**9))["status"] == "completed"

    node.run(scenario, end=True)


def test_a_command_that_ends_as_it_is_backgrounded_is_never_lost(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        async def one(number: int) -> None:
            answer = await tools.Bash(command=f"sleep 0.0{number % 10}; echo {number}", yieldMs=30 + number)
            if answer["status"] == "running":
                over = await poll_until_over(tools, answer["sessionId"])
                assert over["tail"] == f"{number}\n"
            else:
                assert answer["output"] == f"{number}\n"

        for start in range(0, 40, 8):
            await asyncio.gather(*(one(number) for number in range(start, start + 8)))

    node.run(scenario)


# Bash, bad input and cancelling


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"command": ""}, "command must not be empty"),
        ({"command": " \n\t"}, "command must not be empty"),
        ({"command": 5}, "parameter 'command': expected 'str', got 'int'"),
        ({"command": "echo \0"}, "NUL"),
        ({"command": "true", "timeout": -1}, "timeout must not be negative, but is -1"),
        ({"command": "true", "timeout": "1"}, "parameter 'timeout': expected 'float', got 'str'"),
        ({"command": "true", "timeout": float("inf")}, "arguments: "),
        ({"command": "true", "timeout": True}, "parameter 'timeout': expected 'float', got 'bool'"),
        ({"command": "true", "background": "yes"}, "parameter 'background': expected 'bool', got 'str'"),
        ({"command": "true", "workdir": ""}, "workdir '' is not a path"),
        ({"command": "true", "workdir": 5}, "parameter 'workdir': expected 'str | null', got 'int'"),
        ({"command": "true", "workdir": "a\0b"}, "is not a path"),
    ],
)
def test_bad_arguments_are_named(node: Node, arguments: dict[str, Any], text: str) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        with pytest.raises(InvalidArgs, match=re.escape(text)):
            await called(tools, "Bash", arguments)
        assert jobs.listing() == []

    node.run(scenario)


def test_cancelling_ends_the_tree_and_says_what_was_ended(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        call = asyncio.ensure_future(tools.Bash(command="trap '' TERM; setsid sleep 1000 & sleep 1001; sleep 1002"))
        give_up = time.monotonic() + 30
        while not jobs.listing() or len(await jobs.processes(jobs.listing()[0])) < 3:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(Cancelled, match=r"^cancelled: ended \d processes \(.*bash \d+.*sleep \d+"):
            await call
        assert tree.marked_with(jobs.listing()[0].cookie) == []

    node.run(scenario)


def test_cancelling_at_any_moment_leaves_nothing(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        for delay in (0.0, 0.001, 0.003, 0.006, 0.01, 0.03):
            call = asyncio.ensure_future(tools.Bash(command="sleep 1000"))
            await asyncio.sleep(delay)
            call.cancel()
            with pytest.raises((Cancelled, asyncio.CancelledError)):
                await call
        assert [job for job in jobs.listing() if job.running] == []
        for job in jobs.listing():
            assert tree.marked_with(job.cookie) == []

    node.run(scenario)


def test_cancelling_again_and_again_still_ends_the_tree(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        call = asyncio.ensure_future(tools.Bash(command="trap '' TERM; while :; do sleep 0.1; done"))
        while not jobs.listing():
            await asyncio.sleep(0.01)
        job = jobs.listing()[0]
        for _ in range(5):
            call.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await call
        assert await jobs.wait(job, 30)
        assert tree.marked_with(job.cookie) == []

    node.run(scenario)


def test_a_command_whose_keeper_is_killed_has_an_unknown_outcome(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        call = asyncio.ensure_future(tools.Bash(command="sleep 1000; true"))
        while not jobs.listing():
            await asyncio.sleep(0.01)
        job = jobs.listing()[0]
        worker = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(Failed, match=r"^outcome unknown: .*ended \d process"):
            await call
        assert tree.marked_with(job.cookie) == []

    node.run(scenario)


def test_the_same_call_again_finds_its_command(node: Node) -> None:
    node.call = "call-7"
    command = "echo ran >> ran; sleep 0.3; echo done; exit 3"

    async def interrupted(tools: NodeShellTools, jobs: Jobs) -> None:
        await jobs.start(command, workdir=node.workspace, call_id=node.call)

    async def resumed(tools: NodeShellTools, jobs: Jobs) -> dict[str, Any]:
        return await tools.Bash(command=command)

    node.run(interrupted)
    first = node.run(resumed)
    assert (first["exitCode"], first["output"]) == (3, "done\n")
    assert node.run(resumed) == first
    assert (node.workspace / "ran").read_text() == "ran\n"


# Process


def test_list_shows_backgrounded_sessions_newest_first(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        empty = await tools.Process(action="list")
        assert empty == {"status": "completed", "sessions": [], "text": "No running or recent sessions."}
        await tools.Bash(command="echo not listed")
        first = await tools.Bash(command="echo one; exit 4", background=True)
        await poll_until_over(tools, first["sessionId"])
        await asyncio.sleep(0.01)
        second = await tools.Bash(command="sleep 1000", background=True)
        answer = await tools.Process(action=" List ")
        assert [session["sessionId"] for session in answer["sessions"]] == [second["sessionId"], first["sessionId"]]
        running, finished = answer["sessions"]
        fields = (
            "sessionId status pid startedAt endedAt runtimeMs workdir command tail truncated exitCode signal timedOut"
        )
        assert set(running) == set(finished) == set(fields.split())
        assert (running["status"], running["endedAt"], running["exitCode"]) == ("running", None, None)
        assert (finished["status"], finished["exitCode"], finished["tail"]) == ("failed", 4, "one\n")
        assert finished["endedAt"] - finished["startedAt"] == finished["runtimeMs"]
        assert finished["command"] == "echo one; exit 4"
        lines = answer["text"].splitlines()
        assert lines[0].startswith(f"{second['sessionId']} running   ")
        assert lines[1] == f"{first['sessionId']} failed    {finished['runtimeMs']}ms :: echo one; exit 4"

    node.run(scenario, end=True)


def test_poll_tells_the_state_before_and_after(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="echo up; read line", background=True))["sessionId"]
        await log_until(tools, session, "up")
        assert await tools.Process(action="poll", sessionId=session) == {
            "status": "running",
            "sessionId": session,
            "exitCode": None,
            "signal": None,
            "timedOut": False,
            "tail": "up\n",
            "running": True,
        }
        await tools.Process(action="submit", sessionId=session, data="go")
        over = await poll_until_over(tools, session)
        assert (over["status"], over["exitCode"], over["running"]) == ("completed", 0, False)
        late = (await tools.Bash(command="sleep 1000", background=True, timeout=100))["sessionId"]
        assert (await poll_until_over(tools, late))["status"] == "timed_out"

    node.run(scenario)


def test_log_pages_by_line(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="seq 1 500; printf end", background=True))["sessionId"]
        await poll_until_over(tools, session)
        answer = await tools.Process(action="log", sessionId=session)
        assert set(answer) == {
            "status",
            "sessionId",
            "log",
            "totalLines",
            "totalChars",
            "truncated",
            "exitCode",
            "signal",
        }
        assert answer["log"] == "\n".join(map(str, range(1, 201)))
        assert (answer["totalLines"], answer["totalChars"], answer["truncated"]) == (501, 1895, False)
        page = await tools.Process(action="log", sessionId=session, offset=498, limit=5)
        assert page["log"] == "499\n500\nend"
        assert (await tools.Process(action="log", sessionId=session, offset=9, limit=0))["log"] == "10"
        assert (await tools.Process(action="log", sessionId=session, offset=501))["log"] == ""

    node.run(scenario)


def test_log_keeps_the_tail_of_a_long_output(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="seq -w 1 100000", background=True))["sessionId"]
        await poll_until_over(tools, session)
        answer = await tools.Process(action="log", sessionId=session, offset=0, limit=10**6)
        assert (answer["truncated"], answer["totalChars"]) == (True, 200_000)
        assert answer["log"].endswith("099999\n100000")
        assert (await tools.Process(action="list"))["sessions"][0]["truncated"] is True

    node.run(scenario)


def test_log_of_silence_says_so(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="read line", background=True))["sessionId"]
        answer = await tools.Process(action="log", sessionId=session)
        assert (answer["log"], answer["totalLines"], answer["totalChars"]) == ("(no output yet)", 0, 0)
        assert "exitCode" not in answer
        await tools.Process(action="submit", sessionId=session)
        await poll_until_over(tools, session)
        assert (await tools.Process(action="log", sessionId=session))["log"] == "(no output recorded)"

    node.run(scenario)


def test_write_is_raw_and_submit_presses_enter(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command='read line; echo "[$line]"', background=True))["sessionId"]
        assert await tools.Process(action="write", sessionId=session, data="grüß") == {
            "status": "running",
            "sessionId": session,
            "bytesWritten": 6,
        }
        assert (await tools.Process(action="submit", sessionId=session, data=" dich"))["bytesWritten"] == 6
        assert (await poll_until_over(tools, session))["tail"] == "[grüß dich]\n"

    node.run(scenario)


def test_kill_ends_the_whole_session(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        command = "trap '' TERM; setsid sleep 1000 & echo up; sleep 1001; sleep 1002"
        session = (await tools.Bash(command=command, background=True))["sessionId"]
        await log_until(tools, session, "up")
        answer = await tools.Process(action="kill", sessionId=session)
        assert answer["message"].startswith("Kill signal sent")
        assert answer["status"] == "killed"
        assert tree.marked_with(f"FARHAND_JOB={session}") == []
        over = await tools.Process(action="poll", sessionId=session)
        assert (over["running"], over["exitCode"], over["signal"]) == (False, None, "SIGKILL")
        with pytest.raises(Failed, match=f"Session {session} has already exited"):
            await tools.Process(action="kill", sessionId=session)

    node.run(scenario)


def test_kill_reaches_what_a_finished_session_left_running(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="setsid sleep 1000 &", background=True))["sessionId"]
        await poll_until_over(tools, session)
        answer = await tools.Process(action="kill", sessionId=session)
        assert len(answer["ended"]) == 1
        assert answer["status"] == "killed"

    node.run(scenario)


@pytest.mark.parametrize("action", ["poll", "log", "write", "submit", "kill"])
def test_an_action_on_no_session_fails(node: Node, action: str) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        with pytest.raises(InvalidArgs, match=r"^sessionId is required for this action$"):
            await tools.Process(action=action)
        with pytest.raises(NotFound, match="No session found for 00000000"):
            await tools.Process(action=action, sessionId="00000000-0000-0000-0000-000000000000")
        with pytest.raises(NotFound, match="No session found"):
            await tools.Process(action=action, sessionId="../../etc")
        foreground = (await tools.Bash(command="true"))["sessionId"]
        with pytest.raises(NotFound, match="is not backgrounded"):
            await tools.Process(action=action, sessionId=foreground)

    node.run(scenario)


@pytest.mark.parametrize("action", ["write", "submit"])
def test_writing_to_a_session_that_cannot_take_it_fails(node: Node, action: str) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="true", background=True))["sessionId"]
        await poll_until_over(tools, session)
        with pytest.raises(Failed, match=f"^Session {session} has already exited$"):
            await tools.Process(action=action, sessionId=session, data="x")
        closed = (await tools.Bash(command="exec 0<&-; echo up; sleep 1000", background=True))["sessionId"]
        await log_until(tools, closed, "up")
        with pytest.raises(Failed, match=f"^Session {closed} stdin is not writable$"):
            await tools.Process(action=action, sessionId=closed, data="x")

    node.run(scenario, end=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"action": "dance"}, "Unknown action 'dance': use one of list, poll, log, write, submit, kill"),
        ({"action": 5}, "parameter 'action': expected 'str', got 'int'"),
        ({"action": "log", "offset": -1}, "offset must not be negative, but is -1"),
        ({"action": "log", "limit": -1}, "limit must not be negative, but is -1"),
        ({"action": "log", "limit": "5"}, "parameter 'limit': expected 'int', got 'str'"),
        ({"action": "log", "limit": 1.5}, "parameter 'limit': expected 'int', got 'float'"),
        ({"action": "write", "data": 5}, "parameter 'data': expected 'str', got 'int'"),
        ({"action": "poll", "sessionId": 5}, "parameter 'sessionId': expected 'str | null', got 'int'"),
    ],
)
def test_bad_arguments_of_process_are_named(node: Node, arguments: dict[str, Any], text: str) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="sleep 1000", background=True))["sessionId"]
        with pytest.raises(InvalidArgs, match=re.escape(text)):
            await called(tools, "Process", {"sessionId": session, **arguments})

    node.run(scenario, end=True)


def test_sessions_are_the_same_after_the_program_was_started_again(node: Node) -> None:
    async def before(tools: NodeShellTools, jobs: Jobs) -> list[str]:
        started = await tools.Bash(command="echo early; read line; echo $line; exit 9", background=True)
        yielded = await tools.Bash(command="sleep 1000", yieldMs=10)
        return [started["sessionId"], yielded["sessionId"]]

    async def after(tools: NodeShellTools, jobs: Jobs) -> None:
        listed = await tools.Process(action="list")
        assert {session["sessionId"] for session in listed["sessions"]} == set(ids)
        await tools.Process(action="submit", sessionId=ids[0], data="late")
        over = await poll_until_over(tools, ids[0])
        assert (over["exitCode"], over["tail"]) == (9, "early\nlate\n")
        assert (await tools.Process(action="kill", sessionId=ids[1]))["status"] == "killed"

    ids = node.run(before)
    node.run(after)


def test_a_finished_session_is_retained_for_a_while(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        session = (await tools.Bash(command="true", background=True))["sessionId"]
        await jobs.wait(await jobs.get(session))
        while (await tools.Process(action="list"))["sessions"]:
            await asyncio.sleep(0.05)
        with pytest.raises(NotFound, match=f"No session found for {session}"):
            await tools.Process(action="poll", sessionId=session)

    node.run(scenario, listed_seconds=1.0)


def test_a_lost_session_says_so_and_keeps_its_log(node: Node) -> None:
    async def scenario(tools: NodeShellTools, jobs: Jobs) -> None:
        started = await tools.Bash(command="echo kept; sleep 1000", background=True)
        session = started["sessionId"]
        await log_until(tools, session, "kept")
        worker = int(Path(f"/proc/{started['pid']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)
        over = await poll_until_over(tools, session)
        assert (over["status"], over["exitCode"], over["tail"]) == ("lost", None, "kept\n")
        with pytest.raises(Failed, match="was lost"):
            await tools.Process(action="write", sessionId=session, data="x")
        assert (await tools.Process(action="kill", sessionId=session))["ended"]

    node.run(scenario)


def test_the_schemas_carry_the_names_and_defaults_of_the_seed() -> None:
    bash = Parameters(NodeShellTools.Bash, skip=1).schema
    assert bash["required"] == ["command"]
    shown = ["command", "workdir", "timeout", "background", "yieldMs", "trial"]
    assert list(bash["properties"])[:6] == shown
    listed = node_spec(NODE_TOOLS["Bash"], NodeShellTools.Bash, skip=1)
    assert list(listed.parameters["properties"]) == shown
    assert list(listed.unlisted) == ["argv", "attached", "terminal"]
    assert bash["properties"]["timeout"]["default"] == 300_000
    process = Parameters(NodeShellTools.Process, skip=1).schema
    assert process["required"] == ["action"]
    assert list(process["properties"])[:5] == ["action", "sessionId", "data", "offset", "limit"]
    defaults = [process["properties"][name]["default"] for name in ("data", "offset", "limit")]
    assert defaults == ["", 0, 200]
