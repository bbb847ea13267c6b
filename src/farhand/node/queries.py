"""Queries of a gateway beside tool calls: input and output of a command, jobs, programs on the PATH, the log, the load.

Every query checks the limits of the machine's owner first, and none starts a process.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs
from farhand.machine.load import MachineLoad
from farhand.node.limits import ToolLimits
from farhand.node.log import MOST_LINES, last_lines
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.protocol.freeze import FreezeState

if TYPE_CHECKING:  # the gateway answers some of these for its own machine and needs no client for it
    from farhand.sdk.client import Query

T = TypeVar("T")

MOST_BYTES = 256 * 1024
MOST_SECONDS = 30.0
MOST_START_SECONDS = 5.0
MOST_BINS = 500
_BIN_NAME = re.compile(r"[A-Za-z0-9._+-]{1,128}")


class OutputQuery(msgspec.Struct):
    """Output from `offset` on of a call's command or of a job; waits if there is none yet."""

    call_id: str | None = None
    job_id: str | None = None
    # A negative offset counts from the end.
    offset: int = 0
    wait_ms: int = 0
    # `errors` for the standard error of an attached command.
    stream: Literal["output", "errors"] = "output"


class InputQuery(msgspec.Struct):
    """Input for a call's command or for a job, in base64; a new size of its terminal; the end of its input."""

    call_id: str | None = None
    job_id: str | None = None
    data: str = ""
    size: tuple[int, int] | None = None
    close: bool = False


class ProbeQuery(msgspec.Struct):
    bins: list[str]


class LogsQuery(msgspec.Struct):
    lines: int = 100


class NodeQueries:
    """Answers queries for one node, within the limits of its owner."""

    def __init__(
        self,
        jobs: Jobs,
        environment: Mapping[str, str],
        logs: Path,
        limits: ToolLimits | None = None,
        freeze_state: FreezeState | None = None,
        load: MachineLoad | None = None,
    ) -> None:
        self._jobs = jobs
        self._load = load
        self._path = environment.get("PATH", os.defpath)
        self._logs = logs
        self._limits = limits or ToolLimits()
        self._freeze_state = freeze_state or FreezeState()

    def handlers(self) -> dict[str, Query]:
        found: dict[str, Query] = {
            "output": self.output,
            "input": self.input,
            "jobs": self.jobs,
            "probe": self.probe,
            "logs": self.logs,
        }
        return found if self._load is None else {**found, "metrics": self.metrics}

    async def metrics(self, _params: msgspec.Raw) -> dict[str, float]:
        """Return how busy this machine is. No limit of its owner hides it."""
        assert self._load is not None
        return await asyncio.to_thread(self._load.sample)

    async def output(self, params: msgspec.Raw) -> dict[str, Any]:
        self._limits.require("Process", "the output of a command")
        question = decode_query(params, OutputQuery)
        seconds = min(max(question.wait_ms / 1000, 0.0), MOST_SECONDS)
        job = await self._find(question.call_id, question.job_id, seconds)
        deadline = time.monotonic() + seconds
        stream, offset = question.stream, question.offset
        if offset < 0:
            offset = max(0, self._jobs.size(job, stream) + offset)
        self._jobs.received(job, offset, stream)
        chunk = self._jobs.read(job, offset, MOST_BYTES, stream)
        while not chunk.data and job.running and (left := deadline - time.monotonic()) > 0:
            following = self._jobs.follow(job, offset, MOST_BYTES, stream)
            try:
                async with asyncio.timeout(left):
                    chunk = await anext(following)
            except (TimeoutError, StopAsyncIteration):
                chunk = self._jobs.read(job, offset, MOST_BYTES, stream)
            finally:
                await following.aclose()  # type: ignore[attr-defined]
        over = not job.running and chunk.next_offset >= self._jobs.size(job, stream)
        answer: dict[str, Any] = {
            "offset": chunk.offset,
            "next_offset": chunk.next_offset,
            "skipped": chunk.skipped,
            "data": base64.b64encode(chunk.data).decode(),
            "over": over,
        }
        if job.terminal is not None:
            answer["size"] = job.terminal
        if over and job.exit is not None:
            answer |= {"exit_code": job.exit.exit_code, "signal": job.exit.signal}
        return answer

    async def input(self, params: msgspec.Raw) -> dict[str, Any]:
        """Pass input on; answer when the command has read most of it.

        Raises NotAllowed on a frozen node and where Bash is denied: input for a shell is a command.
        """
        if self._freeze_state.order is not None:
            raise self._freeze_state.order.node_refusal()
        self._limits.require("Bash", "input for a command")
        question = decode_query(params, InputQuery)
        job = await self._find(question.call_id, question.job_id, MOST_START_SECONDS)
        if question.size is not None:
            await self._jobs.resize(job, *question.size)
        try:
            data = base64.b64decode(question.data, validate=True)
        except ValueError:
            raise InvalidArgs("data must be base64") from None
        if data:
            await self._jobs.write(job, data, patient=True)
        if question.close:
            await self._jobs.close_stdin(job)
        return {"written": len(data)}

    async def jobs(self, _params: msgspec.Raw) -> list[dict[str, Any]]:
        self._limits.require("Process", "a list of commands")
        return [
            {
                "job_id": job.id,
                "call_id": job.call_id,
                "command": job.command,
                "workdir": job.workdir,
                "pid": job.pid,
                "running": job.running,
                "background": job.background,
                "started_at": job.started_at,
                "ended_at": job.ended_at,
                "exit_code": job.exit.exit_code if job.exit else None,
                "signal": job.exit.signal if job.exit else None,
                "lost": job.lost,
                "output_bytes": self._jobs.size(job),
                "size": job.terminal,
            }
            for job in self._jobs.listing()
        ]

    async def probe(self, params: msgspec.Raw) -> dict[str, Any]:
        """Report which programs are on the PATH with which this node was started.

        Starts nothing. Raises NotAllowed on a frozen node and where Bash, which could run them, is denied.
        """
        if self._freeze_state.order is not None:
            raise self._freeze_state.order.node_refusal()
        self._limits.require("Bash", "a probe for programs")
        question = decode_query(params, ProbeQuery)
        if len(question.bins) > MOST_BINS or not all(_BIN_NAME.fullmatch(name) for name in question.bins):
            raise InvalidArgs(f"bins must be at most {MOST_BINS} names of letters, digits and . _ + -")
        found = await asyncio.to_thread(_on_path, question.bins, self._path)
        return {"hostBinStatus": found, "hostBinStatusUpdatedAt": time.time_ns() // 1_000_000}

    async def logs(self, params: msgspec.Raw) -> dict[str, Any]:
        """Return the newest lines of this node's log, oldest first."""
        self._limits.require("Read", "the log")
        question = decode_query(params, LogsQuery)
        lines, truncated = await asyncio.to_thread(last_lines, self._logs, min(max(question.lines, 1), MOST_LINES))
        return {"lines": lines, "truncated": truncated}

    async def _find(self, call_id: str | None, job_id: str | None, seconds: float) -> Job:
        """Return the requested job; that of a call may be about to start."""
        if job_id is not None:
            return await self._jobs.get(job_id)
        if call_id is None:
            raise InvalidArgs("call_id or job_id is needed")
        deadline = time.monotonic() + seconds
        while (job := await self._jobs.find_call(call_id)) is None:
            if time.monotonic() >= deadline:
                raise NotFound(f"call {call_id} runs no command here")
            await asyncio.sleep(0.02)
        return job


def _on_path(names: list[str], path: str) -> dict[str, bool]:
    # Relative folders of the PATH depend on the working directory, so they are not searched.
    folders = os.pathsep.join(folder for folder in path.split(os.pathsep) if Path(folder).is_absolute())
    return {name: bool(folders) and shutil.which(name, path=folders) is not None for name in names}


def decode_query(params: msgspec.Raw, kind: type[T]) -> T:
    """Return the parameters of a query. Raises InvalidArgs."""
    try:
        return msgspec.json.decode(params, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgs(str(error)) from None
