"""The context of a tool call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

log = logging.getLogger(__name__)

Level = Literal["debug", "info", "warning", "error"]
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class CancelToken:
    """Signals that the call was cancelled. Tools poll it, or wait for it."""

    def __init__(self) -> None:
        self._cancelled = False
        # Created on demand: few tools wait.
        self._event: asyncio.Event | None = None
        self.reason = ""

    def is_cancelled(self) -> bool:
        return self._cancelled

    async def cancelled(self) -> None:
        """Wait until the call is cancelled."""
        if not self._cancelled:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()

    def cancel(self, reason: str = "") -> None:
        if not self._cancelled:
            self._cancelled = True
            self.reason = reason
            if self._event is not None:
                self._event.set()


# Sends how far a call is, or a line of its log, to the gateway: progress, total, message and level.
Report = Callable[[float | None, float | None, str, Level | None], None]


def _nowhere(_progress: float | None, _total: float | None, _message: str, _level: Level | None) -> None:
    """Drop a report: this call has no gateway that wants it."""


class ToolContext(msgspec.Struct, frozen=True):
    """One invocation of a tool."""

    request_id: str
    tool_name: str
    session_key: str | None
    cancel: CancelToken
    # The gateway's time limit, if it sent one.
    timeout_ms: int | None = None
    report: Report = _nowhere
    # Values of the secret handles in the arguments; a tool gets arguments in which they are replaced already.
    secrets: Mapping[str, str] = {}
    # A name of the caller of a trial; empty for the owner, and for any other call.
    caller: str = ""

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Report how far the call is: a fraction from 0 to 1, or `done` of `total`.

        Callers see it while the call runs. It may be called from any thread and as often as you like: what comes too
        fast for a reader is left out. Raises ValueError for numbers that are not such a part.
        """
        whole = 1.0 if total is None else total
        if not (math.isfinite(whole) and whole > 0 and 0 <= done <= whole):
            wanted = "from 0 to 1" if total is None else f"from 0 to the total, {total!r}, which must be positive"
            raise ValueError(f"progress must be {wanted}, not {done!r}")
        self.report(float(done), None if total is None else float(total), message, None)

    def log(self, message: str, *args: object, level: Level = "info") -> None:
        """Log a line about this call, formatted like those of `logging`: here and in the record of the call.

        Raises ValueError for an unknown level.
        """
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
        text = message % args if args else message
        log.log(LEVELS[level], "%s %s: %s", self.tool_name, self.request_id, text)
        self.report(None, None, text, level)
