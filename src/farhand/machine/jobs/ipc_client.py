"""The client side of the connection to the keeper or one of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from farhand.machine.jobs.ipc_server import line
from farhand.protocol.errors import ToolError


class WorkerLink(asyncio.Protocol):
    """Matches answers to requests, passes events to `learn`, and calls `gone` when the connection is lost."""

    def __init__(self, learn: Callable[[dict[str, Any]], None], gone: Callable[[WorkerLink], None]) -> None:
        self.greeting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._learn = learn
        self._gone = gone
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._text = b""
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._closing = False

    @classmethod
    async def open(
        cls, path: Path, learn: Callable[[dict[str, Any]], None], gone: Callable[[WorkerLink], None]
    ) -> Self:
        """Connect. Raises FileNotFoundError or ConnectionRefusedError if nothing listens, OSError otherwise."""
        link = cls(learn, gone)
        link._socket = connection = connected(path)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        except BaseException:
            connection.close()
            raise
        return link

    def send(self, data: bytes) -> None:
        """Send data that has no answer."""
        if self._transport is not None and not self._closing:
            self._transport.write(data)

    def ask(self, act: str, **details: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a request now. A refusal raises the error it names; ConnectionError if the worker is gone."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._closing:
            answer.set_exception(ConnectionResetError("the worker of this command is gone"))
            return answer
        self._number += 1
        self._asked[self._number] = answer
        self.send(line({"id": self._number, "do": act, **details}))
        return answer

    def close(self) -> None:
        """Close the connection without calling `gone`."""
        self._gone = lambda _: None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # always an asyncio.Transport here

    def data_received(self, data: bytes) -> None:
        *lines, self._text = (self._text + data).split(b"\n")
        for text in lines:
            message = json.loads(text)
            if "id" in message:
                self._answer(message)
                continue
            if "event" in message:
                self._learn(message)
            if not self.greeting.done():
                self.greeting.set_result(message)

    def _answer(self, message: dict[str, Any]) -> None:
        answer = self._asked.pop(message["id"], None)
        if answer is None or answer.done():
            return
        if error := message.get("error"):
            answer.set_exception(ToolError.of(error["kind"], error["message"]))
        else:
            answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        if exc is not None and self._socket is not None:
            # The worker ended while we were sending; what it sent before can still be read.
            with contextlib.suppress(OSError):
                while data := self._socket.recv(65536):
                    self.data_received(data)
        if not self.greeting.done():
            self.greeting.set_result({})
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the worker of this command is gone"))
        self._asked.clear()
        self._gone(self)


def connected(path: Path) -> socket.socket:
    """Return a socket connected to `path`, which may be long. Raises OSError if nothing listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if len(os.fsencode(path)) < 100:
            connection.connect(str(path))
        else:  # socket addresses are short; a descriptor of the folder gives a short name
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
    except BaseException:
        connection.close()
        raise
    return connection
