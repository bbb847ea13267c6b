"""Starts `python -m farhand …` and `python script.py …` by forking a process that has imported Farhand already.

Importing takes most of the time of a short command and of a gateway's start, and the suite starts thousands of them.
The result is the same: a process of its own with its own arguments, environment, folder and standard files. A command
is started in the ordinary way if it is another one, if its environment has settings that the interpreter or the loader
reads before any module (`PYTHON…`, `LD_…`), or if `FARHAND_TEST_FORK` is not 1; conftest.py sets it, and a test that
looks at the environment or the arguments of a process in /proc gives the process another value.

`start_process` and `run_process` are the interface; `python -m tests.support.fork_server FD` is the server.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FARHAND = [sys.executable, "-m", "farhand"]
READ_BEFORE_MODULES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "COVERAGE_")
MESSAGE_BYTES = 1 << 20
LIBRARIES = (
    "apsw",
    "blake3",
    "click",
    "httptools",
    "nacl.public",
    "nacl.signing",
    "picows",
    "rich.table",
    "uvicorn",
    "uvloop",
    "zoneinfo",
)


def start_process(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
    start_new_session: bool = False,
    own_terminal: bool = False,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[Any] | ForkedProcess:
    """Start a command; the options are those of `subprocess.Popen`.

    `own_terminal`: standard input is the controlling terminal of its new session, so that Ctrl-C there is a signal.
    """
    env = dict(env)
    command = [str(word) for word in command]
    wanted = env.pop("FARHAND_TEST_FORK", os.environ.get("FARHAND_TEST_FORK"))
    forks = wanted == "1" and (command[:3] == FARHAND or (command[0] == sys.executable and command[1].endswith(".py")))
    if not forks or _early(env) != _early(os.environ):
        return subprocess.Popen(
            command,
            env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=text, cwd=cwd,
            start_new_session=start_new_session or own_terminal,
            preexec_fn=_take_terminal if own_terminal else None,  # noqa: PLW1509
        )  # fmt: skip
    session = "terminal" if own_terminal else "new" if start_new_session else ""
    return _server().start(command, env, (stdin, stdout, stderr), text=text, session=session, cwd=cwd)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    input: str | bytes | None = None,
    text: bool = True,
    timeout: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as `subprocess.run` does, with all output captured. Without input there is none."""
    pipe = subprocess.PIPE
    stdin = subprocess.DEVNULL if input is None else pipe
    process = start_process(command, env, stdin=stdin, stdout=pipe, stderr=pipe, text=text, cwd=cwd)
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    done = subprocess.CompletedProcess(list(command), process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


def _early(env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that take effect before any module is imported."""
    return {name: value for name, value in env.items() if name.startswith(READ_BEFORE_MODULES) and value}


class ForkedProcess:
    """A process that the server started, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, server: _Server, pid: int, arguments: Sequence[str], pipes: Sequence[IO[Any] | None]) -> None:
        self.pid = pid
        self.args = list(arguments)
        self.stdin, self.stdout, self.stderr = pipes
        self.returncode: int | None = None
        self._server = server

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Send the input, and return all output; the process has ended then."""
        found: dict[int, Any] = {}

        def read(number: int, file: IO[Any]) -> None:
            found[number] = file.read()

        def write(file: IO[Any]) -> None:
            with contextlib.suppress(BrokenPipeError):
                if input:
                    file.write(input)
                file.close()

        threads = [
            threading.Thread(target=read, args=(number, file), daemon=True)
            for number, file in ((1, self.stdout), (2, self.stderr))
            if file is not None
        ]
        if self.stdin is not None:
            threads.append(threading.Thread(target=write, args=(self.stdin,), daemon=True))
        for thread in threads:
            thread.start()
        end = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()
        return found.get(1), found.get(2)


class _Server:
    """The test's side of the server: asks for processes and keeps their exit statuses."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, other):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, MESSAGE_BYTES)
        command = [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, pass_fds=(other.fileno(),), cwd=root, stdin=subprocess.DEVNULL)
        other.close()
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._number = 0
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self.process.wait(10)

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        files: Sequence[int | IO[Any] | None],
        *,
        text: bool,
        session: str,
        cwd: str | os.PathLike[str] | None,
    ) -> ForkedProcess:
        passed: list[int] = []
        pipes: list[IO[Any] | None] = [None, None, None]
        opened: list[int] = []
        for number, file in enumerate(files):
            if file == subprocess.PIPE:
                reading, writing = os.pipe()
                theirs, ours = (reading, writing) if number == 0 else (writing, reading)
                mode = ("w" if number == 0 else "r") + ("" if text else "b")
                pipes[number] = os.fdopen(ours, mode, encoding="utf-8" if text else None)
                opened.append(theirs)
            elif file == subprocess.DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
                opened.append(theirs)
            elif file == subprocess.STDOUT:
                theirs = passed[1]
            elif file is None:
                theirs = number
            else:
                theirs = file if isinstance(file, int) else file.fileno()
            passed.append(theirs)
        with self._lock:
            self._number += 1
            number = self._number
            folder = os.path.abspath(cwd or ".")
            wanted = {"number": number, "arguments": list(arguments), "env": dict(env), "cwd": folder}
            mask = os.umask(0)
            os.umask(mask)
            wanted |= {"session": session, "files": resource.getrlimit(resource.RLIMIT_NOFILE), "umask": mask}
            message = json.dumps(wanted).encode()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))]
            self._socket.sendmsg([message], rights)
            while number not in self._started:
                self._take()
            pid = self._started.pop(number)
        for descriptor in opened:
            os.close(descriptor)
        return ForkedProcess(self, pid, arguments, pipes)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit status as `Popen.returncode` has it, or None if it has not ended in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    self._take()
                if pid in self._statuses:
                    return self._statuses[pid]
            left = 1.0 if end is None else end - time.monotonic()
            if left <= 0:
                return None
            # Another thread may read the message first; then the next look finds the status.
            select.select([self._socket], [], [], min(left, 0.05))

    def _take(self) -> None:
        message = self._socket.recv(65536)
        if not message:
            raise RuntimeError("the fork server has ended")
        reported = json.loads(message)
        if "status" in reported:
            self._statuses[reported["pid"]] = reported["status"]
        else:
            self._started[reported["number"]] = reported["pid"]
            # A number that an earlier process had, which has been waited for by then.
            self._statuses.pop(reported["pid"], None)


_instance: _Server | None = None


def _server() -> _Server:
    global _instance  # noqa: PLW0603
    if _instance is None or _instance.process.poll() is not None:
        _instance = _Server()
    return _instance


# -- the server ------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> list[str]:
    """Fork for every request until the tests end; in a forked process, return its arguments."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which then close the connection
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 65536)
            _report_ended(connection)
        if connection not in ready:
            continue
        message, rights, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4))
        if not message:
            os._exit(0)
        files = array.array("i")
        for _, _, data in rights:
            files.frombytes(data)
        wanted = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(woken)
            os.close(wake)
            connection.close()
            return _become(wanted, list(files))
        connection.send(json.dumps({"number": wanted["number"], "pid": pid}).encode())
        for descriptor in files:
            os.close(descriptor)


def _report_ended(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection.send(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _become(wanted: dict[str, Any], files: list[int]) -> list[str]:
    """Take over the wanted environment, folder and standard files."""
    if wanted["session"]:
        os.setsid()
    # Above the standard files first, so that none is overwritten before it is copied.
    copies = [os.dup2(descriptor, 60 + number) for number, descriptor in enumerate(files)]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for descriptor in {*copies, *files} - {0, 1, 2}:
        os.close(descriptor)
    if wanted["session"] == "terminal":
        _take_terminal()
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(wanted["files"]))
    os.umask(wanted["umask"])
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    lines = 1 if os.isatty(1) else -1
    sys.stdout = open(1, "w", buffering=lines, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    return list(wanted["arguments"])


def _run(command: list[str]) -> None:
    if command[:3] == FARHAND:
        import farhand

        sys.argv = [str(Path(farhand.__file__).with_name("__main__.py")), *command[3:]]
        sys.path[0] = os.getcwd()
        runpy.run_module("farhand", run_name="__main__", alter_sys=True)
    else:
        sys.argv = command[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(command[1]))
        runpy.run_path(command[1], run_name="__main__")


def _leave(end: SystemExit) -> None:
    """End as the interpreter does, but without freeing each object: that takes longer than most commands."""
    if end.code is not None and not isinstance(end.code, int):
        raise end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        raise end from None  # the interpreter reports it
    os._exit((end.code or 0) & 0xFF)


def import_farhand() -> None:
    import farhand

    for module in pkgutil.walk_packages(farhand.__path__, "farhand."):
        # The keeper's modules run when imported, and optional packages may be missing.
        if module.name.endswith(("__main__", ".bundle_main")) or ".jobs.keeper" in module.name:
            continue
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(True)
    import_farhand()
    sys.orig_argv = serve(channel)
    try:
        _run(sys.orig_argv)
    except SystemExit as end:
        _leave(end)
    _leave(SystemExit())
