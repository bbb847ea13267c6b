"""The client of a terminal: connects this terminal to one on a node, and reconnects when the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import termios
import threading
import tty
from typing import Any, Final

import picows

from farhand import __version__
from farhand.cli.calls.resumable_streams import read_input
from farhand.cli.client import Client, ClientError, tls_context
from farhand.cli.output import remark
from farhand.cli.remote.start import own_size

DETACH: Final = b"\x1d"  # Ctrl-]
# Output from before that is shown when attaching to a terminal again.
SHOWN_BYTES: Final = 64 * 1024
FIRST_DELAY: Final = 0.2
MAX_DELAY: Final = 5.0
MAX_TYPED: Final = 64 * 1024
MAX_FRAME: Final = 4 * 1024 * 1024
CLOSE_REASONS: Final = {4400: "invalid_args", 4401: "unauthorized", 4403: "not_allowed", 4404: "not_found"}


class TerminalClient:
    """Shows one terminal until it ends or the user detaches."""

    def __init__(self, client: Client, terminal_id: str, *, again: bool) -> None:
        """`again`: the terminal was opened before; its screen is redrawn."""
        self._client = client
        self._terminal_id = terminal_id
        self._offset = -SHOWN_BYTES if again else 0
        self._redraw = again
        self._connection: _Connection | None = None
        self._typed = bytearray()
        self._room = asyncio.Event()
        self._room.set()
        self._over: asyncio.Future[dict[str, Any] | None]

    def run(self) -> dict[str, Any] | None:
        """Return how the command ended, or None after detaching. Raises ClientError."""
        with _raw_mode():
            return asyncio.run(self._run())

    async def _run(self) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        if sys.stdin.isatty():
            loop.add_reader(0, lambda: self._on_input(read_input()))
        else:  # files cannot be polled
            threading.Thread(target=self._pass_on_input, args=(loop,), daemon=True).start()
        with contextlib.suppress(ValueError, OSError):
            loop.add_signal_handler(signal.SIGWINCH, self._resize)
        following = asyncio.ensure_future(self._follow())
        either: set[asyncio.Future[Any]] = {following, self._over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            return self._over.result()
        finally:
            if sys.stdin.isatty():
                loop.remove_reader(0)
            following.cancel()
            if self._connection is not None:
                self._connection.leave()

    async def _follow(self) -> None:
        """Connect, and again whenever the connection is lost."""
        delay, connected = FIRST_DELAY, False
        while not self._over.done():
            try:
                lost = await self._connect()
                connected, delay = True, FIRST_DELAY
            except (OSError, picows.WSError, ClientError) as error:
                if not connected or isinstance(error, _Final):
                    raise _explained(error) from None
                lost = str(error)
            if self._over.done():
                return
            remark(f"\r\nfarhand: {lost}; connecting again, Ctrl-] detaches\r")
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_DELAY)

    async def _connect(self) -> str:
        """Serve one connection; return why it ended. Raises ClientError if trying again does not help."""
        address = self._client.find()
        scheme, _, rest = address.url.partition("://")
        secure = scheme == "https"
        url = f"{'wss' if secure else 'ws'}://{rest}/v1/terminals/{self._terminal_id}/ws?offset={self._offset}"
        headers = {"User-Agent": f"farhand/{__version__}"}
        if address.token:
            headers["Authorization"] = f"Bearer {address.token}"
        wire = logging.getLogger(f"{__name__}.wire")
        wire.setLevel(logging.WARNING)  # its debug output contains the token
        _, listener = await picows.ws_connect(
            lambda: _Connection(self),
            url,
            ssl_context=tls_context(address.certificate) if secure else None,
            extra_headers=headers,
            max_frame_size=MAX_FRAME,
            max_redirects=0,
            logger_name=wire,
        )
        assert isinstance(listener, _Connection)
        code, reason = await listener.closed
        self._connection = None
        if code in CLOSE_REASONS:
            raise _Final(CLOSE_REASONS[code], reason)
        return reason or "the connection was lost"

    # -- what the gateway sends -------------------------------------------------------------------------

    def on_connected(self, connection: _Connection) -> None:
        self._connection = connection

    def on_output(self, data: bytes) -> None:
        self._offset += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    def on_message(self, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "hello":
                self._offset = message["offset"]
                if self._connection is not None:
                    self._connection.greeted = True
                same = (message["cols"], message["rows"]) == own_size()
                if same and self._redraw and sys.stdout.isatty():
                    # Programs redraw their screen only if its size changes.
                    self._say_size(message["cols"], max(1, message["rows"] - 1))
                if not same or self._redraw:
                    self._resize()
                self._redraw = False
                self._send_typed()
            case "node" if not message["online"]:
                remark("\r\nfarhand: the node is disconnected; waiting for it, Ctrl-] detaches\r")
            case "exit" if not self._over.done():
                self._over.set_result(message)

    # -- what the user does -----------------------------------------------------------------------------

    def _pass_on_input(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read standard input in a thread of its own."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while data := read_input():
                asyncio.run_coroutine_threadsafe(self._accept(data), loop).result()
            loop.call_soon_threadsafe(self._on_input, b"")

    async def _accept(self, data: bytes) -> None:
        await self._room.wait()
        self._on_input(data)

    def _on_input(self, data: bytes) -> None:
        if not data:
            if sys.stdin.isatty():
                asyncio.get_running_loop().remove_reader(0)
            data = b"\x04"  # Ctrl-D: the end of the input
        typed, detach, _ = data.partition(DETACH) if sys.stdin.isatty() else (data, b"", b"")
        self._typed += typed
        if len(self._typed) > MAX_TYPED:
            self._room.clear()
        self._send_typed()
        if detach and not self._over.done():
            self._over.set_result(None)

    def _send_typed(self) -> None:
        """Send what was typed; what is typed without a connection waits for the next one."""
        if self._connection is not None and self._connection.greeted:
            for start in range(0, len(self._typed), MAX_TYPED):
                self._connection.send(picows.WSMsgType.BINARY, bytes(self._typed[start : start + MAX_TYPED]))
            self._typed.clear()
            self._room.set()

    def _resize(self) -> None:
        if sys.stdin.isatty() or sys.stdout.isatty():
            self._say_size(*own_size())

    def _say_size(self, cols: int, rows: int) -> None:
        if self._connection is not None:
            text = json.dumps({"type": "resize", "cols": cols, "rows": rows}).encode()
            self._connection.send(picows.WSMsgType.TEXT, text)


class _Final(ClientError):
    """The gateway refused the connection for good."""


class _Connection(picows.WSListener):
    def __init__(self, terminal: TerminalClient) -> None:
        self._terminal = terminal
        self._transport: picows.WSTransport | None = None
        self.greeted = False
        self.closed: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._transport = transport
        self._terminal.on_connected(self)

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        if frame.msg_type == picows.WSMsgType.BINARY:
            self._terminal.on_output(frame.get_payload_as_bytes())
        elif frame.msg_type == picows.WSMsgType.TEXT:
            self._terminal.on_message(json.loads(frame.get_payload_as_bytes()))
        elif frame.msg_type == picows.WSMsgType.PING:
            transport.send_pong(frame.get_payload_as_bytes())
        elif frame.msg_type == picows.WSMsgType.CLOSE:
            payload = frame.get_payload_as_bytes()
            self._close(int.from_bytes(payload[:2]) if payload else 1005, payload[2:].decode(errors="replace"))
            transport.send_close(picows.WSCloseCode.OK)
            transport.disconnect()

    def on_ws_disconnected(self, _transport: picows.WSTransport) -> None:
        self._transport = None
        self._close(1006, "")

    def send(self, kind: picows.WSMsgType, data: bytes) -> None:
        if self._transport is not None:
            self._transport.send(kind, data)

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.send_close(picows.WSCloseCode.OK)
            self._transport.disconnect()

    def _close(self, code: int, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result((code, reason))


def _explained(error: Exception) -> ClientError:
    if isinstance(error, ClientError):
        return error
    if isinstance(error, picows.WSInvalidStatusError) and error.raw_body:
        text = error.raw_body.decode(errors="replace").strip()[:500]
        return ClientError("refused", f"the gateway refused the terminal: {text}")
    return ClientError("connection_lost", f"cannot connect to the terminal: {error or type(error).__name__}")


@contextlib.contextmanager
def _raw_mode() -> Any:
    """Pass every key on, Ctrl-C included, while the block runs."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keys that were typed before are not lost
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
