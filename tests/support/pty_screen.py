"""A program on a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence

import pyte

from tests.support.fork_server import start_process

PATIENCE = 60.0


class _Screen(pyte.HistoryScreen):
    """Answers the program's questions about the cursor, as a terminal does."""

    master = -1

    def write_process_input(self, data: str) -> None:
        os.write(self.master, data.encode())


class Terminal:
    """Runs a program on a terminal of its own. Use as a context manager."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], columns: int = 100, rows: int = 40) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen = _Screen(columns, rows, history=2000)
        self._screen.master = self._master
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.process = start_process(
            command,
            {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            own_terminal=True,
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def paste(self, text: str) -> None:
        """Paste as terminals do: marked as one piece."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    @property
    def text(self) -> str:
        """Everything shown so far, scrolled-out lines included."""
        above = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def colour_of(self, words: str) -> str:
        """The colour of the first character of some words on the screen."""
        for number, line in enumerate(self._screen.display):
            if (place := line.find(words)) >= 0:
                return str(self._screen.buffer[number][place].fg)
        raise AssertionError(f"{words!r} is not on the screen:\n{self.text}")

    def read(self, seconds: float = 0.2) -> bool:
        """Take in what the program wrote; return whether there may be more."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the program has ended
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def expect(self, *words: str, seconds: float = PATIENCE) -> None:
        """Wait until all these words are shown."""
        end = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            missing = next(word for word in words if word not in self.text)
            assert time.monotonic() < end, f"{missing!r} did not appear:\n{self.text}"
            if not self.read() and not all(word in self.text for word in words):
                raise AssertionError(f"the program ended without {missing!r}:\n{self.text}")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the program and return its status."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the program did not end:\n{self.text}"
            self.read()
        with contextlib.suppress(OSError):
            while select.select([self._master], [], [], 0)[0] and self.read():
                pass
        return int(self.process.returncode)
