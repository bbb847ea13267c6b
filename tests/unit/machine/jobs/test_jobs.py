"""The job engine's promises, each with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.jobs import jobs as jobs_module
from farhand.machine.jobs import process_tree as tree
from farhand.machine.jobs.ipc_client import connected
from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs, login_shell
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError

Scenario = Callable[[Jobs], Awaitable[Any]]
SOURCE = Path(jobs_module.__file__).parents[3]


class Box:
    """A folder of jobs that a test opens as often as it likes; at its end nothing of them lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "jobs"
        self.environment = {"HOME": str(path), "PATH": os.environ["PATH"], "SHELL": "/bin/bash", "LANG": "C.UTF-8"}

    def run(self, scenario: Scenario, *, end: bool = False, **options: Any) -> Any:
        async def main() -> Any:
            async with Jobs(self.folder, environment=self.environment, **{"linger": 0.2, **options}) as jobs:
                try:
                    return await scenario(jobs)
                finally:
                    if end:
                        for job in jobs.listing():
                            await jobs.end(job, grace=0)

        return asyncio.run(main())

    def keepers(self) -> list[int]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.folder).encode() in words:
                found.append(int(pid))
        return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def box(tmp_path: Path):
    box = Box(tmp_path)
    yield box

    async def nothing(jobs: Jobs) -> None: ...

    if box.folder.exists():
        box.run(nothing, end=True)
    for pid in box.keepers():
        kill(pid)


async def finish(jobs: Jobs, command: str, **options: Any) -> tuple[Job, bytes]:
    job = await jobs.start(command, **{"workdir": jobs.folder.parent, **options})
    assert await jobs.wait(job, 60), f"{command!r} did not end"
    return job, jobs.tail(job, 10**9).data


async def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"never: {what}"
        await asyncio.sleep(0.01)
    return found


# a command and its end


def test_output_and_exit_code_are_kept(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, output = await finish(jobs, "echo out; echo err >&2; exit 7")
        assert output == b"out\nerr\n"
        assert job.exit is not None
        assert (job.exit.exit_code, job.exit.signal, job.exit.timed_out) == (7, None, False)
        assert job.exit.ended_at - job.started_at == job.exit.duration_ms
        assert job.exit.size == len(output)

    box.run(scenario)


def test_a_signal_is_named(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, _ = await finish(jobs, "kill -USR1 $$; sleep 100")
        assert job.exit is not None
        assert (job.exit.exit_code, job.exit.signal) == (None, "SIGUSR1")

    box.run(scenario)


def test_the_login_shell_is_used_and_falls_back_to_sh(tmp_path: Path) -> None:
    script = tmp_path / "shell"
    script.write_text("#!/bin/sh\n")
    assert login_shell({"SHELL": "/bin/bash"}) == ("/bin/bash", "-lc")
    assert login_shell({}) == ("/bin/sh", "-lc")
    assert login_shell({"SHELL": "bash"}) == ("/bin/sh", "-lc")
    assert login_shell({"SHELL": str(script)}) == ("/bin/sh", "-lc")


def test_the_profile_of_a_login_shell_is_read(box: Box) -> None:
    (box.path / ".profile").write_text("export FROM_PROFILE=yes\n")

    async def scenario(jobs: Jobs) -> None:
        assert (await finish(jobs, "echo $FROM_PROFILE"))[1] == b"yes\n"

    box.run(scenario)


def test_a_child_that_holds_the_output_does_not_hold_up_the_end(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, output = await finish(jobs, "sleep 1000 & echo said")
        assert output == b"said\n"
        assert job.exit is not None
        (left,) = job.exit.left
        assert [process.pid for process in await jobs.processes(job)] == [left.pid]

    box.run(scenario, end=True)


def test_left_over_processes_of_a_command_are_killed_with_it(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, _ = await finish(jobs, "setsid sleep 1000 & sleep 1001 &")
        ending = await jobs.end(job, grace=0)
        assert len(ending.ended) == 2
        assert ending.survivors == ()
        assert await jobs.processes(job) == ()

    box.run(scenario)


def test_words_of_a_child_that_come_after_the_end_are_kept(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, first = await finish(jobs, "(sleep 0.5; echo late) & echo early")
        assert first == b"early\n"
        await until(lambda: jobs.tail(job, 100).data == b"early\nlate\n", "the late words")
        assert job.exit is not None
        assert job.exit.size == len(b"early\n")

    box.run(scenario)


def test_last_words_behind_a_pipe_are_not_lost(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        for _ in range(10):
            _, output = await finish(jobs, "exec > >(cat); seq 1 2000")
            assert output == "".join(f"{n}\n" for n in range(1, 2001)).encode()

    box.run(scenario)


def test_ending_asks_first_and_the_command_can_say_good_bye(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done", workdir="/")
        await until(lambda: jobs.size(job), "the first word")
        ending = await jobs.end(job, grace=10)
        assert "bash" in [process.name for process in ending.ended]
        assert job.exit is not None
        assert job.exit.exit_code == 5
        assert jobs.tail(job, 100).data.endswith(b"bye\n")

    box.run(scenario)


def test_a_timeout_ends_the_whole_tree_and_says_so(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        command = "trap '' TERM; setsid sleep 1000 & sleep 1001; sleep 1002"
        job, _ = await finish(jobs, command, timeout=2.0)
        assert job.exit is not None
        assert job.exit.timed_out
        assert job.exit.signal == "SIGKILL"
        assert "bash" in {process.name for process in job.exit.ended}
        assert tree.marked_with(job.cookie) == []

    box.run(scenario)


def test_a_timeout_may_be_as_long_as_one_likes(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        for seconds in (1e6, 1e12, 1e300):
            job, output = await finish(jobs, "sleep 0.05; echo fine", timeout=seconds)
            assert (output, job.lost) == (b"fine\n", False)

    box.run(scenario)


def test_a_clients_nonsense_does_not_hurt_the_job(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("read line; exit 4", workdir="/", stdin=True)
        for nonsense in (b"nonsense\n", b"[]\n", b"{}\n", b'{"id":1,"do":"write"}\n', b'{"id":1,"do":"dance"}\n', b""):
            reader, writer = await asyncio.open_unix_connection(sock=connected(jobs.folder / job.id / "socket"))
            writer.write(nonsense)
            writer.write_eof()
            await reader.read()
            writer.close()
        await jobs.write(job, b"\n")
        assert await jobs.wait(job, 30)
        assert job.exit is not None
        assert job.exit.exit_code == 4

    box.run(scenario)


def test_a_signal_reaches_the_command(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("trap 'echo got; exit 3' INT; echo up; while :; do sleep 0.01; done", workdir="/")
        await until(lambda: jobs.size(job), "the first word")
        await jobs.signal(job, signal.SIGINT)
        assert await jobs.wait(job, 30)
        assert job.exit is not None
        assert job.exit.exit_code == 3
        with pytest.raises(InvalidArgs, match="no signal 999"):
            await jobs.signal(job, 999)
        with pytest.raises(Failed, match="already exited"):
            await jobs.signal(job, signal.SIGINT)

    box.run(scenario)


# what a command finds


def test_standard_input_is_at_its_end_unless_asked_for(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, output = await finish(jobs, "cat; echo done")
        assert output == b"done\n"
        with pytest.raises(Failed, match="already exited"):
            await jobs.write(job, b"x")

    box.run(scenario)


def test_input_is_written_and_closed(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("cat; echo end", workdir="/", stdin=True)
        assert await jobs.write(job, b"one\n") == 4
        await until(lambda: jobs.size(job) == 4, "the echo")
        assert await jobs.write(job, bytes(range(256))) == 256
        await jobs.close_stdin(job)
        assert await jobs.wait(job, 30)
        assert jobs.tail(job, 1000).data == b"one\n" + bytes(range(256)) + b"end\n"

    box.run(scenario)


def test_unread_input_is_refused_beyond_a_limit_and_never_blocks(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("sleep 1000", workdir="/", stdin=True)
        await jobs.write(job, b"x" * 1_000_000)
        with pytest.raises(Failed, match="over the limit"):
            await jobs.write(job, b"x" * 1_000_000)
        closed = await jobs.start("exec 0<&-; echo up; sleep 1000", workdir="/", stdin=True)
        await until(lambda: jobs.size(closed), "the input to be closed")
        with pytest.raises(Failed, match="not writable"):
            await jobs.write(closed, b"x")

    box.run(scenario, end=True)


def test_the_command_finds_an_ordinary_world(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        mask = os.umask(0)
        os.umask(mask)
        _, output = await finish(jobs, "umask; pwd; yes | head -n1; echo ${PIPESTATUS[0]}; ls /proc/self/fd | wc -l")
        assert output.decode().split() == [f"{mask:04o}", str(box.path), "y", "141", "4"]

    box.run(scenario)


def test_environment_is_given_and_never_written_down(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, output = await finish(jobs, "echo $SECRET", env={"SECRET": "hunter2"})
        assert output == b"hunter2\n"
        assert b"hunter2" not in (jobs.folder / job.id / "record.jsonl").read_bytes()

    box.run(scenario)


@pytest.mark.parametrize(
    ("workdir", "error", "text"),
    [
        ("/nowhere/at/all", NotFound, "'/nowhere/at/all' does not exist"),
        ("/etc/passwd", InvalidArgs, "'/etc/passwd' is not a directory"),
        ("/tmp/\0", InvalidArgs, "cannot use working directory"),
    ],
)
def test_a_workdir_that_cannot_be_used_starts_nothing(
    box: Box, workdir: str, error: type[ToolError], text: str
) -> None:
    async def scenario(jobs: Jobs) -> None:
        with pytest.raises(error, match=re.escape(text)):
            await jobs.start("touch ran", workdir=workdir, call_id="c")
        assert await jobs.find_call("c") is None
        assert not [name for name in os.listdir(jobs.folder) if not name.startswith("keeper")]

    box.run(scenario)


def test_a_command_no_system_takes_starts_nothing(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        with pytest.raises(InvalidArgs, match="too long for the system"):
            await jobs.start(": " + "x" * 3_000_000, workdir="/")
        with pytest.raises(InvalidArgs, match="NUL"):
            await jobs.start("echo \0", workdir="/")
        with pytest.raises(Failed, match="cannot start '/no/such/shell'"):
            await jobs.start("true", workdir="/", shell=("/no/such/shell", "-c"))
        assert not [name for name in os.listdir(jobs.folder) if not name.startswith("keeper")]

    box.run(scenario)


# output by offset


def test_output_is_followed_without_gap_or_repeat(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("for n in $(seq 1 300); do echo line $n; sleep 0.002; done", workdir="/")
        seen = b""
        async with asyncio.timeout(60):
            async for chunk in jobs.follow(job):
                assert chunk.offset == len(seen)
                seen += chunk.data
            again = b"".join([chunk.data async for chunk in jobs.follow(job, offset=1000)])
        assert seen == "".join(f"line {n}\n" for n in range(1, 301)).encode()
        assert again == seen[1000:]

    box.run(scenario)


def test_a_follower_is_woken_by_output_and_by_the_end(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("read line; printf $line; read line", workdir="/", stdin=True)
        chunks = jobs.follow(job)
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await jobs.write(job, b"word\n")
        assert (await asyncio.wait_for(waiting, 30)).data == b"word"
        waiting = asyncio.ensure_future(anext(chunks, None))
        await jobs.write(job, b"\n")
        assert await asyncio.wait_for(waiting, 30) is None

    box.run(scenario)


def test_a_flood_is_bounded_on_disk_and_offsets_stay_true(box: Box) -> None:
    limit = 2 * 1024 * 1024

    async def scenario(jobs: Jobs) -> None:
        job, kept = await finish(jobs, f"{sys.executable} -c 'for n in range(2_000_000): print(f\"{{n:09d}}\")'")
        assert jobs.size(job) == 20_000_000
        assert limit * 0.8 < len(kept) <= limit + 65536
        on_disk = sum(file.stat().st_size for file in (jobs.folder / job.id).glob("output.*"))
        assert on_disk <= limit + 65536
        first = jobs.read(job, 0, 10)
        assert first.skipped == first.offset > 0
        assert jobs.read(job, 19_999_990, 100).data == b"001999999\n"
        assert jobs.read(job, 15_000_000 + first.offset % 10, 10).skipped in (0, first.offset - 15_000_000)
        line = jobs.read(job, 19_000_000, 10)
        assert line.data == b"001900000\n"
        assert jobs.read(job, 20_000_000).data == b""

    box.run(scenario, output_limit=limit)


def test_a_flood_does_not_stop_at_the_limit(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job, _ = await finish(jobs, "head -c 300000000 /dev/zero; echo; echo last")
        assert jobs.size(job) == 300_000_006
        assert jobs.tail(job, 5).data == b"last\n"

    box.run(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
def test_a_full_disk_stops_neither_the_command_nor_its_exit(box: Box) -> None:
    box.folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(box.folder)], check=True)
    try:

        async def scenario(jobs: Jobs) -> None:
            job, kept = await finish(jobs, "head -c 3000000 /dev/zero | tr '\\0' x; exit 9")
            assert job.exit is not None
            assert (job.exit.exit_code, job.exit.size) == (9, 3_000_000)
            assert 0 < len(kept) < 1_100_000
            with pytest.raises(Failed, match="No space left on device"):
                for _ in range(300):
                    (jobs.folder / job.id / f"fill{time.monotonic_ns()}").write_bytes(b"")
                    await finish(jobs, "true")
            for file in (jobs.folder / job.id).glob("output.*"):
                file.unlink()
            await until(lambda: b"exited" in (jobs.folder / job.id / "record.jsonl").read_bytes(), "the exit")

        box.run(scenario)
    finally:
        for pid in box.keepers():
            kill(pid)
        subprocess.run(["umount", "-l", str(box.folder)], check=True)


# at most once


def test_a_call_starts_once_however_often_it_is_asked(box: Box) -> None:
    async def scenario(jobs: Jobs) -> str:
        async def start() -> Job:
            return await jobs.start(f"echo ran >> {box.path}/ran", workdir="/", call_id="call-1")

        found = await asyncio.gather(*(start() for _ in range(20)))
        assert len({job.id for job in found}) == 1
        assert await jobs.wait(found[0], 30)
        assert (await start()) is found[0]
        assert await jobs.find_call("call-1") is found[0]
        assert await jobs.find_call("call-2") is None
        return found[0].id

    first = box.run(scenario)
    assert box.run(scenario) == first
    assert (box.path / "ran").read_text() == "ran\n"


def test_two_programs_start_a_call_once(box: Box) -> None:
    async def scenario(one: Jobs) -> None:
        async with Jobs(box.folder, environment=box.environment, linger=0.2) as two:

            async def start(jobs: Jobs, call: str) -> Job:
                return await jobs.start(f"echo ran >> {box.path}/ran; exit 4", workdir="/", call_id=call)

            for number in range(20):
                jobs = await asyncio.gather(start(one, str(number)), start(two, str(number)))
                assert jobs[0].id == jobs[1].id
                assert await one.wait(jobs[0], 30)
                assert await two.wait(jobs[1], 30)
                assert [job.exit.exit_code for job in jobs if job.exit] == [4, 4]

    box.run(scenario)
    assert (box.path / "ran").read_text() == "ran\n" * 20


def test_a_start_that_is_cancelled_leaves_nothing_running(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        for delay in (0, 0.001, 0.002, 0.004, 0.008):
            start = asyncio.ensure_future(jobs.start("sleep 1000", workdir="/", job_id=f"j{delay}".replace(".", "-")))
            await asyncio.sleep(delay)
            if start.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await start
            else:
                await jobs.end(await start)
        await asyncio.sleep(0.2)
        for name in os.listdir(jobs.folder):
            if name.startswith("j"):
                await until(lambda name=name: not tree.marked_with(f"FARHAND_JOB={name}"), "the end of its tree")

    box.run(scenario)


# outliving


OWNER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from farhand.machine.jobs.jobs import Jobs

async def main():
    async with Jobs(sys.argv[2]) as jobs:
        for command in sys.argv[3:]:
            job = await jobs.start(command, workdir="/", stdin=True, background=True, call_id=command)
            print(job.id, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def killed_owner(box: Box, *commands: str) -> list[str]:
    """Start commands from a program that is then killed; the ids it was given."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(SOURCE), str(box.folder), *commands],
        env=box.environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    ids = [owner.stdout.readline().strip() for _ in commands]
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert all(ids), "the owner could not start them"
    return ids


def test_a_job_survives_the_killing_of_its_program(box: Box) -> None:
    command = "for n in $(seq 1 200); do echo $n; sleep 0.005; done; exit 5"
    ids = killed_owner(box, command, "read line; echo got $line; exit 6")

    async def scenario(jobs: Jobs) -> None:
        counting, reading = [await jobs.get(name) for name in ids]
        assert [job.id for job in jobs.listing()] == ids[::-1]
        assert await jobs.find_call(command) is counting
        seen = b"".join([chunk.data async for chunk in jobs.follow(counting)])
        assert seen == "".join(f"{n}\n" for n in range(1, 201)).encode()
        assert counting.exit is not None
        assert counting.exit.exit_code == 5
        assert reading.running
        await jobs.write(reading, b"input\n")
        assert await jobs.wait(reading, 30)
        assert reading.exit is not None
        assert (reading.exit.exit_code, jobs.tail(reading, 100).data) == (6, b"got input\n")

    box.run(scenario)


def test_an_end_without_a_client_is_found(box: Box) -> None:
    (name,) = killed_owner(box, "sleep 0.2; echo over; exit 3")
    record = box.folder / name / "record.jsonl"

    async def nothing_listens() -> None:
        await until(lambda: b"exited" in record.read_bytes(), "the exit in the record")

    asyncio.run(nothing_listens())

    async def scenario(jobs: Jobs) -> None:
        job = await jobs.get(name)
        assert job.exit is not None
        assert (job.exit.exit_code, jobs.tail(job, 100).data) == (3, b"over\n")

    box.run(scenario)


def test_the_timeout_applies_without_a_client(box: Box) -> None:
    async def first(jobs: Jobs) -> str:
        return (await jobs.start("sleep 1000", workdir="/", timeout=1.0)).id

    name = box.run(first)
    asyncio.run(until(lambda: b"exited" in (box.folder / name / "record.jsonl").read_bytes(), "the exit"))

    async def second(jobs: Jobs) -> None:
        job = await jobs.get(name)
        assert job.exit is not None
        assert job.exit.timed_out

    box.run(second)


def test_jobs_continue_and_new_ones_start_when_the_keeper_is_killed(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("read line; exit 8", workdir="/", stdin=True)
        worker = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in box.keepers():
            if pid != worker:
                kill(pid)
        assert (await finish(jobs, "echo new"))[1] == b"new\n"
        await jobs.write(job, b"\n")
        assert await jobs.wait(job, 30)
        assert job.exit is not None
        assert job.exit.exit_code == 8

    box.run(scenario)


def test_a_job_whose_worker_is_killed_is_lost_with_its_log_and_can_still_be_ended(box: Box) -> None:
    async def scenario(jobs: Jobs) -> str:
        job = await jobs.start("echo before; setsid sleep 1000 & sleep 1001", workdir="/", background=True)
        await until(lambda: jobs.size(job), "the first word")
        worker = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)
        assert await jobs.wait(job, 30)
        assert job.lost
        assert jobs.tail(job, 100).data == b"before\n"
        assert job.pid in {process.pid for process in await jobs.processes(job)}
        ending = await jobs.end(job)
        assert job.pid in {process.pid for process in ending.ended}
        assert await jobs.processes(job) == ()
        return job.id

    name = box.run(scenario)

    async def later(jobs: Jobs) -> None:
        assert (await jobs.get(name)).lost

    box.run(later)


def test_after_a_reboot_a_job_is_lost_and_its_log_kept(box: Box) -> None:
    async def first(jobs: Jobs) -> str:
        job = await jobs.start("echo before; sleep 1000", workdir="/", background=True)
        await until(lambda: jobs.size(job), "the first word")
        worker = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (worker, *tree.descendants(worker)):
            kill(pid)
        return job.id

    name = box.run(first)
    record = box.folder / name / "record.jsonl"
    accepted = json.loads(record.read_bytes().splitlines()[0])
    record.write_text(json.dumps({**accepted, "boot": "another run of the machine"}) + "\n")

    async def second(jobs: Jobs) -> None:
        job = await jobs.get(name)
        assert job.lost
        assert not job.running
        assert jobs.tail(job, 100).data == b"before\n"
        assert [listed.id for listed in jobs.listing()] == [name]

    box.run(second)


def test_a_torn_line_in_the_record_is_passed_over(box: Box) -> None:
    async def first(jobs: Jobs) -> str:
        return (await finish(jobs, "exit 2"))[0].id

    name = box.run(first)
    record = box.folder / name / "record.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(lines[0] + b'{"event":"sta\n' + b"".join(lines[1:]) + b'{"ev')

    async def second(jobs: Jobs) -> None:
        job = await jobs.get(name)
        assert job.exit is not None
        assert job.exit.exit_code == 2

    box.run(second)


def test_an_unused_keeper_goes_away_and_workers_leave_nothing_behind(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        await finish(jobs, "true")

    box.run(scenario)
    asyncio.run(until(lambda: not box.keepers(), "the end of the keeper"))


# many, and for how long


def test_a_hundred_jobs_at_once(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        async def one(number: int) -> None:
            job, output = await finish(jobs, f"echo {number}; sleep 0.1; echo {number}; exit {number}")
            assert output == f"{number}\n{number}\n".encode()
            assert job.exit is not None
            assert job.exit.exit_code == number

        await asyncio.gather(*(one(number) for number in range(100)))
        assert len(jobs.listing()) == 100

    box.run(scenario)


def test_a_finished_job_leaves_the_list_before_the_disk(box: Box) -> None:
    async def scenario(jobs: Jobs) -> str:
        job, _ = await finish(jobs, "echo kept")
        running = await jobs.start("sleep 1000", workdir="/")
        await until(lambda: not jobs.listed(job), "its time in the list to pass")
        assert jobs.listing() == [running]
        found = await jobs.get(job.id)
        assert found.exit is not None
        assert jobs.tail(found, 100).data == b"kept\n"
        return job.id

    name = box.run(scenario, listed_seconds=0.2, end=True)

    async def later(jobs: Jobs) -> None:
        await until(lambda: not (box.folder / name).exists(), "its removal from the disk")
        with pytest.raises(NotFound, match=name):
            await jobs.get(name)

    box.run(later, listed_seconds=0.0, kept_seconds=0.0)


def test_an_invalid_id_is_not_found(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        for name in ("", "..", "../jobs", ".", "keeper.log", "a/b", "x" * 65, "\0"):
            with pytest.raises(NotFound):
                await jobs.get(name)
        with pytest.raises(InvalidArgs, match="job id"):
            await jobs.start("true", workdir="/", job_id="../x")

    box.run(scenario)


def test_only_the_owner_can_look_inside(box: Box) -> None:
    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("sleep 1000", workdir="/")
        assert stat.S_IMODE(jobs.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((jobs.folder / job.id).stat().st_mode) == 0o700
        for file in [jobs.folder / "keeper-2.sock", *(jobs.folder / job.id).iterdir()]:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file

    box.run(scenario, end=True)


def test_a_deep_folder_works(box: Box) -> None:
    box.folder = box.path / ("deep" * 20) / ("deeper" * 20) / "jobs"

    async def scenario(jobs: Jobs) -> None:
        job = await jobs.start("read line; echo $line", workdir="/", stdin=True)
        async with Jobs(box.folder, environment=box.environment, linger=0.2) as other:
            await other.write(await other.get(job.id), b"deep\n")
        assert await jobs.wait(job, 30)
        assert jobs.tail(job, 100).data == b"deep\n"

    box.run(scenario)


def test_the_keeper_needs_nothing_but_the_standard_library() -> None:
    code = """
        import sys
        sys.path.append(sys.argv[1])
        import farhand.machine.jobs.keeper
        ours = sorted(name for name in sys.modules if name.partition(".")[0] == "farhand")
        modules = ["ipc_server", "keeper", "output", "pipes", "process_tree", "spawn", "terminal", "worker"]
        package = "farhand.machine.jobs"
        assert ours == ["farhand", "farhand.machine", package, *(f"{package}.{name}" for name in modules)], ours
        heavy = {"asyncio", "pathlib", "dataclasses", "logging", "subprocess"} & set(sys.modules)
        assert not heavy, heavy
        known = {*sys.stdlib_module_names, "farhand", "__main__"}
        strangers = {name.partition(".")[0] for name in sys.modules} - known
        assert not strangers, strangers
    """
    subprocess.run([sys.executable, "-I", "-S", "-c", textwrap.dedent(code), str(SOURCE)], check=True)


def test_it_works_on_uvloop_too(box: Box) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with Jobs(box.folder, environment=box.environment, linger=0.2) as jobs:
            job = await jobs.start("read line; echo $line; exit 3", workdir="/", stdin=True)
            await jobs.write(job, b"word\n")
            seen = b"".join([chunk.data async for chunk in jobs.follow(job)])
            assert job.exit is not None
            assert (seen, job.exit.exit_code) == (b"word\n", 3)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
