"""Parse server-sent events from arbitrarily split bytes."""

from __future__ import annotations

import re

from farhand.llm.errors import Unavailable

LONGEST_LINE = 32 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventLines:
    """Takes bytes as they arrive and returns the text after `data:`, line by line.

    Comments, event names and ids are skipped. Lines are decoded whole, so split characters are handled.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return complete lines. Raises Unavailable if a line exceeds the limit."""
        self._rest += data
        # A carriage return at the very end may be half of a line end.
        last = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r", 0, -1))
        if last < 0:
            if len(self._rest) > LONGEST_LINE:
                raise Unavailable(f"the provider sent a line of more than {LONGEST_LINE} bytes")
            return []
        whole, self._rest = self._rest[: last + 1], self._rest[last + 1 :]
        return _data_of(whole)

    def end(self) -> list[bytes]:
        """Return the rest of a stream that ended without a newline."""
        whole, self._rest = self._rest, b""
        return _data_of(whole)


def _data_of(lines: bytes) -> list[bytes]:
    return [
        line[5:].strip() for line in _LINE_END.split(lines) if line.startswith(b"data:") and len(line) > len(b"data:")
    ]
