"""Ending a process tree ends all of it, however a descendant has detached itself."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farhand.machine.jobs import process_tree as tree
from farhand.machine.jobs.jobs import Jobs

DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for number in range(3): os.close(number)
os.open("/dev/null", os.O_RDWR); os.dup(0); os.dup(0)
os.execvp("sleep", ["sleep", sys.argv[1]])
"""

RUNNER = """
import os, sys, time
stop = time.monotonic() + 60
while time.monotonic() < stop:
    if os.fork():
        os._exit(0)
    time.sleep(0.0005)
"""

KINDS = {
    "child": "sleep {mark} & wait",
    "orphan": "(sleep {mark} &); sleep 500",
    "setsid": "setsid sleep {mark} & wait",
    "setsid and reparented": "(setsid sleep {mark} &); sleep 500",
    "nohup": "nohup sleep {mark} >/dev/null 2>&1 & wait",
    "ignores SIGTERM": "(trap '' TERM; sleep {mark}; sleep {mark}) & wait",
    "own process group": "set -m; sleep {mark} & wait",
    "double-forked daemon": "{python} {daemon} {mark}; sleep 500",
    "daemon without the cookie": "env -i {python} {daemon} {mark}; sleep 500",
    "stopped": "sleep {mark} & sleep 0.5; kill -STOP $!; wait",
    "left over by a leader that is gone": "setsid sleep {mark} & (sleep {mark} &)",
}


def marked(mark: str, program: str = "") -> list[int]:
    """The processes with that word among their arguments, as the system shows them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words and words[0].endswith(program.encode()):
            found.append(int(pid))
    return found


async def until_there(mark: str, program: str, count: int = 1) -> None:
    give_up = time.monotonic() + 30
    while len(marked(mark, program)) < count:
        assert time.monotonic() < give_up, "it never started"
        await asyncio.sleep(0.01)


class Grove:
    """A folder of jobs whose commands plant marked descendants; at its end none of them lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = f"1{os.getpid()}{time.monotonic_ns() % 10**9:09d}"
        self.environment = {"HOME": str(path), "PATH": os.environ["PATH"], "SHELL": "/bin/bash"}
        (path / "daemon.py").write_text(DAEMON)
        (path / "runner.py").write_text(RUNNER)

    def jobs(self) -> Jobs:
        return Jobs(self.path / "jobs", environment=self.environment, linger=0)

    def command(self, kind: str) -> str:
        return KINDS[kind].format(mark=self.mark, python=sys.executable, daemon=self.path / "daemon.py")


@pytest.fixture
def grove(tmp_path: Path):
    grove = Grove(tmp_path)
    yield grove

    async def clear() -> None:
        async with grove.jobs() as jobs:
            for job in jobs.listing():
                await jobs.end(job, grace=0)

    asyncio.run(clear())
    for pid in marked(grove.mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("grace", [0.25, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_descendant_survives_the_end_of_its_job(grove: Grove, kind: str, grace: float) -> None:
    async def main() -> None:
        async with grove.jobs() as jobs:
            job = await jobs.start(grove.command(kind), workdir=grove.path)
            await until_there(grove.mark, "sleep")
            ending = await jobs.end(job, grace)
            assert "sleep" in [process.name for process in ending.ended]
            assert ending.survivors == ()
            assert marked(grove.mark) == []
            assert await jobs.processes(job) == ()

    asyncio.run(main())


def test_no_descendant_of_any_kind_survives_a_timeout(grove: Grove) -> None:
    everything = "\n".join(f"bash -c {shlex.quote(grove.command(kind))} &" for kind in KINDS)

    async def main() -> None:
        async with grove.jobs() as jobs:
            job = await jobs.start(f"{everything}\nwait; sleep 500", workdir=grove.path, timeout=8.0)
            await until_there(grove.mark, "sleep", len(KINDS) + 1)
            assert await jobs.wait(job, 60)
            assert job.exit is not None
            assert job.exit.timed_out
            assert len([process for process in job.exit.ended if process.name == "sleep"]) > len(KINDS)
            assert job.exit.left == ()
            assert marked(grove.mark) == []

    asyncio.run(main())


def test_a_process_that_runs_from_pid_to_pid_is_caught(grove: Grove) -> None:
    async def main() -> None:
        async with grove.jobs() as jobs:
            job = await jobs.start(f"{sys.executable} runner.py {grove.mark}; sleep 500", workdir=grove.path)
            await until_there(grove.mark, "python")
            ending = await jobs.end(job, grace=0)
            assert ending.survivors == ()
            assert marked(grove.mark) == []

    asyncio.run(main())


def test_a_tree_is_seen_whole_and_zombies_are_not_alive() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1001 & true & wait"], start_new_session=True)
    try:
        give_up = time.monotonic() + 30
        while [process.name for process in tree.living(tree.descendants(shell.pid))] != ["sleep", "sleep"]:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert tree.signal_tree(shell.pid, signal.SIGKILL)
        shell.wait(30)
        assert tree.descendants(shell.pid) == []
        assert tree.living([shell.pid]) == []
    finally:
        tree.signal_tree(shell.pid, signal.SIGKILL)
        shell.kill()
        shell.wait()


def test_a_process_is_named_for_ever_by_pid_and_start() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert tree.start_ticks(child.pid) >= tree.start_ticks(os.getpid()) > 0
    finally:
        child.kill()
        child.wait()
    assert tree.start_ticks(child.pid) == 0


def test_a_stranger_is_not_signalled() -> None:
    ours = subprocess.Popen(["sleep", "1000"])
    stranger = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
    try:
        tree._signal_member(ours.pid, {stranger.pid}, signal.SIGKILL)
        time.sleep(0.1)
        assert ours.poll() is None
    finally:
        tree.signal_tree(stranger.pid, signal.SIGKILL)
        for process in (ours, stranger):
            process.kill()
            process.wait()


def test_marked_processes_are_ended_with_all_their_descendants() -> None:
    cookie = f"FARHAND_JOB=test-{os.getpid()}"
    name, _, value = cookie.partition("=")
    orphan = subprocess.Popen(
        ["sh", "-c", "env -i setsid sleep 1000 & sleep 1001"], env={**os.environ, name: value}, start_new_session=True
    )
    try:
        give_up = time.monotonic() + 30
        while [process.name for process in tree.living(tree.descendants(orphan.pid))] != ["sleep", "sleep"]:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        below = tree.descendants(orphan.pid)
        ended, survivors = tree.end_marked(cookie)
        assert survivors == []
        assert {process.pid for process in ended} == {orphan.pid, *below}
    finally:
        tree.signal_tree(orphan.pid, signal.SIGKILL)
        orphan.kill()
        orphan.wait()


def test_children_are_found_without_the_kernels_list_of_them() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert child.pid in tree._children_from_scan()(os.getpid())
        assert child.pid in tree._children_from_proc(os.getpid())
    finally:
        child.kill()
        child.wait()
