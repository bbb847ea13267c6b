"""A worker of the keeper: one command, from its start until nothing of it lives.

A worker and its clients exchange lines of JSON. Requests carry an `id`, which the answer repeats:

    write {data: base64}   close   signal {number}   end {graceMs}   processes   mark   watch {offset}

`started` and `exited` are sent unsolicited, as in the record. `watch` is answered when there is output beyond the
offset, or the command has ended.
"""
# ruff: noqa: PTH102, PTH106, PTH108, PTH110, PTH208

from __future__ import annotations

import binascii
import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from farhand.machine.jobs import process_tree as tree
from farhand.machine.jobs.ipc_server import READ_SIZE, ClientConnection, first_line, line, listen, refuse
from farhand.machine.jobs.output import OutputWriter
from farhand.machine.jobs.spawn import RequestRefused, open_workdir, spawn

DRAIN_SECONDS = 0.1  # how long to wait for more output after the exit while another process holds the pipe
SYNC_SECONDS = 0.02  # how long the start of a foreground command may stay unsynced
KILL_SECONDS = 5.0  # after this time, processes that survived SIGKILL are reported
LONGEST_WAIT_MS = 3_600_000.0  # poll does not accept infinity
STDIN_LIMIT = 1024 * 1024


def prepare() -> None:
    """Prepare a worker before its command is known."""
    os.setsid()
    tree.adopt_orphans()
    json.loads(json.dumps({"touch": ["the pages", 1.0, None]}))


def work(conversation: socket.socket) -> NoReturn:
    """Start and serve the command requested on `conversation`, in this forked process."""
    conversation.settimeout(10.0)
    try:
        request, rest = first_line(conversation)
        worker = Worker(request)
    except RequestRefused as refusal:
        refuse(conversation, refusal.kind, str(refusal))
    except FileExistsError:
        conversation.sendall(line({"exists": True}))
    else:
        worker.serve(conversation, rest)
    os._exit(0)


class Worker:
    """One command, from its start until nothing of it lives."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Record and start the command. Raises RequestRefused, or FileExistsError if it was started before."""
        self._grace = request["graceMs"] / 1000
        self._leader_status: int | None = None  # wait status of the shell
        self._alone = False  # no descendants left, as reported by waitpid
        self._timed_out = False
        self._exit: dict[str, Any] | None = None
        self._exit_written = False
        self._write_at = 0.0  # when the next attempt to write it is due
        self._ending: _Ending | None = None
        self._ended: dict[int, str] = {}
        self._survivors: list[tree.Process] = []
        self._report: dict[str, Any] = {"ended": [], "survivors": []}
        self._drain_until = 0.0
        self._conversations: dict[int, ClientConnection] = {}
        self._watchers: list[tuple[ClientConnection, int, int]] = []
        self._enders: list[tuple[ClientConnection, int]] = []
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll = select.poll()
        self._stdin = -1
        self._stdin_pending = bytearray()
        self._stdin_closing = False

        workdir = open_workdir(request["workdir"])
        try:
            self._make_folder(request)
            try:
                self._start(request, workdir)
            except BaseException:
                os.fchdir(self._parent)
                _remove(request["id"])
                raise
        finally:
            os.close(workdir)
        self._watch(self._listener.fileno(), select.POLLIN, self._on_connect)

    def _make_folder(self, request: dict[str, Any]) -> None:
        """Create the job's folder and change to it.

        It is renamed into place with the request and a listening socket in it: a folder without a worker is a lost job.
        """
        name, aside = request["id"], f".{request['id']}.{os.getpid()}"
        if os.path.exists(name):
            raise FileExistsError(name)
        accepted = {key: value for key, value in request.items() if key not in ("env", "argv")}
        self._parent = os.open(".", os.O_RDONLY)
        try:
            os.mkdir(aside, 0o700)
            try:
                os.chdir(aside)
                self._folder = os.open(".", os.O_RDONLY)
                self._record = _Record("record.jsonl")
                self._record.add({"event": "accepted", **accepted})
                self._output = OutputWriter(self._folder, request["outputLimit"])
                self._listener = listen("socket", 16)
                os.rename(aside, name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            except BaseException:
                os.fchdir(self._parent)
                _remove(aside)
                raise
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise FileExistsError(name) from None
            raise RequestRefused(
                "failed", f"cannot record the command: {error.strerror}; nothing was started"
            ) from None

    def _start(self, request: dict[str, Any], workdir: int) -> None:
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        environment = {**request["env"], tree.COOKIE: request["id"], "PWD": request["workdir"]}
        # Taken before spawning: the command may run before this process continues.
        self._started = time.monotonic()
        self._started_at = time.time_ns() // 1_000_000
        spawned = spawn(request["argv"], environment, workdir, self._folder, request["stdin"])
        self._leader, self._pipe, self._stdin = spawned
        self._deadline = self._started + request["timeoutMs"] / 1000 if request["timeoutMs"] else None
        self._started_fact = {
            "event": "started",
            "pid": self._leader,
            "ticks": tree.start_ticks(self._leader),
            "startedAt": self._started_at,
        }
        # From here on a full disk is no reason to refuse. A background command is synced at once; a foreground one gets
        # a
        # moment to end first, and is then synced once instead of twice.
        self._sync_at: float | None = self._started + SYNC_SECONDS
        with contextlib.suppress(OSError):
            self._record.add(self._started_fact)
            if request["background"]:
                self._sync()
        self._watch(wake, select.POLLIN, lambda _: self._on_wake(wake))
        self._watch(self._pipe, select.POLLIN, self._on_output)
        if self._stdin >= 0:
            self._watch(self._stdin, 0, self._on_stdin)  # POLLERR is reported in any case

    def serve(self, conversation: socket.socket, rest: bytes) -> None:
        """Serve until the command has ended, its end is recorded, and none of its processes lives."""
        first = self._join(conversation)
        first.send(self._started_fact)
        first.feed(rest)
        while not self._advance():
            for descriptor, mask in self._poll.poll(self._patience()):
                if handler := self._handlers.get(descriptor):
                    handler(mask)
        # The pipe may still contain output of the last process.
        while self._pipe >= 0 and self._pump():
            pass
        self._tell_watchers()
        with contextlib.suppress(OSError):
            os.unlink("socket")

    def _sync(self) -> None:
        """Sync the record and, the first time, the folders that contain it."""
        self._record.sync()
        if self._parent >= 0:
            os.fsync(self._folder)
            os.fsync(self._parent)
            os.close(self._parent)
            self._parent = -1
        self._sync_at = None

    # events

    def _advance(self) -> bool:
        """Do what is due by time or an exit; return True when nothing is left to do."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline and self._leader_status is None:
            self._deadline = None
            self._timed_out = True
            self._end(self._grace)
        if self._ending is not None:
            self._carry_on_ending(self._ending, now)
        if self._leader_status is not None and self._exit is None and self._ending is None:
            if self._pipe >= 0:
                self._pump()
            if self._pipe < 0 or now >= self._drain_until:
                self._finish(self._leader_status, now)
        if self._ending is None and (self._exit is not None or self._leader_status is None):
            self._answer_enders()
        if self._exit is not None and not self._exit_written and now >= self._write_at:
            self._write_exit(self._exit, now)
        if self._sync_at is not None and now >= self._sync_at:
            self._sync_at = now + 1.0  # retry if it fails
            with contextlib.suppress(OSError):
                self._sync()
        return self._exit_written and self._sync_at is None and self._alone and self._ending is None

    def _patience(self) -> float | None:
        moments: list[float] = []
        if self._deadline is not None and self._leader_status is None:
            moments.append(self._deadline)
        if self._sync_at is not None:
            moments.append(self._sync_at)
        if self._ending is not None:
            moments.append(self._ending.next_round)
        if self._leader_status is not None and self._exit is None:
            moments.append(self._drain_until)
        if self._exit is not None and not self._exit_written:
            moments.append(self._write_at)
        if not moments:
            return None
        return min(max(0.0, (min(moments) - time.monotonic()) * 1000 + 0.5), LONGEST_WAIT_MS)

    def _finish(self, status: int, now: float) -> None:
        code = os.waitstatus_to_exitcode(status)
        duration = round((now - self._started) * 1000)
        left = [] if self._alone else tree.living(tree.descendants(os.getpid()))
        self._exit = {
            "event": "exited",
            "pid": self._leader,
            "startedAt": self._started_at,
            "exitCode": code if code >= 0 else None,
            "signal": _signal_name(-code) if code < 0 else None,
            "timedOut": self._timed_out,
            "endedAt": self._started_at + duration,
            "durationMs": duration,
            "size": self._output.size,
            "ended": sorted(self._ended.items()),
            "left": left,
        }
        self._close_stdin()
        self._ended = {}
        self._write_exit(self._exit, now)
        for conversation in list(self._conversations.values()):
            conversation.send(self._exit)
        self._tell_watchers()

    def _write_exit(self, fact: dict[str, Any], now: float) -> None:
        """Record the exit, retrying while the disk is full; clients are notified meanwhile."""
        self._write_at = now + 1.0
        with contextlib.suppress(OSError):
            self._record.add(fact)
            self._exit_written = True
            self._sync_at = now  # after notifying clients, which need not wait for the disk

    def _end(self, grace: float) -> None:
        now = time.monotonic()
        if self._ending is None:
            self._ending = _Ending(kill_at=now + grace, give_up=now + grace + KILL_SECONDS, next_round=now)
            if grace > 0:
                self._ended.update(tree.strike(os.getpid(), signal.SIGTERM))
                self._ending.next_round = self._ending.kill_at
        elif now + grace < self._ending.kill_at:
            self._ending.kill_at = self._ending.next_round = now + grace

    def _carry_on_ending(self, ending: _Ending, now: float) -> None:
        self._reap()
        if not self._alone and now >= ending.next_round:
            ending.next_round = now + 0.005
            self._survivors = tree.strike(os.getpid(), signal.SIGKILL)
            self._ended.update(self._survivors)
            self._reap()
        if not self._alone and now < ending.give_up:
            return
        self._ending = None
        if self._alone:
            self._survivors = []
        for process in self._survivors:
            self._ended.pop(process.pid, None)
        self._report = {"ended": sorted(self._ended.items()), "survivors": self._survivors}
        if self._exit is not None:  # the shell had ended before; these were left over
            with contextlib.suppress(OSError):
                self._record.add({"event": "swept", **self._report})
            self._ended = {}

    def _answer_enders(self) -> None:
        for conversation, number in self._enders:
            conversation.send({"id": number, **self._report})
        self._enders = []

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._alone = True
                return
            if pid == 0:
                self._alone = False
                return
            if pid == self._leader:
                self._leader_status = status
                self._drain_until = time.monotonic() + DRAIN_SECONDS

    def _on_output(self, _: int) -> None:
        self._pump()

    def _pump(self) -> bool:
        """Store the command's output; return False if there was none. No limit ever blocks the command."""
        moved = False
        for _ in range(16):  # then other events get a turn
            try:
                data = os.read(self._pipe, READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                self._unwatch(self._pipe)
                os.close(self._pipe)
                self._pipe = -1
                break
            self._output.append(data)
            moved = True
        if moved:
            self._tell_watchers()
        return moved

    # requests

    def _ask(self, conversation: ClientConnection, request: dict[str, Any]) -> None:
        """Handle a client's request, or answer with an error."""
        number = request.get("id", 0) if isinstance(request, dict) else 0
        try:
            answer = self._asked(conversation, number, request)
        except RequestRefused as refusal:
            answer = {"error": {"kind": refusal.kind, "message": str(refusal)}}
        except OSError as error:
            answer = {"error": {"kind": "failed", "message": error.strerror or str(error)}}
        except (LookupError, TypeError, ValueError) as error:  # an invalid request must not stop the worker
            answer = {"error": {"kind": "invalid_args", "message": f"not a request: {error!r}"}}
        if answer is not None:
            conversation.send({"id": number, **answer})

    def _asked(self, conversation: ClientConnection, number: int, request: dict[str, Any]) -> dict[str, Any] | None:
        match request["do"]:
            case "write":
                return {"written": self._feed(binascii.a2b_base64(request["data"]))}
            case "close":
                if not self._stdin_pending:
                    self._close_stdin()
                else:
                    self._stdin_closing = True
                return {}
            case "signal":
                if self._leader_status is not None:
                    raise RequestRefused("failed", "the command has already exited")
                os.killpg(self._leader, request["number"])
                return {}
            case "end":
                self._report = {"ended": [], "survivors": []}
                self._reap()
                if not self._alone:
                    self._end(request["graceMs"] / 1000)
                self._enders.append((conversation, number))
                return None
            case "processes":
                return {"processes": tree.living(tree.descendants(os.getpid()))}
            case "mark":
                if self._leader_status is None:
                    self._record.add({"event": "marked"})
                    self._sync()
                return {"marked": self._leader_status is None}
            case "watch":
                if self._exit is None and self._output.size <= request["offset"]:
                    self._watchers.append((conversation, number, request["offset"]))
                    return None
                return {"size": self._output.size}
            case unknown:
                raise RequestRefused("invalid_args", f"the keeper does not know {unknown!r}")

    def _feed(self, data: bytes) -> int:
        if self._leader_status is not None:
            raise RequestRefused("failed", "the command has already exited")
        if self._stdin < 0 or self._stdin_closing:
            raise RequestRefused("failed", "the command's standard input is not writable")
        if len(self._stdin_pending) + len(data) > STDIN_LIMIT:
            waiting = len(self._stdin_pending)
            raise RequestRefused(
                "failed",
                f"the command has not read {waiting} bytes of its input yet and {len(data)} more are over the limit "
                f"of {STDIN_LIMIT}; nothing of them was written",
            )
        self._stdin_pending += data
        self._on_stdin(select.POLLOUT)
        if self._stdin < 0:
            raise RequestRefused("failed", "the command's standard input is not writable")
        return len(data)

    def _on_stdin(self, mask: int) -> None:
        try:
            while self._stdin_pending:
                del self._stdin_pending[: os.write(self._stdin, self._stdin_pending[:READ_SIZE])]
        except BlockingIOError:
            self._poll.modify(self._stdin, select.POLLOUT)
            return
        except OSError:
            mask = select.POLLERR
        if mask & (select.POLLERR | select.POLLHUP) or self._stdin_closing:
            self._close_stdin()
        else:
            self._poll.modify(self._stdin, 0)

    def _close_stdin(self) -> None:
        self._stdin_pending.clear()
        if self._stdin >= 0:
            self._unwatch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    # clients

    def _on_wake(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 512)
        self._reap()

    def _on_connect(self, _: int) -> None:
        with contextlib.suppress(OSError):
            conversation = self._join(self._listener.accept()[0])
            conversation.send(self._started_fact)
            if self._exit is not None:
                conversation.send(self._exit)

    def _join(self, client: socket.socket) -> ClientConnection:
        conversation = ClientConnection(client, self._ask, self._leave)
        self._conversations[client.fileno()] = conversation
        self._watch(client.fileno(), select.POLLIN, lambda _: conversation.read())
        return conversation

    def _leave(self, conversation: ClientConnection) -> None:
        """Drop a client; its requests stay in effect."""
        descriptor = conversation.client.fileno()
        if self._conversations.pop(descriptor, None) is None:
            return
        self._unwatch(descriptor)
        self._watchers = [entry for entry in self._watchers if entry[0] is not conversation]
        self._enders = [entry for entry in self._enders if entry[0] is not conversation]
        conversation.client.close()

    def _tell_watchers(self) -> None:
        waiting = []
        for entry in self._watchers:
            conversation, number, offset = entry
            if self._exit is not None or self._output.size > offset:
                conversation.send({"id": number, "size": self._output.size})
            else:
                waiting.append(entry)
        self._watchers = waiting

    def _watch(self, descriptor: int, mask: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, mask)

    def _unwatch(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)


class _Ending:
    """The state of ending a tree: when SIGKILL is due, when to check again, when to give up."""

    def __init__(self, kill_at: float, give_up: float, next_round: float) -> None:
        self.kill_at = kill_at
        self.give_up = give_up
        self.next_round = next_round


class _Record:
    """The record of a command, one line per event."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._torn = False

    def add(self, fact: dict[str, Any]) -> None:
        """Append an event. Raises OSError if it was not written completely; an incomplete line is never continued."""
        text = b"\n" * self._torn + line(fact)
        self._torn = True
        while text:
            text = text[os.write(self._file, text) :]
        self._torn = False

    def sync(self) -> None:
        """Sync what was appended."""
        os.fdatasync(self._file)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
