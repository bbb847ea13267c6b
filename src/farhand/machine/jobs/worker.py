"""A worker of the keeper: one command, from its start until the last of its processes has ended.

A worker and its clients exchange lines of JSON. Requests carry an `id`, which the answer repeats:

    write {data: base64, wait?}   close   signal {number}   end {graceMs}   processes   mark   watch {offset, stream?}
    received {offset, stream?}   resize {cols, rows}

`started`, `resized` and `exited` are sent unsolicited, the first and the last as in the record. `watch` is answered
when there is output beyond the offset, or the command has ended; `write` with `wait`, when the command has read most
of what was written. `received` says how much of the output of an attached command its reader has.
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
from farhand.machine.jobs.ipc_server import ClientConnection, first_line, line, listen, refuse
from farhand.machine.jobs.output import ERRORS, OUTPUT, OutputWriter
from farhand.machine.jobs.pipes import InputChannel, OutputChannel
from farhand.machine.jobs.spawn import RequestRefused, open_workdir, spawn
from farhand.machine.jobs.terminal import END_OF_INPUT, set_size, spawn_on_terminal

SANDBOX_SECONDS = 5.0  # how long to wait after the exit for the first process of a sandbox, which ends by itself
DRAIN_SECONDS = 0.1  # how long to wait for more output after the exit while another process holds the pipe
SYNC_SECONDS = 0.02  # how long the start of a foreground command may stay unsynced
KILL_SECONDS = 5.0  # after this time, processes that survived SIGKILL are reported
LONGEST_WAIT_MS = 3_600_000.0  # poll does not accept infinity


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
    """One command, from its start until the last of its processes has ended."""

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
        self._sandbox_until = 0.0
        self._conversations: dict[int, ClientConnection] = {}
        self._watchers: list[tuple[ClientConnection, int, str, int]] = []
        self._enders: list[tuple[ClientConnection, int]] = []
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._poll = select.poll()
        self._terminal: list[int] | None = request.get("terminal")  # columns and rows
        self._writers: dict[str, OutputWriter] = {}
        self._channels: dict[str, OutputChannel] = {}
        self._stdin = InputChannel(-1)

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
                for stream in (OUTPUT, ERRORS) if request.get("attached") else (OUTPUT,):
                    self._writers[stream] = OutputWriter(self._folder, request["outputLimit"], stream)
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
        attached = bool(request.get("attached"))
        if self._terminal is not None:
            spawned = spawn_on_terminal(request["argv"], environment, workdir, self._folder, *self._terminal)
        else:
            spawned = spawn(request["argv"], environment, workdir, self._folder, request["stdin"], attached)
        self._leader, self._slave = spawned.pid, spawned.terminal
        self._stdin = InputChannel(spawned.stdin, None if self._terminal is None else END_OF_INPUT)
        # Less than what is kept, so that nothing is dropped which the reader has not received.
        window = request["outputLimit"] // 2 if attached else None
        for name, writer in self._writers.items():
            pipe = spawned.output if name == OUTPUT else spawned.errors
            self._channels[name] = OutputChannel(pipe, writer, window)
        self._deadline = self._started + request["timeoutMs"] / 1000 if request["timeoutMs"] else None
        self._started_fact = {
            "event": "started",
            "pid": self._leader,
            "ticks": tree.start_ticks(self._leader),
            "startedAt": self._started_at,
            **({} if self._terminal is None else {"terminal": self._terminal}),
        }
        # From here on a full disk is no reason to refuse. A background command is synced at once; a foreground one gets
        # a moment to end first, and is then synced once instead of twice.
        self._sync_at: float | None = self._started + SYNC_SECONDS
        with contextlib.suppress(OSError):
            self._record.add(self._started_fact)
            if request["background"]:
                self._sync()
        self._watch(wake, select.POLLIN, lambda _: self._on_wake(wake))
        for channel in self._channels.values():
            self._follow(channel)
        if self._stdin.pipe >= 0:
            self._watch(self._stdin.pipe, 0, self._on_stdin)  # POLLERR is reported in any case

    def serve(self, conversation: socket.socket, rest: bytes) -> None:
        """Serve until the command has ended, its end is recorded, and none of its processes lives."""
        first = self._join(conversation)
        first.send(self._started_fact)
        first.feed(rest)
        while not self._advance():
            for descriptor, mask in self._poll.poll(self._patience()):
                if handler := self._handlers.get(descriptor):
                    handler(mask)
        # The pipes may still contain output of the last process.
        while self._pump():
            pass
        self._notify_watchers()
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
            self._continue_ending(self._ending, now)
        if self._leader_status is not None and self._exit is None and self._ending is None:
            self._pump()
            if not self._open_channels() or now >= self._drain_until:
                if now < self._sandbox_until and self._sandbox_is_ending():
                    self._drain_until = now + 0.01
                else:
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

    def _sandbox_is_ending(self) -> bool:
        """Whether the first process of a sandbox is about to exit.

        bubblewrap reports the exit of its command before that process ends, and with it everything in the sandbox;
        none of them is left running.
        """
        if self._alone:
            return False
        return any(process.name == "bwrap" for process in tree.living(tree.descendants(os.getpid())))

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
            "size": self._size(OUTPUT),
            "ended": sorted(self._ended.items()),
            "left": left,
        }
        self._change_stdin(self._stdin.close)
        self._ended = {}
        self._write_exit(self._exit, now)
        for conversation in list(self._conversations.values()):
            conversation.send(self._exit)
        self._notify_watchers()

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
                self._ended.update(tree.signal_tree(os.getpid(), signal.SIGTERM))
                self._ending.next_round = self._ending.kill_at
        elif now + grace < self._ending.kill_at:
            self._ending.kill_at = self._ending.next_round = now + grace

    def _continue_ending(self, ending: _Ending, now: float) -> None:
        self._reap()
        if not self._alone and now >= ending.next_round:
            ending.next_round = now + 0.005
            self._survivors = tree.signal_tree(os.getpid(), signal.SIGKILL)
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
                if self._slave >= 0:
                    os.close(self._slave)
                    self._slave = -1
                self._drain_until = time.monotonic() + DRAIN_SECONDS
                self._sandbox_until = time.monotonic() + SANDBOX_SECONDS

    def _size(self, stream: str) -> int:
        if stream not in self._writers:
            raise RequestRefused("invalid_args", f"this command has no separate stream {stream!r}")
        return self._writers[stream].size

    def _open_channels(self) -> list[OutputChannel]:
        return [channel for channel in self._channels.values() if channel.open]

    def _follow(self, channel: OutputChannel) -> None:
        """Wait for output of a channel, unless its reader has to catch up first."""
        if channel.open and not channel.paused and channel.pipe not in self._handlers:
            self._watch(channel.pipe, select.POLLIN, lambda _: self._pump_one(channel))

    def _pump(self) -> bool:
        """Store the command's output; return False if there was none."""
        moved = [self._pump_one(channel) for channel in self._open_channels()]
        return any(moved)

    def _pump_one(self, channel: OutputChannel) -> bool:
        pipe = channel.pipe
        if self._leader_status is not None:
            channel.lift_window()
        moved = channel.pump()
        if not channel.open or channel.paused:
            # A closed pipe must not be polled, and a paused one would be reported at once when its writers are gone.
            if pipe in self._handlers:
                self._unwatch(pipe)
        else:
            self._follow(channel)
        if moved:
            self._notify_watchers()
        return moved

    # requests

    def _handle_request(self, conversation: ClientConnection, request: dict[str, Any]) -> None:
        """Handle a client's request, or answer with an error."""
        number = request.get("id", 0) if isinstance(request, dict) else 0
        try:
            answer = self._answer_to(conversation, number, request)
        except RequestRefused as refusal:
            answer = {"error": {"kind": refusal.kind, "message": str(refusal)}}
        except OSError as error:
            answer = {"error": {"kind": "failed", "message": error.strerror or str(error)}}
        except (LookupError, TypeError, ValueError) as error:  # an invalid request must not stop the worker
            answer = {"error": {"kind": "invalid_args", "message": f"not a request: {error!r}"}}
        if answer is not None:
            conversation.send({"id": number, **answer})

    def _answer_to(self, conversation: ClientConnection, number: int, request: dict[str, Any]) -> dict[str, Any] | None:
        match request["do"]:
            case "write":
                return self._write(conversation, number, request)
            case "close":
                self._change_stdin(self._stdin.end)
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
                stream = request.get("stream", OUTPUT)
                if self._exit is None and self._size(stream) <= request["offset"]:
                    self._watchers.append((conversation, number, stream, request["offset"]))
                    return None
                return {"size": self._size(stream)}
            case "received":
                channel = self._channels[request.get("stream", OUTPUT)]
                channel.received(request["offset"])
                self._follow(channel)
                return {}
            case "resize":
                self._resize(request["cols"], request["rows"])
                return {}
            case unknown:
                raise RequestRefused("invalid_args", f"the keeper does not know {unknown!r}")

    def _write(self, conversation: ClientConnection, number: int, request: dict[str, Any]) -> dict[str, Any] | None:
        if self._leader_status is not None:
            raise RequestRefused("failed", "the command has already exited")
        data = binascii.a2b_base64(request["data"])
        if not request.get("wait"):
            self._change_stdin(lambda: self._stdin.write(data))
            return {"written": len(data)}
        answer = {"id": number, "written": len(data)}
        self._change_stdin(lambda: self._stdin.write(data, lambda: conversation.send(answer)))
        return None

    def _resize(self, cols: int, rows: int) -> None:
        if self._terminal is None:
            raise RequestRefused("failed", "this command has no terminal")
        channel = self._channels[OUTPUT]
        if not channel.open:
            raise RequestRefused("failed", "the command has already exited")
        set_size(channel.pipe, cols, rows)
        self._terminal[:] = [cols, rows]
        for conversation in list(self._conversations.values()):
            conversation.send({"event": "resized", "terminal": self._terminal})

    def _on_stdin(self, mask: int) -> None:
        self._change_stdin(self._stdin.close if mask & (select.POLLERR | select.POLLHUP) else self._stdin.flush)

    def _change_stdin(self, act: Callable[[], None]) -> None:
        """Act on the input, then poll it as its state requires."""
        pipe = self._stdin.pipe
        try:
            act()
        finally:
            if pipe >= 0 and self._stdin.pipe < 0:
                self._unwatch(pipe)
            elif pipe >= 0:
                self._poll.modify(pipe, select.POLLOUT if self._stdin.blocked else 0)

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
        conversation = ClientConnection(client, self._handle_request, self._leave)
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

    def _notify_watchers(self) -> None:
        waiting = []
        for entry in self._watchers:
            conversation, number, stream, offset = entry
            if self._exit is not None or self._size(stream) > offset:
                conversation.send({"id": number, "size": self._size(stream)})
            else:
                waiting.append(entry)
        self._watchers = waiting

    def _watch(self, descriptor: int, mask: int, handler: Callable[[int], object]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, mask)

    def _unwatch(self, descriptor: int) -> None:
        """Stop polling a descriptor, which may just have been closed."""
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
