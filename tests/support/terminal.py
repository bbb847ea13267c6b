"""A viewer of a terminal: its WebSocket, and the screen that a person would see."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pyte
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.support.harness import GatewayProcess, wait_until


class ScreenWithoutFaults(pyte.Screen):
    """Without the private sequences that pyte fails on."""

    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        if not private:
            super().select_graphic_rendition(*attributes)


class TerminalViewer:
    """Follows a terminal in a thread; use as a context manager."""

    def __init__(
        self, gateway: GatewayProcess, terminal_id: str, offset: int | None = None, *, token: str | None = None
    ) -> None:
        query = "" if offset is None else f"?offset={offset}"
        self._url = f"ws://127.0.0.1:{gateway.port}/v1/terminals/{terminal_id}/ws{query}"
        self._token = token or gateway.token
        self.hello: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.output = b""
        self.closed: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._screen = ScreenWithoutFaults(80, 24)
        self._stream = pyte.ByteStream(self._screen)

    def __enter__(self) -> TerminalViewer:
        headers = {"Authorization": f"Bearer {self._token}"}
        self._socket = connect(self._url, additional_headers=headers, max_size=None, compression=None, legacy=True)
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.hello or self.closed, what="the hello of the terminal")
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                frame = self._socket.recv()
                with self._lock:
                    if isinstance(frame, bytes):
                        self.output += frame
                        self._stream.feed(frame)
                        continue
                    message = json.loads(frame)
                    if message["type"] == "hello":
                        self._screen.resize(message["rows"], message["cols"])
                        self.hello = message
                    elif message["type"] == "resize":
                        self._screen.resize(message["rows"], message["cols"])
                    self.messages.append(message)
        except ConnectionClosed as end:
            self.closed = (end.rcvd.code, end.rcvd.reason) if end.rcvd else (1006, "")
        except (OSError, EOFError):
            self.closed = (1006, "")

    @property
    def offset(self) -> int:
        """How far this viewer has read."""
        return int(self.hello["offset"]) + len(self.output)

    def type(self, text: str | bytes) -> None:
        self._socket.send(text.encode() if isinstance(text, str) else text)

    def resize(self, cols: int, rows: int) -> None:
        with self._lock:
            self._screen.resize(rows, cols)
        self._socket.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    def send_text(self, text: str) -> None:
        self._socket.send(text)

    @property
    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def sees(self, text: str) -> None:
        """Wait until the screen shows a text."""
        try:
            wait_until(lambda: any(text in line for line in self.lines), what=f"{text!r} on the screen")
        except AssertionError:
            raise AssertionError(f"{text!r} is not on the screen:\n" + "\n".join(self.lines)) from None

    def message(self, kind: str) -> dict[str, Any]:
        """The last message of a type, once there is one."""
        found = wait_until(
            lambda: [one for one in self.messages if one["type"] == kind], what=f"a {kind} of the terminal"
        )
        return dict(found[-1])

    def ended(self) -> tuple[int, str]:
        return wait_until(lambda: self.closed, what="the end of the connection")  # type: ignore[no-any-return]
