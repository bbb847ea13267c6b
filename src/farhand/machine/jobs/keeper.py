"""The keeper: a small detached process that owns commands, so that they outlive the program that started them.

One keeper runs per folder. It waits for requests, and has a forked *worker* ready for the next command: forking such a
small process takes about a millisecond and shares its memory. A worker is the child subreaper of its one command, so
detached descendants are reparented to it, and `waitpid` reporting "no children" proves that nothing is left. A worker
depends on no other process: the keeper and the program that started the command may both be killed.

    folder/                    0700
            keeper-2.sock          0600; a client sends S and a start request, or H to hold the keeper
        keeper-2.lock, keeper.log
            <job id>/              created under another name and renamed: its existence is the "at most once"
                    record.jsonl       one line per event, written before any client is notified
                    output.<offset>    the output in segments named by the offset of their first byte
                    socket             0600; the worker, as long as any process of the command lives

Standard library only, with few imports: it must start in milliseconds, and 200 workers must take little memory (no
pathlib: it would add a third to the start).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import traceback
from typing import NoReturn

from farhand.machine.jobs import worker
from farhand.machine.jobs.ipc_server import SOCKET, listen, refuse


def main(folder: str, linger: float) -> NoReturn:
    """Run the keeper of `folder`; the calling process exits with status 0 as soon as the keeper can be reached.

    The keeper ends `linger` seconds after the last client that held it disconnects. Its workers do not.
    """
    os.chdir(folder)
    lock = os.open("keeper-2.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os._exit(0)  # another keeper runs, or is starting
    listener = listen(SOCKET, 512)
    if os.fork():
        os._exit(0)
    os.setsid()
    # Memory of the keeper is shared with every worker; without garbage collection it is never copied.
    gc.disable()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        Keeper(listener, lock, linger).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


class Keeper:
    """Accepts clients and passes each start request to a worker, one of which is always forked in advance."""

    def __init__(self, listener: socket.socket, lock: int, linger: float) -> None:
        self._listener = listener
        self._lock = lock
        self._linger = linger
        self._patience = max(linger, 5.0)  # the program that started the keeper is about to connect
        self._clients: dict[int, socket.socket] = {}
        self._spare: socket.socket | None = None
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> None:
        """Serve until no client has needed a keeper for `linger` seconds."""
        while True:
            ready = self._poll.poll(self._quiet_ms())
            if not ready and self._spare is None:
                with contextlib.suppress(OSError):  # out of processes: retried when needed
                    self._fork_spare()
            elif not ready:
                return
            for descriptor, _ in ready:
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._handle(self._clients[descriptor])

    def _quiet_ms(self) -> float | None:
        """Return the poll timeout. The next worker is forked when idle, not beside the start of a command."""
        if self._spare is None:
            return 5
        return None if self._clients else min(self._patience * 1000, worker.LONGEST_WAIT_MS)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._clients[client.fileno()] = client
            self._poll.register(client, select.POLLIN)
            self._patience = self._linger

    def _handle(self, client: socket.socket) -> None:
        word = b""
        with contextlib.suppress(OSError):
            word = client.recv(1, socket.MSG_DONTWAIT)
        if word == b"H":
            return
        self._poll.unregister(client)
        del self._clients[client.fileno()]
        if word == b"S":
            self._pass_to_worker(client)
        client.close()

    def _pass_to_worker(self, client: socket.socket) -> None:
        while True:
            try:
                spare = self._fork_spare()
            except OSError as error:
                refuse(client, "failed", f"cannot fork a worker for the command: {error.strerror}")
                return
            self._spare = None
            try:
                socket.send_fds(spare, [b"S"], [client.fileno()])
                return
            except OSError:
                continue  # the spare worker was killed
            finally:
                spare.close()

    def _fork_spare(self) -> socket.socket:
        if self._spare is None:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                ours.close()
                for inherited in (self._listener, *self._clients.values()):
                    inherited.close()
                os.close(self._lock)  # a fork shares the lock, which the next keeper must be able to take
                _wait_for_work(theirs)
            theirs.close()
            self._spare = ours
        return self._spare


def _wait_for_work(channel: socket.socket) -> NoReturn:
    """Run a worker that is ready in advance, so that a command waits neither for the fork nor for page faults."""
    try:
        worker.prepare()
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        channel.close()
        if descriptors:  # otherwise the keeper is gone
            os.set_inheritable(descriptors[0], False)
            worker.work(socket.socket(fileno=descriptors[0]))
    except BaseException:
        traceback.print_exc()
    os._exit(1)
