"""Starting a server, waiting until it serves, reading its cost, and ending it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
START_SECONDS = 30.0
STOP_SECONDS = 10.0


class BenchmarkError(Exception):
    """Something could not be started or answered wrongly; the figures would mean nothing."""


@contextmanager
def running(
    command: Sequence[str], log: Path, ready: str | None, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written the line `ready` to its output; it is ended when the block is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        if ready is not None:
            wait_for_line(process, log, ready)
        yield process
    finally:
        stop(process)


def wait_for_line(process: subprocess.Popen[bytes], log: Path, ready: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while ready not in (text := log.read_text(errors="replace")):
        if process.poll() is not None:
            raise BenchmarkError(f"{process.args} ended with {process.returncode}:\n{text[-3000:]}")
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{process.args} was not ready in {START_SECONDS} s:\n{text[-3000:]}")
        time.sleep(0.02)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stop_on_signals() -> None:
    """A terminated benchmark leaves its blocks, and so ends what it started."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def cpu_seconds(process_id: int) -> float:
    """User and system time of a running process with all its threads, to the nanosecond.

    Linux names the CPU clock of any process by this number (CPUCLOCK_SCHED), far finer than
    the 10 ms ticks of /proc/PID/stat.
    """
    return time.clock_gettime((~process_id << 3) | 2)


def memory_megabytes(process_id: int) -> dict[str, float]:
    """Resident (`rss`) and proportional (`pss`) memory; MB are 1024 * 1024 bytes."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return {"rss": int(fields["Rss"]) / 1024, "pss": int(fields["Pss"]) / 1024}


def plain_environment() -> dict[str, str]:
    """This environment without settings that would change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("FARHAND_", "SA_"))}
