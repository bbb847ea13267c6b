"""`Bash` and `Process`: the shell of a node, a thin layer over `machine.jobs`.

Names, defaults, limits and output objects are those of GSV's node tools, so that prompts for these work unchanged.
What they leave open: a signal is named (`SIGKILL`), `timeout` 0 means none, a job whose keeper or machine went down has
the status `lost`.
"""

# ruff: noqa: N802, N803  (tool and parameter names are those of GSV's node tools)

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from farhand.machine.files.allowed_paths import AllowedPaths
from farhand.machine.jobs.foreground import Foreground
from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs, login_shell
from farhand.machine.jobs.output import ERRORS
from farhand.machine.jobs.output_text import CHARACTER_BYTES, last_text
from farhand.machine.jobs.process_tree import Process as SystemProcess
from farhand.machine.sandbox.confinement import Confinement, unconfined
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.calls import PROGRAM_STOPPING
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError
from farhand.protocol.secret_handles import names_in, shell_command
from farhand.tools.shell_options import TERMINAL_ENVIRONMENT, check_argv, signal_number, terminal_size

if TYPE_CHECKING:
    from farhand.tools.preview import Preview

OUTPUT_CHARS = 200_000
TAIL_CHARS = 4_000
DEFAULT_TIMEOUT_MS = 300_000
YIELD_LEAST_MS = 10
YIELD_MOST_MS = 120_000
LOG_LINES = 200
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL

# Values of the secret handles in the arguments of the current call.
call_secrets: ContextVar[Mapping[str, str]] = ContextVar("call_secrets", default=MappingProxyType({}))
# Who is behind the current call, if it is a trial; empty for the owner.
trial_caller: ContextVar[str] = ContextVar("trial_caller", default="")

_NOTHING = ["/bin/false"]
_ACTIONS = ("list", "poll", "log", "write", "submit", "kill")


class _Start(msgspec.Struct, frozen=True):
    """The parsed arguments of `Bash`."""

    command: str
    folder: str
    timeout_ms: float
    background: bool
    # How long to wait before the command continues in the background.
    patience_ms: float | None
    argv: tuple[str, ...] | None = None
    attached: bool = False
    # Columns and rows.
    terminal: tuple[int, int] | None = None

    @property
    def stdin(self) -> bool:
        return self.background or self.attached or self.patience_ms is not None

    @property
    def summary(self) -> str:
        limit = f"time limit {self.timeout_ms / 1000:g} s" if self.timeout_ms else "no time limit"
        if self.terminal is not None:
            return f"in a terminal that takes any further input, {limit}"
        if self.background:
            return f"in the background, {limit}"
        return limit if self.patience_ms is None else f"in the background after {self.patience_ms:g} ms, {limit}"


class NodeShellTools:
    """The two tools over one `Jobs` and one workspace folder."""

    def __init__(
        self,
        jobs: Jobs,
        workspace: str | os.PathLike[str],
        *,
        call_id: Callable[[], str | None] = lambda: None,
        confinement: Callable[[], Confinement] = unconfined,
        trials: Trials | None = None,
    ) -> None:
        """`call_id` returns the id of the current call: a repeated call finds its command, running or ended.

        `confinement` is called before each command; without a sandbox the user's login shell runs it.
        """
        self._trials = trials
        self._jobs = jobs
        self._workspace = Path(workspace).absolute()
        # Resolves paths as the file tools do: the preview and the policy see the folder in which the command runs.
        self._paths = AllowedPaths(self._workspace)
        self._call_id = call_id
        self._confinement = confinement
        self._foreground = Foreground(jobs)

    async def Bash(
        self,
        *,
        command: Annotated[str, Meta(description="Shell command to execute. Must not be empty.")],
        workdir: Annotated[
            str | None,
            Meta(description="Working directory. Relative paths resolve against the node workspace, the default."),
        ] = None,
        timeout: Annotated[
            float,
            Meta(description="Timeout in milliseconds; then SIGTERM and, 250 ms later, SIGKILL. 0: no timeout."),
        ] = DEFAULT_TIMEOUT_MS,
        background: Annotated[bool, Meta(description="Run in background immediately and return a sessionId.")] = False,
        yieldMs: Annotated[
            float | None,
            Meta(
                description="Wait this many milliseconds, then background the process if still running. "
                "Clamped to 10-120000."
            ),
        ] = None,
        trial: Annotated[
            bool,
            Meta(
                description="Run in a copy-on-write view without network: the answer lists what would change, and "
                "nothing has changed until the trial is kept."
            ),
        ] = False,
        argv: Annotated[list[str] | None, Meta(description="The words to run; command is their quoted form.")] = None,
        attached: Annotated[
            bool, Meta(description="The caller sends input and reads both outputs; the command waits for it.")
        ] = False,
        terminal: Annotated[str | None, Meta(description="Run in a terminal of this size, such as 80x24.")] = None,
    ) -> dict[str, Any]:
        """Execute a shell command on this node with the user's login shell.

        By default waits for the command and returns its output (stdout and stderr together; the last 200,000
        characters). A non-zero exit is a normal result with status "failed". Use background, or yieldMs, for servers
        and long builds: the answer carries a sessionId for the Process tool, and the command outlives this node's
        connection and program. Without them standard input is at its end.
        """
        start = self._started(command, workdir, timeout, background, yieldMs, trial, argv, attached, terminal)
        call = self._call_id()
        name = call or str(uuid.uuid4())
        line, hidden = shell_command(start.command, call_secrets.get())
        if start.argv and names_in(list(start.argv)):
            raise InvalidArgs("a secret cannot be an argument of a program, which others can list: use a shell command")
        environment: dict[str, str] = {}
        try:
            if start.terminal is not None:
                environment = self._terminal_environment()
            shell: list[str] | None
            if trial:
                shell = await self._tried(name, start, inherit=bool(hidden))
            else:
                shell = await self._sandboxed(start.folder, environment, inherit=bool(hidden))
        except ToolError:
            if call is None or await self._jobs.find_call(call) is None:
                raise
            shell = _NOTHING  # the command of this call was started before, and is found below
        job = await self._foreground.run(
            self._jobs.start(
                line,
                workdir=start.folder,
                timeout=start.timeout_ms / 1000,
                stdin=start.stdin,
                background=start.background,
                env=environment | hidden,
                shell=shell,
                bare=shell is not None,
                arguments=start.argv,
                attached=start.attached,
                terminal=start.terminal,
                call_id=call,
            ),
            patience=None if start.patience_ms is None else start.patience_ms / 1000,
            leaving=PROGRAM_STOPPING,
        )
        if job.background:
            return self._backgrounded(job)
        done = self._completed(job)
        if trial:
            assert self._trials is not None
            finish = partial(self._trials.finish, secrets=tuple(call_secrets.get().values()))
            ended = (await asyncio.to_thread(finish, name, done)).described()
            done |= {"trialId": name, "changes": ended["changes"]}
        return done

    async def Process(
        self,
        *,
        action: Annotated[
            str, Meta(description="One of: list, poll, log, write, submit, kill.", extra_json_schema={"enum": _ACTIONS})
        ],
        sessionId: Annotated[str | None, Meta(description="Session ID. Required for all actions except list.")] = None,
        data: Annotated[str, Meta(description="Data to send for write and submit.")] = "",
        offset: Annotated[int, Meta(description="Log line offset for log.")] = 0,
        limit: Annotated[int, Meta(description="Maximum log lines for log. Minimum 1.")] = LOG_LINES,
        signal: Annotated[str | None, Meta(description="For kill: TERM, INT, …, to any command.")] = None,
    ) -> dict[str, Any]:
        """Manage background Bash sessions of this node.

        list: all sessions, newest first, finished ones for 30 minutes. poll: status, exit code, signal and the last
        4,000 characters. log: output lines by offset and limit. write: raw data to stdin. submit: data and a newline.
        kill: SIGKILL to the session's whole process tree.
        """
        action, job = await self._tended(action, sessionId, signal)
        if job is None:
            return self._list()
        match action:
            case "poll":
                return self._poll(job)
            case "log":
                return self._log(job, _not_negative("offset", offset), max(1, _not_negative("limit", limit)))
            case "write" | "submit":
                return await self._write(job, self._input(action, data))
            case _:
                return await self._kill(job) if signal is None else await self._signal(job, signal)

    # previews: the same arguments, parsed by the same code

    def preview_Bash(self, *, trial: bool, **arguments: Any) -> Preview:
        from farhand.tools.preview import command_preview  # noqa: PLC0415 - memory of an idle node

        start = self._started(trial=trial, **arguments)
        where = "as a trial, " if trial else "" if self._confinement()[0] is None else "in the sandbox, "
        return command_preview(start.command, start.folder, summary=where + start.summary)

    async def preview_Process(
        self, *, action: str, sessionId: str | None, data: str, signal: str | None = None, **_page: int
    ) -> Preview:
        from farhand.tools.preview import Preview  # noqa: PLC0415

        action, job = await self._tended(action, sessionId, signal)
        if job is None:
            return Preview(summary="lists the background sessions")
        if action in ("write", "submit"):
            stdin = self._input(action, data)
            return Preview(stdin=stdin, summary=f"writes to the standard input of session {job.id}: {job.command}")
        if action == "kill" and signal is not None:
            return Preview(summary=f"sends {signal_number(signal).name} to session {job.id}: {job.command}")
        if action == "kill":
            return Preview(summary=f"kills session {job.id} and its whole process tree: {job.command}")
        return Preview(summary=f"reads the output of session {job.id}: {job.command}")

    # Bash

    def _terminal_environment(self) -> dict[str, str]:
        """Return the variables of a terminal, with the shell that `exec "$SHELL"` starts."""
        confined = self._confinement()[0] is not None
        shell = "/bin/sh" if confined else login_shell(self._jobs.environment)[0]
        return {**TERMINAL_ENVIRONMENT, "SHELL": shell}

    async def _sandboxed(self, folder: str, environment: Mapping[str, str], *, inherit: bool) -> list[str] | None:
        """Return the command prefix of the sandbox for `folder`; None for the login shell.

        `inherit`: the command gets the variables of the program that creates the sandbox.

        Raises Failed if the sandbox cannot be created here, NotAllowed for a folder outside of it.
        """
        sandbox, _ = self._confinement()
        if sandbox is None:
            return None
        await asyncio.to_thread(sandbox.check)
        return sandbox.words(folder, environment, inherit=inherit)

    async def _tried(self, name: str, start: _Start, *, inherit: bool) -> list[str]:
        """Return the command prefix of a trial. Raises Failed if this machine cannot run trials."""
        if self._trials is None:
            raise Failed("this machine cannot run trials; the command did not run")
        begin = partial(self._trials.begin, inherit=inherit, caller=trial_caller.get())
        return await asyncio.to_thread(begin, name, start.command, start.folder)

    def _started(
        self,
        command: str,
        workdir: str | None,
        timeout: float,
        background: bool,
        yieldMs: float | None,
        trial: bool = False,
        argv: list[str] | None = None,
        attached: bool = False,
        terminal: str | None = None,
    ) -> _Start:
        if not command.strip():
            raise InvalidArgs("command must not be empty")
        folder = self._resolve(workdir)
        if timeout < 0:
            raise InvalidArgs(f"timeout must not be negative, but is {timeout!r}")
        if trial and (background or yieldMs is not None):
            raise InvalidArgs("a trial is not run in the background: leave out background and yieldMs")
        patience = None
        if yieldMs is not None:
            patience = min(max(yieldMs, YIELD_LEAST_MS), YIELD_MOST_MS)
        check_argv(command, argv)
        size = terminal_size(terminal)
        if trial and (attached or size is not None):
            raise InvalidArgs("a trial cannot have a terminal or be attached: leave out terminal and attached")
        if attached and (background or patience is not None or size is not None):
            raise InvalidArgs("attached is for a command in the foreground: leave out background, yieldMs and terminal")
        words = None if argv is None else tuple(argv)
        return _Start(command, folder, timeout, background or size is not None, patience, words, attached, size)

    def _resolve(self, workdir: str | None) -> str:
        if workdir is None:
            return str(self._workspace)
        if not workdir or "\0" in workdir:
            raise InvalidArgs(f"workdir {workdir!r} is not a path: leave it out for the workspace {self._workspace}")
        try:
            return self._paths.check(workdir).real
        except OSError as error:
            raise InvalidArgs(f"cannot use workdir {workdir!r}: {error.strerror}; nothing was started") from None

    def _completed(self, job: Job) -> dict[str, Any]:
        assert job.exit is not None
        text, truncated = last_text(self._jobs, job, OUTPUT_CHARS, job.exit.size)
        return {
            "status": "completed" if job.exit.exit_code == 0 and not job.exit.timed_out else "failed",
            "sessionId": job.id,
            "exitCode": job.exit.exit_code,
            "signal": job.exit.signal,
            "timedOut": job.exit.timed_out,
            "startedAt": job.started_at,
            "endedAt": job.exit.ended_at,
            "durationMs": job.exit.duration_ms,
            "output": text,
            "tail": text[-TAIL_CHARS:],
            "truncated": truncated,
            **({"stderr": last_text(self._jobs, job, OUTPUT_CHARS, stream=ERRORS)[0]} if job.attached else {}),
            "workdir": job.workdir,
            **_processes("ended", job.exit.ended),
            **_processes("leftRunning", job.exit.left),
        }

    def _backgrounded(self, job: Job) -> dict[str, Any]:
        return {
            "status": "running",
            "sessionId": job.id,
            "pid": job.pid,
            "startedAt": job.started_at,
            "tail": self._tail(job),
            "workdir": job.workdir,
        }

    # Process

    async def _tended(self, action: str, sessionId: str | None, signal: str | None) -> tuple[str, Job | None]:
        """Return the action and its session; None for `list`. A signal may be sent to any command."""
        action = action.strip().lower()
        if action not in _ACTIONS:
            raise InvalidArgs(f"Unknown action {action!r}: use one of {', '.join(_ACTIONS)}")
        if signal is not None:
            signal_number(signal)
            if action != "kill":
                raise InvalidArgs(f"signal is for the action kill, not {action}")
        if action == "list":
            return action, None
        if sessionId is None or sessionId == "":
            raise InvalidArgs("sessionId is required for this action")
        job = await self._jobs.find_call(sessionId) or await self._jobs.get(sessionId)
        if not self._jobs.listed(job):
            raise NotFound(f"No session found for {sessionId}: it ended more than 30 minutes ago")
        if not job.background and signal is None:
            raise NotFound(f"Session {sessionId} is not backgrounded")
        return action, job

    @staticmethod
    def _input(action: str, data: str) -> str:
        return data + "\n" if action == "submit" else data

    def _list(self) -> dict[str, Any]:
        jobs = [job for job in self._jobs.listing() if job.background]
        sessions = []
        lines = []
        for job in jobs:
            runtime = job.exit.duration_ms if job.exit else (job.lost_at or round(time.time() * 1000)) - job.started_at
            sessions.append(
                {
                    "sessionId": job.id,
                    "status": _status(job),
                    "pid": job.pid,
                    "startedAt": job.started_at,
                    "endedAt": job.ended_at,
                    "runtimeMs": runtime,
                    "workdir": job.workdir,
                    "command": job.command,
                    "tail": self._tail(job),
                    "truncated": self._truncated(job),
                    **_outcome(job),
                }
            )
            lines.append(f"{job.id} {_status(job):<9} {runtime}ms :: {job.command}")
        return {
            "status": "completed",
            "sessions": sessions,
            "text": "\n".join(lines) or "No running or recent sessions.",
        }

    def _poll(self, job: Job) -> dict[str, Any]:
        return {
            "status": _status(job),
            "sessionId": job.id,
            **_outcome(job),
            "tail": self._tail(job),
            "running": job.running,
        }

    def _log(self, job: Job, offset: int, limit: int) -> dict[str, Any]:
        text, truncated = last_text(self._jobs, job, OUTPUT_CHARS)
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        log = "\n".join(lines[offset : offset + limit])
        if not text:
            log = "(no output yet)" if job.running else "(no output recorded)"
        return {
            "status": _status(job),
            "sessionId": job.id,
            "log": log,
            "totalLines": len(lines),
            "totalChars": len(text),
            "truncated": truncated,
            **({} if job.running else {"exitCode": _outcome(job)["exitCode"], "signal": _outcome(job)["signal"]}),
        }

    async def _write(self, job: Job, text: str) -> dict[str, Any]:
        if not job.running:
            raise Failed(f"Session {job.id} {'was lost' if job.lost else 'has already exited'}")
        if not job.stdin:
            raise Failed(f"Session {job.id} stdin is not writable")
        try:
            written = await self._jobs.write(job, text.encode("utf-8", "surrogatepass"))
        except Failed as error:
            if not job.running:
                raise Failed(f"Session {job.id} has already exited") from None
            if "not writable" in error.message:
                raise Failed(f"Session {job.id} stdin is not writable") from None
            raise
        return {"status": "running", "sessionId": job.id, "bytesWritten": written}

    async def _kill(self, job: Job) -> dict[str, Any]:
        was_running = job.running
        ending = await self._jobs.end(job, grace=0)
        if ending.survivors:
            raise Failed(ending.describe(f"Session {job.id} could not be killed"))
        if not was_running and not ending.ended:
            raise Failed(f"Session {job.id} has already exited and left nothing running")
        return {
            "status": "killed",
            "sessionId": job.id,
            "message": ending.describe("Kill signal sent"),
            **_processes("ended", ending.ended),
        }

    async def _signal(self, job: Job, name: str) -> dict[str, Any]:
        """Send a signal to the command; TERM and KILL end its whole process tree."""
        number = signal_number(name)
        if number == Signals.SIGKILL:
            return await self._kill(job)
        if not job.running:
            raise Failed(f"Session {job.id} has already exited")
        if number == Signals.SIGTERM:
            ending = await self._jobs.end(job, TERM_SECONDS)
            if ending.survivors:
                raise Failed(ending.describe(f"Session {job.id} could not be ended"))
            return {"status": "killed", "sessionId": job.id, "message": ending.describe("SIGTERM sent")}
        await self._jobs.signal(job, number)
        return {"status": _status(job), "sessionId": job.id, "message": f"{number.name} sent"}

    # output

    def _tail(self, job: Job) -> str:
        return last_text(self._jobs, job, TAIL_CHARS)[0]

    def _truncated(self, job: Job) -> bool:
        size = self._jobs.size(job)
        if size <= OUTPUT_CHARS or size > OUTPUT_CHARS * CHARACTER_BYTES:
            return size > OUTPUT_CHARS
        return last_text(self._jobs, job, OUTPUT_CHARS)[1]


def _status(job: Job) -> str:
    if job.running:
        return "running"
    if job.exit is None:
        return "lost"
    if job.exit.timed_out:
        return "timed_out"
    return "completed" if job.exit.exit_code == 0 else "failed"


def _outcome(job: Job) -> dict[str, Any]:
    if job.exit is None:
        return {"exitCode": None, "signal": None, "timedOut": False}
    return {"exitCode": job.exit.exit_code, "signal": job.exit.signal, "timedOut": job.exit.timed_out}


def _processes(name: str, processes: Iterable[SystemProcess]) -> dict[str, Any]:
    """Return a field that GSV's node tools do not have, present only if it is not empty."""
    found = [{"pid": process.pid, "name": process.name} for process in processes]
    return {name: found} if found else {}


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise InvalidArgs(f"{name} must not be negative, but is {value!r}")
    return value
