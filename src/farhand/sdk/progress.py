"""Reports of a running call to the gateway, from any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from farhand.protocol.messages import ToolProgress
from farhand.sdk.context import Level

LEAST_SECONDS: Final = 0.1
LONGEST_MESSAGE: Final = 500


class Reporter:
    """Sends the progress and the log of one call; of progress that comes too fast, only some."""

    def __init__(self, request_id: str, send: Callable[[ToolProgress], None]) -> None:
        self._request_id = request_id
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last = 0.0

    def __call__(self, progress: float | None, total: float | None, message: str, level: Level | None) -> None:
        now = time.monotonic()
        if level is None:
            complete = progress is not None and progress >= (1.0 if total is None else total)
            if not complete and now - self._last < LEAST_SECONDS:
                return
            self._last = now
        said = ToolProgress(self._request_id, progress, total, str(message)[:LONGEST_MESSAGE], level or "")
        if threading.get_ident() == self._thread:
            self._send(said)
        else:
            self._loop.call_soon_threadsafe(self._send, said)
