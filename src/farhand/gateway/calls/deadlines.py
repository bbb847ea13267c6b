"""Deadlines of open calls.

Most calls end long before their deadline, so only near deadlines have a timer; the others are checked periodically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from farhand.gateway.calls.open_call import OpenCall

CHECK_SECONDS: Final = 5.0


class Deadlines:
    """Expires calls. Its owner calls `close`."""

    def __init__(self, calls: Mapping[str, OpenCall], expire: Callable[[OpenCall], None]) -> None:
        """`calls`: the open calls by id. `expire` is called with each call that reaches its deadline."""
        self._calls = calls
        self._expire = expire
        self._checking: asyncio.TimerHandle | None = None

    def set(self, opened: OpenCall, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        if seconds < 2 * CHECK_SECONDS:
            opened.deadline = loop.call_later(seconds, self._expire, opened)
            return
        opened.expires = loop.time() + seconds
        if self._checking is None:
            self._checking = loop.call_later(CHECK_SECONDS, self._check)

    def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()

    def _check(self) -> None:
        """Set timers for the calls with a near deadline."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        far = False
        for opened in self._calls.values():
            if opened.expires is None or opened.over or opened.stopping:
                continue
            if opened.expires - now < 2 * CHECK_SECONDS:
                opened.deadline = loop.call_at(opened.expires, self._expire, opened)
                opened.expires = None
            else:
                far = True
        self._checking = loop.call_later(CHECK_SECONDS, self._check) if far else None
