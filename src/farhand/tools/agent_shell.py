"""The agent's shell on the gateway's machine: exec and process."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from farhand.machine.files import steering_files
from farhand.machine.files.files import Files
from farhand.machine.jobs.foreground import Foreground
from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs
from farhand.machine.jobs.output_text import CHARACTER_BYTES, last_text
from farhand.machine.sandbox.confinement import Confinement, unconfined
from farhand.machine.sandbox.host_commands import HostCommands
from farhand.machine.sandbox.levels import ChosenSandbox
from farhand.machine.sandbox.trials import Trials
from farhand.protocol.calls import PROGRAM_STOPPING
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.secret_handles import shell_command, substituted
from farhand.tools.preview import Preview, command_preview
from farhand.tools.skill_paths import SkillPaths
from farhand.tools.tool import CallContext, Tool, tool

DEFAULT_SECONDS: Final = 1800
LEAST_SECONDS: Final = 10
MOST_SECONDS: Final = 1800
OUTPUT_CHARS: Final = 100_000
BACKGROUND_CHARS: Final = 10_000
GRACE: Final = 5.0
SSH_FAILED: Final = 255
_ANSWER_MS: Final = 30_000  # time to end the longest command and to respond
_TRUNCATED: Final = "[output truncated]"
_SHELL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACTIONS: Final = ("status", "input", "signal", "poll")
_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT")


class _Start(NamedTuple):
    """The parsed arguments of `exec`."""

    command: str
    folder: str
    variables: dict[str, str]
    # 0 means no limit.
    seconds: float
    # Note in the answer if the time limit differs from the requested one.
    note: str
    sandbox: ChosenSandbox | None
    # Set when the command runs on the host.
    host: HostCommands | None


class AgentShellTools:
    """The two tools over one `Jobs`, in the folders that `files` allows."""

    def __init__(
        self,
        jobs: Jobs,
        files: Files,
        confinement: Callable[[], Confinement] = unconfined,
        secrets: KnownSecrets | None = None,
        skills: SkillPaths | None = None,
        trials: Trials | None = None,
    ) -> None:
        """`confinement` is called before each command. `secrets` are redacted, even if output is cut within one."""
        self._skills = skills
        self._trials = trials
        self._secrets = secrets or KnownSecrets()
        self._jobs = jobs
        # Background processes started by callers that may not change steering files: only those take their input.
        self._restricted: set[str] = set()
        self._files = files
        self._confinement = confinement
        self._foreground = Foreground(jobs)

    def tools(self) -> list[Tool]:
        return [
            tool(
                self.exec,
                aliases={"working_dir": "workdir"},
                unlisted=("input",),
                capability="shell.exec",
                takes_handles=True,
                timeout_ms=MOST_SECONDS * 1000 + _ANSWER_MS,
                continues=True,
                preview=self.preview_exec,
            ),
            tool(
                self.process,
                aliases={"pid": "process_id", "data": "input"},
                capability="shell.exec",
                preview=self.preview_process,
            ),
        ]

    async def exec(
        self,
        context: CallContext,
        command: Annotated[str, Meta(description="Shell command.")],
        workdir: Annotated[str | None, Meta(description="Folder to run in (default: the workspace).")] = None,
        env: Annotated[dict[str, str] | None, Meta(description="Environment variables to add.")] = None,
        background: Annotated[bool, Meta(description="Return at once with a process id.")] = False,
        timeout: Annotated[float | None, Meta(description="Seconds, 10 to 1800 (default 1800).")] = None,
        trial: Annotated[bool, Meta(description="Only show what it would change, without network.")] = False,
        input: str | None = None,  # noqa: A002
    ) -> str | dict[str, Any]:
        """Run a shell command; gives its exit code and output. Manage background ones with process."""
        start = self._started(command, workdir, env, background, timeout, input)
        note, on_host = start.note, start.host is not None
        hidden: dict[str, str] = {}
        if context.secrets:
            start, hidden = _with_secrets(start, context.secrets)
            input = input and substituted(input, context.secrets)  # noqa: A001
        if trial:
            shell, sent = await self._tried(start, background, context, inherit=bool(hidden))
        else:
            shell, sent = await asyncio.to_thread(
                partial(_way, inherit=bool(hidden)),
                start.sandbox,
                start.host,
                start.command,
                start.folder,
                start.variables,
            )

        async def begin() -> Job:
            try:
                return await self._jobs.start(
                    sent,
                    workdir=start.folder,
                    timeout=start.seconds,
                    stdin=background or input is not None,
                    background=background,
                    env=hidden if start.sandbox or trial else start.variables | hidden,
                    bare=trial or (start.sandbox is not None and start.host is None),
                    shell=shell,
                    grace=GRACE,
                    call_id=context.call_id,
                )
            except Failed as error:
                raise Failed(f"exit code: -1; failed to start command: {error.message}") from None

        stdin = None if input is None else input.encode("utf-8", "surrogatepass")
        job = await self._foreground.run(begin(), stdin=stdin, leaving=PROGRAM_STOPPING)
        if job.background:
            if not steering_files.allowed.get():
                self._restricted.add(job.id)
            return f"started background process {job.id}" + note
        assert job.exit is not None
        if on_host and job.exit.exit_code == SSH_FAILED:
            raise Failed(f"host command failed over SSH: {self._head(job, OUTPUT_CHARS)[0].strip()}")
        text = self._completed(job, note)
        return text if not trial else await self._ended_trial(text, context)

    async def process(
        self,
        action: Annotated[str, Meta(extra_json_schema={"enum": _ACTIONS})],
        process_id: Annotated[str | int, Meta(description="Id that exec gave.")],
        input: Annotated[str | None, Meta(description="For input: text for standard input.")] = None,  # noqa: A002
        signal: Annotated[str | None, Meta(description="For signal: SIGTERM, SIGINT, SIGKILL.")] = None,
    ) -> str:
        """Manage a background process: status, poll (output so far), input, signal."""
        act, job = await self._tended(action, process_id, input)
        if act == "status":
            return _status(job)
        if act == "poll":
            return self._tail(job)
        if act == "input":
            assert input is not None
            await self._send(job, input)
            return f"sent input to process {process_id}"
        return await self._signal(job, process_id, signal)

    async def _tended(self, action: str, process_id: str | int, text: str | None) -> tuple[str, Job]:
        """Return the action and its process."""
        act = action.strip().lower()
        if not act:
            raise InvalidArgs("process parameter action is required")
        if act not in _ACTIONS:
            raise InvalidArgs(f"process action must be one of {', '.join(_ACTIONS)}")
        job = await self._find(str(process_id).strip())
        if act == "input" and text is None:
            raise InvalidArgs("process parameter input is required for input action")
        return act, job

    # previews: the same arguments, parsed by the same code

    def preview_exec(self, background: bool, trial: bool, input: str | None, **arguments: Any) -> Preview:  # noqa: A002
        start = self._started(background=background, text=input, **arguments)
        where = (
            "as a trial"
            if trial
            else "on the host, over SSH"
            if start.host
            else "in the sandbox"
            if start.sandbox
            else "without a sandbox"
        )
        limit = f"time limit {start.seconds:g} s" if start.seconds else "no time limit"
        summary = f"{'in the background, ' if background else ''}{where}, {limit}"
        return command_preview(start.command, start.folder, env=start.variables, stdin=input, summary=summary)

    async def preview_process(
        self,
        action: str,
        process_id: str | int,
        input: str | None,  # noqa: A002
        signal: str | None,
    ) -> Preview:
        act, job = await self._tended(action, process_id, input)
        if act == "input":
            return Preview(stdin=input, summary=f"writes to the standard input of process {job.id}: {job.command}")
        if act == "signal":
            return Preview(summary=f"sends {_signal_name(signal)} to process {job.id}: {job.command}")
        return Preview(summary=f"reads the output of process {job.id}: {job.command}")

    # exec

    def _started(
        self,
        command: str,
        workdir: str | None,
        env: dict[str, str] | None,
        background: bool,
        timeout: float | None,
        text: str | None,
    ) -> _Start:
        if not command.strip():
            raise InvalidArgs("exec parameter command is required")
        seconds, note = _clamped(timeout)
        variables = _variables(env)
        folder = self._folder(workdir)
        sandbox, host = self._confinement()
        on_host = sandbox is not None and host is not None and host.match(command)
        if on_host and (background or variables or text is not None):
            what = "background mode" if background else "env" if variables else "input"
            raise Failed(f"exit code: -1; failed to start command: {what} is not supported for host commands")
        limit = 0 if background and timeout is None else seconds
        return _Start(command, folder, variables, limit, note, sandbox, host if on_host else None)

    async def _tried(
        self, start: _Start, background: bool, context: CallContext, *, inherit: bool
    ) -> tuple[list[str], str]:
        if self._trials is None:
            raise Failed("exit code: -1; failed to start command: this machine cannot run trials")
        if background or start.host is not None:
            what = "background mode" if background else "a host command"
            raise Failed(f"exit code: -1; failed to start command: {what} cannot be tried")
        begin = partial(self._trials.begin, inherit=inherit, caller=context.trial_caller)
        words = await asyncio.to_thread(begin, context.call_id, start.command, start.folder, start.variables)
        return words, start.command

    async def _ended_trial(self, text: str, context: CallContext) -> dict[str, Any]:
        assert self._trials is not None
        call_id, finish = context.call_id, partial(self._trials.finish, secrets=tuple(context.secrets.values()))
        changes = (await asyncio.to_thread(finish, call_id, {"content": text})).described()["changes"]
        listed = "".join(f"\n{change['kind']} {change['path']}" for change in changes) or "\nno file"
        content = f"{text}\ntrial {call_id}: nothing has changed yet; keeping it changes:{listed}"
        return {"content": content, "trialId": call_id, "changes": changes}

    def _folder(self, workdir: str | None) -> str:
        path = workdir or "."
        return self._files.place(path if self._skills is None else self._skills.locate(path)).real

    def _completed(self, job: Job, note: str) -> str:
        assert job.exit is not None
        code = -1 if job.exit.exit_code is None else job.exit.exit_code
        first = f"exit code: {code}" + ("; timeout" if job.exit.timed_out else "")
        room = OUTPUT_CHARS - len(first) - 1 - len(note)
        text, more = self._head(job, room)
        if more:
            text = self._secrets.truncate(text, room - len(_TRUNCATED) - 1) + "\n" + _TRUNCATED
        return (f"{first}\n{text}" if text else first) + note

    # process

    async def _find(self, name: str) -> Job:
        if not name:
            raise InvalidArgs("process parameter process_id is required")
        job = await self._jobs.find(name)
        if job is None and name.isdecimal():
            job = next((known for known in self._jobs.listing() if known.background and known.pid == int(name)), None)
        if job is None or not job.background:
            raise NotFound(f"process {name} not found")
        return job

    async def _send(self, job: Job, text: str) -> None:
        if not steering_files.allowed.get() and job.id not in self._restricted:
            raise NotAllowed(
                f"process {job.id} runs with more rights than this credential has; its input needs the scope chat"
            )
        if not job.running:
            raise Failed(f"process {job.id} already completed")
        try:
            await self._jobs.write(job, text.encode("utf-8", "surrogatepass"))
        except Failed as error:
            raise Failed(error.message if job.running else f"process {job.id} already completed") from None

    async def _signal(self, job: Job, process_id: str | int, name: str | None) -> str:
        full = _signal_name(name)
        if not job.running:
            raise Failed(f"process {job.id} already completed")
        if full == "SIGKILL":
            await self._jobs.end(job, grace=0)  # the whole tree, including processes that left the group
        else:
            try:
                await self._jobs.signal(job, signal.Signals[full])
            except Failed as error:
                raise Failed(error.message if job.running else f"process {job.id} already completed") from None
        return f"sent {full} to process {process_id}"

    # output

    def _head(self, job: Job, limit: int) -> tuple[str, bool]:
        """Return the first `limit` characters of the output, and whether there are more."""
        assert job.exit is not None
        data = b""
        while len(data) <= limit * CHARACTER_BYTES:
            chunk = self._jobs.read(job, len(data), limit * CHARACTER_BYTES + 1 - len(data))
            if not chunk.data or chunk.skipped:
                break
            data += chunk.data
        text = data[: min(job.exit.size, len(data))].decode("utf-8", "replace")
        return text[:limit], len(text) > limit or len(data) < job.exit.size

    def _tail(self, job: Job) -> str:
        """Return the newest output of a background process."""
        text, more = last_text(self._jobs, job, BACKGROUND_CHARS)
        if not more:
            return self._secrets.redact_excerpt(text, after=job.running)
        tail = text[-(BACKGROUND_CHARS - len(_TRUNCATED) - 1) :]
        return f"{_TRUNCATED}\n" + self._secrets.redact_excerpt(tail, before=True, after=job.running)


def _signal_name(name: str | None) -> str:
    if not name:
        raise InvalidArgs("process parameter signal is required for signal action")
    full = name.strip().upper()
    full = full if full.startswith("SIG") else f"SIG{full}"
    if full not in _SIGNALS:
        raise InvalidArgs(f"process signal must be SIGTERM, SIGINT, or SIGKILL (or {', '.join(_SIGNALS[3:])})")
    return full


def _with_secrets(start: _Start, secrets: Mapping[str, str]) -> tuple[_Start, dict[str, str]]:
    """Return a command that reads its secrets from variables, and these variables.

    Raises Failed for a command on the host, which would get them in its arguments, and InvalidArgs.
    """
    if start.host is not None:
        raise Failed("exit code: -1; failed to start command: secrets are not supported for host commands")
    # The shell sets such variables. In the environment, `LD_PRELOAD` would have an effect outside of the sandbox, too.
    exports = ""
    plain = dict(start.variables)
    for name, value in start.variables.items():
        if "{{secret:" in value:
            if not _SHELL_NAME.fullmatch(name):
                raise InvalidArgs(f"exec parameter env: a shell cannot set a variable {name[:100]!r} to a secret")
            exports += f"export {name}={shlex.quote(plain.pop(name))}\n"
    command, hidden = shell_command(exports + start.command, secrets)
    return start._replace(command=command, variables=plain), hidden


def _way(
    sandbox: ChosenSandbox | None,
    host: HostCommands | None,
    command: str,
    folder: str,
    variables: dict[str, str],
    *,
    inherit: bool = False,
) -> tuple[list[str], str]:
    """Return the command prefix and the command as it is sent. Raises Failed if the sandbox does not work."""
    if host is not None:
        return host.words(), host.sent(command, folder)
    if sandbox is None:
        return ["/bin/sh", "-c"], command
    sandbox.check()
    return sandbox.words(folder, variables, inherit=inherit), command


def _status(job: Job) -> str:
    state = "running" if job.running else "lost" if job.exit is None else "completed"
    code = 0 if job.running else -1
    if job.exit is not None and job.exit.exit_code is not None:
        code = job.exit.exit_code
    ended = job.ended_at or round(time.time() * 1000)
    runtime = max(0, ended - job.started_at) / 1000
    return f"state: {state}\nrunning: {'true' if job.running else 'false'}\nexit code: {code}\nruntime: {runtime:.3f}s"


def _clamped(timeout: float | None) -> tuple[float, str]:
    """Return the time limit in seconds, and a note if it differs from the requested one."""
    if timeout is None:
        return DEFAULT_SECONDS, ""
    seconds = min(max(timeout, LEAST_SECONDS), MOST_SECONDS)
    if seconds == timeout:
        return seconds, ""
    return seconds, f"\n[timeout {timeout:g} s is outside {LEAST_SECONDS}-{MOST_SECONDS} s; {seconds:g} s was used]"


def _variables(env: dict[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidArgs(f"exec parameter env: {name!r} cannot be a variable with the value {value!r}")
    return dict(env or {})
