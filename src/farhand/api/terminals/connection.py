"""The protocol of a terminal's WebSocket.

Binary frames are output of the terminal, and input for it. Text frames are JSON objects with a `type`: the gateway
sends `hello` first, then `resize` when another viewer resized the terminal, `node` when its node was lost or is back,
and `exit` last; a client sends `resize`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import picows

from farhand.api.server.guard import Caller
from farhand.gateway.access.principal import Principal
from farhand.gateway.control.terminals import Terminals, Viewer
from farhand.protocol.errors import ErrorKind, ToolError
from farhand.store.ports import StoreError

log = logging.getLogger(__name__)

CLOSE_NORMAL: Final = 1000
CLOSE_UNACCEPTABLE: Final = 1003
CLOSE_TOO_LARGE: Final = 1009
CLOSE_FAILED: Final = 1011
CLOSE_UNAUTHORIZED: Final = 4401
# What the close codes of refused connections are made of: 4403 for `not_allowed`, as the HTTP status.
CLOSE_CODES: Final = {ErrorKind.NOT_ALLOWED: 4403, ErrorKind.NOT_FOUND: 4404, ErrorKind.INVALID_ARGS: 4400}
MAX_MESSAGE: Final = 1024 * 1024
MAX_TEXT: Final = 4096
# How much input may wait for the node; beyond that, the client's connection is not read.
MAX_INPUT: Final = 1024 * 1024
WRITE_AHEAD: Final = 1024 * 1024
PING_SECONDS: Final = 30.0
SILENT_SECONDS: Final = 100.0
CLOSE_SECONDS: Final = 2.0


class ClientMessage(msgspec.Struct):
    """A text frame of a client; the only type is `resize`."""

    type: str
    cols: int = 0
    rows: int = 0


class TerminalConnection(picows.WSListener):
    """One viewer's connection, from the upgrade until it is closed."""

    def __init__(
        self,
        terminals: Terminals,
        terminal_id: str,
        caller: Caller,
        offset: int | None,
        *,
        address: str,
        access_ended: Callable[[], asyncio.Future[None]],
        ended: Callable[[], None],
    ) -> None:
        """`access_ended` returns a future that is done when the caller's credential ends. `ended` is called last."""
        self._terminals = terminals
        self._terminal_id = terminal_id
        self._principal = Principal(caller.credential)
        self._offset = offset
        self._address = address
        self._access_ended = access_ended
        self._ended = ended
        self._socket: picows.WSTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = time.monotonic()
        self._room = asyncio.Event()
        self._room.set()
        self._parts = bytearray()
        self._parts_kind = picows.WSMsgType.BINARY
        self._input = bytearray()
        self._size: tuple[int, int] | None = None
        self._wanted = asyncio.Event()

    # -- called by picows -------------------------------------------------------------------------------

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._socket = transport
        transport.underlying_transport.set_write_buffer_limits(high=WRITE_AHEAD)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        self._heard_at = time.monotonic()
        kind = frame.msg_type
        if kind == picows.WSMsgType.CLOSE:
            if self._socket is not None:
                self._socket = None
                transport.send(picows.WSMsgType.CLOSE, frame.get_payload_as_bytes()[:2])
            transport.disconnect()
        elif kind == picows.WSMsgType.PING:
            if self._socket is not None and self._room.is_set():
                self._socket.send(picows.WSMsgType.PONG, frame.get_payload_as_bytes())
        elif kind in (picows.WSMsgType.TEXT, picows.WSMsgType.BINARY, picows.WSMsgType.CONTINUATION):
            self._on_part(kind, frame)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def on_ws_disconnected(self, _transport: picows.WSTransport) -> None:
        self._socket = None
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._ended()

    # -- frames -----------------------------------------------------------------------------------------

    def _on_part(self, kind: picows.WSMsgType, frame: picows.WSFrame) -> None:
        if self._socket is None:
            return  # closing
        if kind != picows.WSMsgType.CONTINUATION:
            self._parts.clear()
            self._parts_kind = kind
        most = MAX_TEXT if self._parts_kind == picows.WSMsgType.TEXT else MAX_MESSAGE
        if len(self._parts) + frame.payload_size > most:
            self.close(CLOSE_TOO_LARGE, f"a message has at most {most} bytes")
            return
        self._parts += frame.get_payload_as_bytes()
        if not frame.fin:
            return
        message = bytes(self._parts)
        self._parts.clear()
        if self._parts_kind == picows.WSMsgType.TEXT:
            self._on_text(message)
        else:
            self._input += message
            self._wanted.set()
            if len(self._input) > MAX_INPUT:
                self._socket.underlying_transport.pause_reading()

    def _on_text(self, text: bytes) -> None:
        try:
            message = msgspec.json.decode(text, type=ClientMessage)
        except msgspec.MsgspecError as error:
            self.close(CLOSE_UNACCEPTABLE, f"not a message: {error}")
            return
        if message.type == "resize":
            self._size = (message.cols, message.rows)
            self._wanted.set()
        # Other types may be added later.

    def _say(self, kind: str, **fields: Any) -> None:
        if self._socket is not None:
            self._socket.send(picows.WSMsgType.TEXT, msgspec.json.encode({"type": kind, **fields}))

    def _ping(self) -> None:
        """Send a ping, and drop a client that has been silent for long."""
        if self._socket is None:
            return
        if time.monotonic() - self._heard_at > SILENT_SECONDS:
            self._socket.disconnect(False)
            return
        if self._room.is_set():
            self._socket.send(picows.WSMsgType.PING, b"")
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def close(self, code: int, reason: str) -> None:
        """Send the reason, wait briefly for the client's close, then abort."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, socket.disconnect, False)
        text = reason.encode()[:123].decode(errors="ignore").encode()
        socket.send(picows.WSMsgType.CLOSE, code.to_bytes(2) + text)
        socket.underlying_transport.resume_reading()

    # -- the terminal -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        over = self._access_ended()
        serving = asyncio.ensure_future(self._serve())
        try:
            await asyncio.wait({over, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self.close(CLOSE_UNAUTHORIZED, "the token or session of this connection has ended")
                return
            serving.result()
        except ToolError as error:
            self.close(CLOSE_CODES.get(error.kind, CLOSE_FAILED), error.message)
        except StoreError as error:
            self.close(CLOSE_FAILED, str(error))
        except Exception:
            log.exception("the connection of a terminal failed")
            self.close(CLOSE_FAILED, "the gateway failed; see its log")
        finally:
            for task in (over, serving):
                task.cancel()
            await asyncio.wait({serving})

    async def _serve(self) -> None:
        record = await self._terminals.find(self._terminal_id, self._principal)
        async with self._terminals.viewing(record, self._principal, self._address) as viewer:
            typing = asyncio.ensure_future(self._type(viewer))
            showing = asyncio.ensure_future(self._show(viewer))
            try:
                await asyncio.wait({typing, showing}, return_when=asyncio.FIRST_COMPLETED)
                if typing.done():
                    typing.result()
                await showing
            finally:
                typing.cancel()
                showing.cancel()
                await asyncio.wait({typing, showing})

    async def _show(self, viewer: Viewer) -> None:
        """Send the output until the terminal ends."""
        size: tuple[int, int] | None = None
        pages = viewer.pages(self._offset)
        online = viewer.online
        begun = False
        async with contextlib.aclosing(pages):
            following: asyncio.Future[Any] = asyncio.ensure_future(anext(pages, None))
            try:
                while True:
                    await asyncio.wait({following}, timeout=1.0)
                    if viewer.online is not online:
                        online = not online
                        self._say("node", online=online)
                    if not following.done():
                        continue
                    page = following.result()
                    if page is None:
                        return
                    following = asyncio.ensure_future(anext(pages, None))
                    if not begun:
                        begun, size = True, page.size
                        cols, rows = page.size or (0, 0)
                        self._say("hello", offset=page.offset, cols=cols, rows=rows)
                    elif page.size != size and page.size is not None:
                        size = page.size
                        self._say("resize", cols=size[0], rows=size[1])
                    if page.data and self._socket is not None:
                        self._socket.send(picows.WSMsgType.BINARY, page.data)
                        await self._room.wait()
                    if page.over:
                        self._say("exit", exit_code=page.exit_code, signal=page.signal)
                        self.close(CLOSE_NORMAL, "the command has ended")
            finally:
                following.cancel()
                await asyncio.wait({following})

    async def _type(self, viewer: Viewer) -> None:
        """Pass input and sizes on, in order. What arrives while the node is lost is dropped, as by a cut cable."""
        sending: asyncio.Future[None] | None = None
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._size is not None:
                size, self._size = self._size, None
                await self._sent(viewer.resize(*size))
            if self._input and (sending is None or sending.done()):
                data, self._input = bytes(self._input), bytearray()
                if self._socket is not None:
                    self._socket.underlying_transport.resume_reading()
                # Not waited for here: a program that reads nothing must not keep the terminal from being resized.
                sending = asyncio.ensure_future(self._sent(viewer.type(data)))
                sending.add_done_callback(lambda _: self._wanted.set())

    async def _sent(self, sending: Any) -> None:
        try:
            await sending
        except ToolError as error:
            if error.kind in CLOSE_CODES and error.kind is not ErrorKind.NOT_FOUND:
                self.close(CLOSE_CODES[error.kind], error.message)
            # Otherwise the command has just ended, or its node is lost; both are seen in the output.
