"""Commands that outlive the program that started them: start, watch, write, signal, end, and find again.

`Jobs` is the client of the keeper (see `keeper.py`). All state is in its folder, so a program that was killed opens
the folder again and has the same jobs, with the same ids, outputs and exit codes.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farhand.machine.files.private_files import open_private
from farhand.machine.jobs import output
from farhand.machine.jobs import process_tree as tree
from farhand.machine.jobs.ipc_client import WorkerLink
from farhand.machine.jobs.ipc_server import SOCKET, line
from farhand.machine.jobs.job import Ending, Job, processes, read_record
from farhand.machine.jobs.output import OUTPUT, OutputChunk
from farhand.machine.jobs.process_tree import Process
from farhand.machine.threads import in_own_thread
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError

GRACE = 0.25  # seconds between SIGTERM and SIGKILL
OUTPUT_LIMIT = 50 * 1024 * 1024  # bytes of one job's output kept on disk, the newest
LISTED_SECONDS = 30 * 60  # how long a finished job is listed
KEPT_SECONDS = 24 * 60 * 60  # how long its record and output are kept,
KEPT_JOBS = 10_000  # unless there are more finished jobs than these,
KEPT_BYTES = 4 * 1024 * 1024 * 1024  # or they take more room than this
SWEEP_SECONDS = 60.0
END_SECONDS = 3.0  # how long `end_all` waits for workers

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_CALLS = uuid.UUID("3f0c7c5e-6f0b-4f2e-9b43-0d6f1c1f7a11")  # namespace that maps call ids to job ids
_RUN_KEEPER = (
    "import sys; sys.path.append(sys.argv[1]); from farhand.machine.jobs.keeper import main; "
    "main(sys.argv[2], float(sys.argv[3]))"
)
# Shells in which "$@" does not stand for the arguments.
_OTHER_SHELLS = frozenset({"fish", "csh", "tcsh", "nu", "elvish", "xonsh", "pwsh"})
_NOT_LISTENING = (FileNotFoundError, ConnectionRefusedError, ConnectionResetError)


def login_shell(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the user's login shell with its flags: `$SHELL` if it is absolute and executable, else `/bin/sh`."""
    shell = Path(environment.get("SHELL", ""))
    usable = shell.is_absolute() and shell.is_file() and os.access(shell, os.X_OK)
    return str(shell) if usable else "/bin/sh", "-lc"


class Jobs:
    """The commands of one folder. Use as `async with Jobs(folder) as jobs`; exiting ends no command."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        environment: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
        listed_seconds: float = LISTED_SECONDS,
        kept_seconds: float = KEPT_SECONDS,
        linger: float = 60.0,
        eager: bool = True,
    ) -> None:
        """`environment`: that of commands (default: this program's). `linger`: how long an unused keeper stays.

        `eager=False` starts the keeper with the first command.
        """
        self.folder = Path(folder).absolute()
        self.environment = dict(os.environ if environment is None else environment)
        self._output_limit = output_limit
        self._listed_seconds = listed_seconds
        self._kept_seconds = kept_seconds
        self._linger = linger
        self._eager = eager
        self._jobs: dict[str, Job] = {}
        self._links: dict[str, WorkerLink] = {}
        self._starting: dict[str, asyncio.Future[Job]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._hold: WorkerLink | None = None
        self._keeper_lock = asyncio.Lock()
        self._next_sweep = 0.0
        self._boot = machine_boot()
        self._open = False

    async def __aenter__(self) -> Self:
        """Load the jobs of the folder and start the keeper. Raises Failed if it cannot be started."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._open = True
        if self._eager:
            await self._ready_keeper()
        for job in await asyncio.to_thread(self._load_listed):
            self._jobs[job.id] = job
        await asyncio.gather(*(self._attach(job) for job in self._jobs.values() if job.running))
        self._sweep_when_due()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._hold is not None:
            self._hold.close()

    # start and find

    async def start(
        self,
        command: str,
        *,
        workdir: str | os.PathLike[str],
        timeout: float = 0.0,
        stdin: bool = False,
        background: bool = False,
        env: Mapping[str, str] | None = None,
        bare: bool = False,
        shell: Sequence[str] | None = None,
        arguments: Sequence[str] | None = None,
        attached: bool = False,
        terminal: tuple[int, int] | None = None,
        grace: float = GRACE,
        job_id: str | None = None,
        call_id: str | None = None,
    ) -> Job:
        """Start `command` with the login shell, or after the words of `shell`, in the absolute folder `workdir`.

        `env` adds to the environment; with `bare` it is the whole environment, for a sandbox, where /proc shows the
        environment of the program that created it. `timeout` is in seconds, 0 for none. Without `stdin` the input is
        empty. With `arguments`, these words are run as they are, and `command` only describes them. An `attached`
        command has a standard error of its own, and waits for the reader of its output (see `received`). With
        `terminal`, its columns and rows, the command has a terminal of its own. A call (or job id) starts at most once
        while its record is kept: if any program started it before, that job is returned.
        Raises NotFound, InvalidArgs or NotAllowed for an unusable workdir, Failed if the command could not be started;
        nothing runs then. If cancelled, it ends what it may have started.
        """
        if "\0" in command or any("\0" in word for word in arguments or ()):
            raise InvalidArgs("command contains a NUL character, which no shell accepts; remove it")
        name = job_id or (_call_job_id(call_id) if call_id else str(uuid.uuid4()))
        if not _JOB_ID.fullmatch(name):
            raise InvalidArgs(f"job id {name!r} must be 1 to 64 letters, digits, '-' or '_'")
        if name in self._starting:
            return await asyncio.shield(self._starting[name])
        if (job_id or call_id) and (known := await self.find(name)):
            return known
        environment = {**({} if bare else self.environment), **(env or {})}
        request: dict[str, Any] = {
            "id": name,
            "callId": call_id,
            "command": command,
            "workdir": os.fspath(workdir),
            "timeoutMs": timeout * 1000,
            "graceMs": grace * 1000,
            "stdin": stdin,
            "background": background,
            "outputLimit": self._output_limit,
            "boot": self._boot,
            "askedAt": _now_ms(),
            "attached": attached,
            "argv": _argv(command, arguments, shell, environment),
            "env": environment,
        }
        if terminal is not None:
            request["terminal"] = list(terminal)
        started: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._starting[name] = started
        try:
            job = await self._start(request)
        except Exception as error:
            started.set_exception(error)
            started.exception()  # mark it as retrieved: there may be no other waiter
            raise
        except BaseException:
            started.cancel()
            raise
        finally:
            del self._starting[name]
        started.set_result(job)
        self._sweep_when_due()
        return job

    async def _start(self, request: dict[str, Any]) -> Job:
        words = b"S" + line(request)
        for _ in range(3):
            job = Job.accepted(request)
            link = await self._reach_keeper(job)
            link.send(words)
            try:
                answer = await link.greeting
            except asyncio.CancelledError:
                link.ask("end", graceMs=0).add_done_callback(_retrieve)
                raise
            if error := answer.get("error"):
                raise ToolError.of(error["kind"], error["message"])
            if answer.get("event") == "started":
                self._jobs[job.id] = job
                self._links[job.id] = link
                return job
            # Started before, or the keeper ended before it answered: the job's folder shows which.
            if known := await self.find(job.id):
                return known
        raise Failed(f"the keeper in {self.folder} failed three times; see {self.folder / 'keeper.log'}")

    async def find(self, job_id: str) -> Job | None:
        """Return the job of that id while its record is kept, listed or not."""
        if job := self._jobs.get(job_id):
            return job
        job = self._load(job_id) if _JOB_ID.fullmatch(job_id) else None
        if job is not None and job.running:
            self._jobs[job.id] = job
            await self._attach(job)
        return job

    async def find_call(self, call_id: str) -> Job | None:
        """Return the job that was started for that call, or None."""
        return await self.find(_call_job_id(call_id))

    async def get(self, job_id: str) -> Job:
        """Return the job of that id. Raises NotFound."""
        if job := await self.find(job_id):
            return job
        raise NotFound(f"No session found for {job_id}")

    def listing(self) -> list[Job]:
        """Return running and recently ended jobs, newest first."""
        self._forget_old()
        return sorted(self._jobs.values(), key=lambda job: job.started_at, reverse=True)

    def listed(self, job: Job) -> bool:
        """Return whether the job runs or ended recently."""
        return job.ended_at is None or time.time() - job.ended_at / 1000 < self._listed_seconds

    # watch

    async def wait(self, job: Job, seconds: float | None = None) -> bool:
        """Wait for the job's end, at most `seconds`; return whether it ended."""
        if job.running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await job.over.wait()
        return not job.running

    def size(self, job: Job, stream: str = OUTPUT) -> int:
        """Return the length of the output so far, including what is no longer kept."""
        pieces = output.segments(self._folder(job), stream)
        return max(pieces[-1][1] if pieces else 0, job.exit.size if job.exit and stream == OUTPUT else 0)

    def read(self, job: Job, offset: int, limit: int = 65536, stream: str = OUTPUT) -> OutputChunk:
        """Return at most `limit` bytes of output from `offset` on; empty if there are none yet, or none any more."""
        if offset < 0 or limit < 1:
            raise InvalidArgs(f"offset {offset} must not be negative and limit {limit} must be at least 1")
        return output.read(self._folder(job), offset, limit, stream)

    def tail(self, job: Job, limit: int, end: int | None = None, stream: str = OUTPUT) -> OutputChunk:
        """Return what is kept of the last `limit` bytes of output before byte `end` (default: now)."""
        return output.tail(self._folder(job), limit, self.size(job, stream) if end is None else end, stream)

    async def follow(
        self, job: Job, offset: int = 0, limit: int = 65536, stream: str = OUTPUT
    ) -> AsyncIterator[OutputChunk]:
        """Yield the output from `offset` on as it arrives, until the job ended and all of it was yielded."""
        while True:
            over = not job.running
            chunk = self.read(job, offset, limit, stream)
            if chunk.data:
                offset = chunk.next_offset
                yield chunk
            elif over:
                return
            elif link := self._links.get(job.id):
                with contextlib.suppress(ConnectionError):
                    await link.ask("watch", offset=offset, stream=stream)
            else:
                await job.over.wait()

    async def processes(self, job: Job) -> tuple[Process, ...]:
        """Return the living processes of the job, including those a finished one left running."""
        if job.lost:
            return tuple(tree.living(await asyncio.to_thread(tree.marked_with, job.cookie)))
        if link := self._links.get(job.id):
            with contextlib.suppress(ConnectionError):
                return processes((await link.ask("processes"))["processes"])
        return ()

    # act

    def received(self, job: Job, offset: int, stream: str = OUTPUT) -> None:
        """Note that the reader of an attached command has all output before `offset`, so that the command continues."""
        if job.attached and job.running and (link := self._links.get(job.id)):
            link.ask("received", offset=offset, stream=stream).add_done_callback(_retrieve)

    async def write(self, job: Job, data: bytes, *, patient: bool = False) -> int:
        """Write `data` to the command's input. Raises Failed if it exited or has no input.

        `patient`: return when the command has read most of what was written, instead of failing if it reads slowly.
        """
        text = binascii.b2a_base64(data, newline=False).decode()
        answer = await self._act(job, "write", data=text, **({"wait": True} if patient else {}))
        return int(answer["written"])

    async def resize(self, job: Job, cols: int, rows: int) -> None:
        """Resize the command's terminal. Raises InvalidArgs for an invalid size, Failed if it exited or has none."""
        await self._act(job, "resize", cols=cols, rows=rows)

    async def close_stdin(self, job: Job) -> None:
        """Close the command's input after what was written. Raises Failed if it exited."""
        await self._act(job, "close")

    async def signal(self, job: Job, number: int) -> None:
        """Send a signal to the command's process group. Raises Failed if it exited."""
        if number not in signal.valid_signals():
            raise InvalidArgs(f"there is no signal {number}")
        await self._act(job, "signal", number=int(number))

    async def mark_background(self, job: Job) -> bool:
        """Mark the job as running in the background; return False, once its end is known, if it ended before."""
        try:
            job.background = bool((await self._act(job, "mark"))["marked"])
        except Failed:
            job.background = False
        if not job.background:
            await self.wait(job)
        return job.background

    async def end(self, job: Job, grace: float = GRACE) -> Ending:
        """End the whole tree: SIGTERM, `grace` seconds, then SIGKILL until nothing is left; return what was ended.

        The request is sent before the first `await`: it takes effect even if the caller is cancelled.
        """
        if job.lost:
            ended, survivors = await asyncio.to_thread(tree.end_marked, job.cookie)
            return Ending(tuple(ended), tuple(survivors))
        if link := self._links.get(job.id):
            with contextlib.suppress(ConnectionError):
                answer = await link.ask("end", graceMs=grace * 1000)
                return Ending(processes(answer["ended"]), processes(answer["survivors"]))
            await self.wait(job)
        return Ending((), ())

    async def end_all(self) -> Ending:
        """SIGKILL every living process of any command of this folder; return what was ended.

        This includes what finished commands left running, also those of earlier runs, and what lost its keeper.
        """
        linked = [job for job in self._jobs.values() if job.id in self._links]
        ran = [job for job in linked if job.running]
        endings = [asyncio.ensure_future(self.end(job, grace=0.0)) for job in linked]
        names = await in_own_thread(self._names)  # the shared threads may all be busy
        endings += [
            asyncio.ensure_future(self._end_unlinked(name))
            for name in names
            if name not in self._links and (self.folder / name / "socket").exists()
        ]
        if endings:
            await asyncio.wait(endings, timeout=END_SECONDS)
        results = [ending.result() for ending in endings if ending.done()]
        for silent in endings:  # a stopped worker; its processes are found by their environment
            silent.cancel()
        ended = {process for ending in results for process in ending.ended}
        ended |= {process for job in ran if job.exit is not None for process in job.exit.ended}
        cookies = [f"{tree.COOKIE}={name}" for name in names]
        orphans, survivors = await in_own_thread(tree.end_marked, *cookies) if cookies else ([], [])
        left = {process for ending in results for process in ending.survivors} | set(survivors)
        return Ending(tuple(sorted((ended | set(orphans)) - left)), tuple(sorted(left)))

    async def _end_unlinked(self, name: str) -> Ending:
        """End the processes of a worker that this program is not connected to."""
        try:
            link = await WorkerLink.open(self.folder / name / "socket", lambda _: None, lambda _: None)
        except OSError:
            return Ending((), ())  # just ended or lost; its processes are found by their environment
        try:
            answer = await link.ask("end", graceMs=0)
            return Ending(processes(answer["ended"]), processes(answer["survivors"]))
        except ConnectionError:
            return Ending((), ())
        finally:
            link.close()

    async def _act(self, job: Job, act: str, **details: Any) -> dict[str, Any]:
        while job.running:
            if link := self._links.get(job.id):
                with contextlib.suppress(ConnectionError):
                    return await link.ask(act, **details)
            await self.wait(job, 0.1)  # its worker is gone, or being reconnected
        raise Failed(f"Session {job.id} {'was lost with its keeper' if job.lost else 'has already exited'}")

    # the keeper and its workers

    async def _reach_keeper(self, job: Job) -> WorkerLink:
        give_up = time.monotonic() + 20.0
        while True:
            try:
                return await self._dial(self.folder / SOCKET, job)
            except _NOT_LISTENING:
                await self._ready_keeper()
            except OSError as error:  # the keeper is overloaded, or we are out of descriptors
                if time.monotonic() > give_up:
                    raise Failed(f"cannot reach the keeper in {self.folder}: {error}; nothing was started") from None
                await asyncio.sleep(0.02)

    async def _ready_keeper(self) -> None:
        """Start the keeper unless it can be reached, and hold a connection to it. Raises Failed with its output."""
        async with self._keeper_lock:
            give_up = time.monotonic() + 20.0
            while True:
                try:
                    hold = await WorkerLink.open(self.folder / SOCKET, lambda _: None, lambda _: None)
                    break
                except OSError as error:
                    if time.monotonic() > give_up:
                        raise Failed(f"the keeper in {self.folder} cannot be reached: {error}") from None
                await asyncio.to_thread(_run_keeper, self.folder, self._linger)
            hold.send(b"H")
            if self._hold is not None:
                self._hold.close()
            self._hold = hold

    async def _dial(self, path: Path, job: Job) -> WorkerLink:
        return await WorkerLink.open(path, job.learn, lambda link: self._unlinked(job, link))

    def _unlinked(self, job: Job, link: WorkerLink) -> None:
        if self._links.get(job.id) is link:
            del self._links[job.id]
            if job.running and self._open:
                self._spawn(self._attach(job))

    async def _attach(self, job: Job) -> None:
        """Connect to the worker of a job, or learn how the job ended, or that its outcome is lost."""
        while True:
            try:
                link = await self._dial(self.folder / job.id / "socket", job)
            except _NOT_LISTENING:
                break
            except OSError:
                await asyncio.sleep(0.1)
                continue
            self._links[job.id] = link
            # A worker that is connected but silent may be stopped; its messages arrive when it resumes.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await link.greeting
            return
        for fact in read_record(self.folder / job.id):
            job.learn(fact)
        if job.running:
            self._lose(job)

    def _lose(self, job: Job) -> None:
        fact = {"event": "lost", "lostAt": _now_ms()}
        folder = self.folder / job.id
        with contextlib.suppress(OSError):
            with open_private(folder / "record.jsonl", "ab") as record:
                record.write(b"\n" + line(fact))
            (folder / "socket").unlink(missing_ok=True)
        job.learn(fact)

    # the folder

    def _folder(self, job: Job) -> str:
        return f"{self.folder}/{job.id}"

    def _names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.folder) if _JOB_ID.fullmatch(entry.name) and entry.is_dir()]

    def _load_listed(self) -> list[Job]:
        """Return every job that runs or is still listed."""
        return [job for name in self._names() if (job := self._load(name)) is not None and self.listed(job)]

    def _load(self, job_id: str) -> Job | None:
        job = None
        for fact in read_record(self.folder / job_id):
            if job is not None:
                job.learn(fact)
            elif fact.get("event") == "accepted":
                job = Job.accepted(fact)
        if job is not None and job.running and job.boot != self._boot:
            self._lose(job)
        return job

    def _forget_old(self) -> None:
        for job in [job for job in self._jobs.values() if not self.listed(job) and job.id not in self._links]:
            del self._jobs[job.id]

    def _sweep_when_due(self) -> None:
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            self._forget_old()
            needed = {job.id for job in self._jobs.values() if job.running or job.background}
            needed |= self._links.keys() | self._starting.keys()
            self._spawn(asyncio.to_thread(_sweep, self.folder, needed, self._kept_seconds))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _argv(
    command: str, arguments: Sequence[str] | None, shell: Sequence[str] | None, environment: Mapping[str, str]
) -> list[str]:
    """Return the words that start a command: a line for the shell, or words that the shell passes on unread.

    The login shell takes up to some hundred milliseconds to start, so a program that is found without it does not wait
    for it.
    """
    if arguments is None:
        return [*(shell or login_shell(environment)), command]
    if shell is None:
        known = "/" in arguments[0] or shutil.which(arguments[0], path=environment.get("PATH")) is not None
        shell = ("/bin/sh", "-c") if known else login_shell(environment)
    if Path(shell[0]).name in _OTHER_SHELLS:
        shell = ("/bin/sh", "-lc")
    return [*shell, 'exec "$@"', "farhand", *arguments]


def _run_keeper(folder: Path, linger: float) -> None:
    log = folder / "keeper.log"
    if log.exists() and log.stat().st_size > 1024 * 1024:
        log.unlink()
    argv = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN_KEEPER]
    argv += [str(Path(__file__).parents[3]), str(folder), str(linger)]
    with open_private(log, "ab") as words:
        try:
            status = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
                timeout=20,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"cannot start the keeper with {argv[0]}: {error}") from None
    if status != 0:
        raise Failed(f"the keeper ended with status {status}: {log.read_text(errors='replace')[-500:].strip()}")
    time.sleep(0.002)  # another keeper may hold the lock but not listen yet


def _sweep(folder: Path, needed: set[str], kept_seconds: float) -> None:
    """Remove finished jobs from disk: the old ones, and the oldest if there are too many or too large."""
    finished: list[tuple[float, int, str]] = []
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > 60:
                shutil.rmtree(entry.path, ignore_errors=True)  # its worker was killed while creating it
            elif _JOB_ID.fullmatch(entry.name) and entry.is_dir() and entry.name not in needed:
                files = {file.name: file.stat() for file in os.scandir(entry.path)}
                if "socket" not in files:  # otherwise it belongs to another program, or its loss is not yet noticed
                    size = sum(file.st_size for file in files.values())
                    finished.append((files["record.jsonl"].st_mtime, size, entry.path))
    room, oldest = KEPT_BYTES, time.time() - kept_seconds
    for place, (moment, size, path) in enumerate(sorted(finished, reverse=True)):
        room -= size
        if moment < oldest or place >= KEPT_JOBS or room < 0:
            shutil.rmtree(path, ignore_errors=True)


def _call_job_id(call_id: str) -> str:
    return str(uuid.uuid5(_CALLS, call_id))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _retrieve(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def machine_boot() -> str:
    """Return the boot id of the machine: a job of another boot is lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        argv = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
