"""The server side of the connection between a worker and its clients: lines of JSON over a private socket.

Standard library only: the keeper imports this file.
"""

# ruff: noqa: PTH108

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from farhand.machine.jobs.spawn import RequestRefused

SOCKET = "keeper-2.sock"  # includes the protocol version: a new client never reaches an old keeper
READ_SIZE = 65536
LINE_LIMIT = 16 * 1024 * 1024


def listen(path: str, backlog: int) -> socket.socket:
    """Listen on a socket at `path` that only its owner can open."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)  # commands inherit the original umask
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def line(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def refuse(conversation: socket.socket, kind: str, message: str) -> None:
    """Tell a client that its command was not started."""
    with contextlib.suppress(OSError):
        conversation.sendall(line({"error": {"kind": kind, "message": message}}))


def first_line(conversation: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return a client's first request, and the data after it. Raises RequestRefused if there is none."""
    text = bytearray()
    while b"\n" not in text:
        data = conversation.recv(READ_SIZE)
        if not data:
            raise RequestRefused("failed", "the client disconnected before it sent a request")
        text += data
        if len(text) > LINE_LIMIT:
            raise RequestRefused("invalid_args", f"the request is over {LINE_LIMIT} bytes")
    request, _, rest = bytes(text).partition(b"\n")
    return json.loads(request), rest


class ClientConnection:
    """One client of a worker."""

    def __init__(
        self,
        client: socket.socket,
        ask: Callable[[ClientConnection, Any], None],
        leave: Callable[[ClientConnection], None],
    ) -> None:
        """`ask` is called with each request, `leave` when the client disconnects or sends invalid data."""
        client.setblocking(False)
        self.client = client
        self._ask = ask
        self._leave = leave
        self._text = bytearray()

    def read(self) -> None:
        try:
            data = self.client.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._text) > LINE_LIMIT:
            self._leave(self)
            return
        self.feed(data)

    def feed(self, data: bytes) -> None:
        self._text += data
        *lines, rest = bytes(self._text).split(b"\n")
        self._text = bytearray(rest)
        for line in lines:
            try:
                request = json.loads(line)
            except ValueError:
                self._leave(self)
                return
            self._ask(self, request)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A client that does not read is dropped: the record has everything."""
        text = line(message)
        try:
            sent = self.client.send(text)
        except OSError:
            sent = -1
        if sent != len(text):
            self._leave(self)
