"""The keeper: a small detached process that owns commands, so that they outlive the program that asked.

One keeper runs per folder. It only waits, and forks a *worker* for each command: forking a process this small
takes about a millisecond and shares its memory, and only a worker of its own makes a tree exact. The worker is
the child subreaper of its one command, so whatever detaches itself below it lands with it, and `waitpid` saying
"no children" proves that nothing is left. A worker depends on nobody: the keeper and the program that asked may
both be killed.

    folder/                    0700
        keeper-1.sock          0600; a client says S and a start request, or H to keep the keeper warm
        keeper.lock, keeper.log
        <job id>/              made aside and renamed into place: that it exists is the "at most once"
            record.jsonl       what happened, one line per fact, written before anybody is told
            output.<offset>    the stream in segments named by the offset of their first byte
            socket             0600; the worker, as long as anything of the command lives

Standard library only, imports kept few: it must start in milliseconds, and 200 workers must fit in a corner of
the memory (no pathlib: it would add a third to the start).
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

from farhand.machine import worker

SOCKET = "keeper-1.sock"  # the number is the version of the conversation: a new client never meets an old keeper


def main(folder: str, linger: float) -> NoReturn:
    """Run the keeper of `folder`; the calling process ends, with status 0, as soon as the keeper can be reached.

    The keeper ends `linger` seconds after the last client that held it has gone. Its workers do not.
    """
    os.chdir(folder)
    lock = os.open("keeper.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os._exit(0)  # there is one already, or about to be
    listener = worker.listen(SOCKET, 512)
    if os.fork():
        os._exit(0)
    os.setsid()
    # Whatever the keeper holds now is shared with every worker; what is never collected is never copied.
    gc.disable()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: their records speak
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        conversation = _keep(listener, linger)
        if conversation is None:
            os._exit(0)
        listener.close()
        os.close(lock)  # a fork shares the lock: the next keeper must be able to take it
        worker.work(conversation)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _keep(listener: socket.socket, linger: float) -> socket.socket | None:
    """Serve until nobody needs a keeper; in a freshly forked worker, answer the conversation it is to serve."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    clients: dict[int, socket.socket] = {}
    while True:
        ready = poll.poll(None if clients else linger * 1000)
        if not ready and not clients:
            return None
        for descriptor, _ in ready:
            if descriptor == listener.fileno():
                with contextlib.suppress(OSError):
                    client, _ = listener.accept()
                    clients[client.fileno()] = client
                    poll.register(client, select.POLLIN)
                continue
            client = clients[descriptor]
            word = b""
            with contextlib.suppress(OSError):
                word = client.recv(1, socket.MSG_DONTWAIT)
            if word == b"H":
                continue
            if word == b"S":
                try:
                    forked = os.fork() == 0
                except OSError as error:
                    forked = False
                    worker.refuse(client, "failed", f"cannot fork a worker for the command: {error.strerror}")
                if forked:
                    for other in clients.values():
                        if other is not client:
                            other.close()
                    return client
            poll.unregister(descriptor)
            del clients[descriptor]
            client.close()
