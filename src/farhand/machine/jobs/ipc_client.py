"""The program's side of a conversation with the keeper or one of its workers."""

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
    """Answers matched to what was asked; facts passed on to `learn`; `gone` called when the other side is."""

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
        """Raises FileNotFoundError or ConnectionRefusedError when nobody listens, OSError when we cannot ask."""
        link = cls(learn, gone)
        link._socket = connection = connected(path)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        except BaseException:
            connection.close()
            raise
        return link

    def say(self, data: bytes) -> None:
        """Send without expecting an answer."""
        if self._transport is not None and not self._closing:
            self._transport.write(data)

    def ask(self, act: str, **details: Any) -> asyncio.Future[dict[str, Any]]:
        """Ask the worker: sent at once. Its refusal is raised as the error it names; ConnectionError: it is gone."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._closing:
            answer.set_exception(ConnectionResetError("the worker of this command is gone"))
            return answer
        self._number += 1
        self._asked[self._number] = answer
        self.say(line({"id": self._number, "do": act, **details}))
        return answer

    def close(self) -> None:
        """Hang up without telling `gone`."""
        self._gone = lambda _: None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's transport is always an asyncio.Transport

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
            # We spoke to a worker that had ended; what it said before is still there, answers among it.
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
    """A socket connected to `path`, however long it is. Raises OSError when nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if len(os.fsencode(path)) < 100:
            connection.connect(str(path))
        else:  # a socket's address must be short; a descriptor of its folder is a short name for it
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
    except BaseException:
        connection.close()
        raise
    return connection
