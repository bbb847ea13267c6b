"""The keyboard while no prompt reads it: keys are kept for the next prompt, and not echoed into the output."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator
from typing import Any

_LOCAL_FLAGS = 3


class Keyboard:
    """Switches the terminal of standard input. Ctrl-C stays a signal. Use as a context manager."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._before: list[Any] = []

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._file)
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self) -> None:
        """Keep what is typed for the next prompt: it is neither shown nor read as lines."""
        quiet = [*self._before]
        quiet[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
        self._set(quiet)

    def release(self) -> None:
        """Read lines as usual."""
        self._set(self._before)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        self.release()
        try:
            yield
        finally:
            self.hold()

    def _set(self, attributes: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._file, termios.TCSANOW, attributes)
