"""A command as described by its record."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from farhand.machine.jobs.process_tree import COOKIE, Process


class Exit(msgspec.Struct, frozen=True, rename="camel"):
    """How a command ended, as its record says. `size` is the length of its output then; `left` continued to run."""

    exit_code: int | None
    signal: str | None
    timed_out: bool
    ended_at: int
    duration_ms: int
    size: int
    ended: tuple[Process, ...]
    left: tuple[Process, ...]


class Ending(msgspec.Struct, frozen=True):
    """The result of ending a process tree: the processes that were ended, and those that could not be."""

    ended: tuple[Process, ...]
    survivors: tuple[Process, ...]

    def describe(self, what: str) -> str:
        """Return `what` with the result: `cancelled: ended 2 processes (bash 41, sleep 42)`."""
        if self.ended:
            names = ", ".join(f"{process.name} {process.pid}" for process in self.ended)
            text = f"{what}: ended {len(self.ended)} process{'es' * (len(self.ended) > 1)} ({names})"
        else:
            text = f"{what}: nothing was left running"
        if self.survivors:
            survivors = ", ".join(f"{process.name} {process.pid}" for process in self.survivors)
            text += f"; still running, not ours to end: {survivors}"
        return text


class Job(msgspec.Struct, eq=False):
    """One command. `Jobs` keeps it up to date; times are milliseconds since the epoch."""

    id: str
    call_id: str | None
    command: str
    workdir: str
    stdin: bool
    background: bool
    boot: str
    started_at: int
    # Standard error is separate, and the command waits for the reader of its output.
    attached: bool = False
    # Columns and rows of its terminal, if it has one.
    terminal: tuple[int, int] | None = None
    pid: int = 0
    exit: Exit | None = None
    lost_at: int | None = None
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @classmethod
    def accepted(cls, fact: dict[str, Any]) -> Self:
        """Return the job of a start request."""
        return cls(
            id=fact["id"],
            call_id=fact["callId"],
            command=fact["command"],
            workdir=fact["workdir"],
            stdin=fact["stdin"],
            background=fact["background"],
            boot=fact["boot"],
            started_at=fact["askedAt"],
            attached=bool(fact.get("attached")),
            terminal=_size(fact),
        )

    @property
    def running(self) -> bool:
        return self.exit is None and self.lost_at is None

    @property
    def lost(self) -> bool:
        """True if its worker or the machine went down: the outcome is unknown; the output until then is kept."""
        return self.exit is None and self.lost_at is not None

    @property
    def ended_at(self) -> int | None:
        return self.exit.ended_at if self.exit else self.lost_at

    @property
    def cookie(self) -> str:
        """The environment variable of every process the command started."""
        return f"{COOKIE}={self.id}"

    def learn(self, fact: dict[str, Any]) -> None:
        """Apply one entry of the record."""
        match fact.get("event"):
            case "started":
                self.pid, self.started_at = fact["pid"], fact["startedAt"]
                self.terminal = _size(fact)
            case "resized":
                self.terminal = _size(fact)
            case "marked":
                self.background = True
            case "exited":
                self.pid, self.started_at = fact["pid"], fact["startedAt"]
                self.exit = msgspec.convert(fact, Exit)
            case "lost":
                self.lost_at = fact["lostAt"]
        if not self.running:
            self.over.set()


def _size(fact: dict[str, Any]) -> tuple[int, int] | None:
    size = fact.get("terminal")
    return None if size is None else (size[0], size[1])


def read_record(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a job's record, skipping a line that a crash left incomplete."""
    try:
        text = (folder / "record.jsonl").read_bytes()
    except OSError:
        return
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            fact = json.loads(line)
            if isinstance(fact, dict):
                yield fact


def processes(pairs: Iterable[Sequence[Any]]) -> tuple[Process, ...]:
    """Return processes from the pairs of pid and name that a worker sends."""
    return tuple(Process(pid, name) for pid, name in pairs)
