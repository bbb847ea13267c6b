"""Find and end whole process trees, including setsid, double-forked and reparented descendants.

A process that calls `adopt_orphans` becomes the parent of every descendant whose own parent dies (Linux: child
subreaper), so nothing it started can leave its tree. Where the kernel has no such feature (macOS), a detached
descendant is found only while its parent lives.

Standard library only: the keeper imports this file.
"""

# ruff: noqa: PTH110, PTH119, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

COOKIE = "FARHAND_JOB"  # environment variable of every process a command starts
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A process id and name."""

    pid: int
    name: str


def adopt_orphans() -> bool:
    """Make this process the parent of its orphaned descendants; return False where that is not supported."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def descendants(root: int) -> list[int]:
    """Return every process below `root`, parents before children, including zombies."""
    below = _children_from_proc if os.path.exists(f"/proc/{root}/task/{root}/children") else _children_from_scan()
    found: list[int] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for pid in below(waiting.pop()):
            if pid not in seen:
                seen.add(pid)
                found.append(pid)
                waiting.append(pid)
    return found


def living(pids: Iterable[int]) -> list[Process]:
    """Return those of `pids` that still run, with their names; zombies do not count."""
    return [Process(pid, stat.name) for pid in pids if (stat := _stat(pid)) is not None and stat.state not in "ZX"]


def start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot, which with the pid identifies it; 0 if unknown."""
    stat = _stat(pid)
    return stat.started if stat else 0


def signal_tree(root: int, number: int) -> list[Process]:
    """Send signal `number` once to every living process below `root`; return those found.

    A process that forks concurrently can be missed: repeat until nothing is left.
    """
    pids = descendants(root)
    found = living(pids)
    parents = {root, *pids}
    for process in found:
        _signal_member(process.pid, parents, number)
    return found


def marked_with(*cookies: str) -> list[int]:
    """Return the processes whose environment contains one of `cookies`, as far as this user may see it."""
    wanted = {cookie.encode("utf-8", "surrogateescape") for cookie in cookies}
    found = []
    for pid in _all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if not wanted.isdisjoint(environ.read().split(b"\0")):
                    found.append(pid)
        except OSError:
            continue
    return found


def end_marked(*cookies: str, seconds: float = 5.0) -> tuple[list[Process], list[Process]]:
    """SIGKILL every process with one of `cookies` in its environment, and all below, until none is left. Blocks.

    For trees whose owners died. Returns (ended, survivors).
    """
    ended: dict[int, Process] = {}
    give_up = time.monotonic() + seconds
    while True:
        roots = [pid for pid in marked_with(*cookies) if pid != os.getpid()]
        found = living([*roots, *(pid for root in roots for pid in descendants(root))])
        if not found or time.monotonic() > give_up:
            remaining = {process.pid for process in found}
            return [p for p in ended.values() if p.pid not in remaining], found
        for process in found:
            ended[process.pid] = process
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.005)


class _Stat(NamedTuple):
    name: str
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else _stat_from_ps(pid)
    except OSError:
        return None
    # The name is in parentheses and may itself contain blanks and parentheses.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def _signal_member(pid: int, parents: set[int], number: int) -> None:
    """Signal `pid` only while it is a child of one of `parents`: the pid may have been reused."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # pidfd is not supported
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        return
    try:
        stat = _stat(pid)
        if stat is not None and stat.parent in parents:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def _children_from_proc(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    except OSError:
        pass  # ended concurrently
    return found


def _children_from_scan() -> Callable[[int], list[int]]:
    """Return children from one scan of the process table, for kernels without `/proc/*/task/*/children`."""
    below: dict[int, list[int]] = {}
    for pid, parent in _all_parents():
        below.setdefault(parent, []).append(pid)
    return lambda pid: below.get(pid, [])


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _all_parents() -> list[tuple[int, int]]:
    if pids := _all_pids():
        return [(pid, stat.parent) for pid in pids if (stat := _stat(pid)) is not None]
    rows = (row.split() for row in _ps("-A", "-o", "pid=,ppid="))
    return [(int(pid), int(parent)) for pid, parent in rows]


def _stat_from_ps(pid: int) -> _Stat | None:
    for row in _ps("-o", "ppid=,state=,comm=", "-p", str(pid)):
        parent, state, name = row.split(None, 2)
        return _Stat(os.path.basename(name), state[0], int(parent), 0)
    return None


def _ps(*options: str) -> list[str]:
    import subprocess  # noqa: PLC0415  (only without /proc: the keeper stays small)

    answer = subprocess.run(["/bin/ps", *options], capture_output=True, text=True, check=False)
    return [row for row in answer.stdout.splitlines() if row.strip()]
