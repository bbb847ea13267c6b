"""When open calls run out of time.

Nearly all calls end long before that, so only a near deadline has a timer; the others are looked at now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from farhand.gateway.calls.open_call import OpenCall

LOOK_SECONDS: Final = 5.0


class Deadlines:
    """Of some calls, by their ids. Whoever made it calls `close`."""

    def __init__(self, calls: Mapping[str, OpenCall], expire: Callable[[OpenCall], None]) -> None:
        """`expire` is told of a call whose time is up, unless its timer was cancelled or replaced before."""
        self._calls = calls
        self._expire = expire
        self._looking: asyncio.TimerHandle | None = None

    def set(self, opened: OpenCall, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if seconds < 2 * LOOK_SECONDS:
            opened.deadline = loop.call_later(seconds, self._expire, opened)
            return
        opened.expires = loop.time() + seconds
        if self._looking is None:
            self._looking = loop.call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def _look(self) -> None:
        """Set timers for those calls whose deadlines have come near."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        far = False
        for opened in self._calls.values():
            if opened.expires is None or opened.over or opened.stopping:
                continue
            if opened.expires - now < 2 * LOOK_SECONDS:
                opened.deadline = loop.call_at(opened.expires, self._expire, opened)
                opened.expires = None
            else:
                far = True
        self._looking = loop.call_later(LOOK_SECONDS, self._look) if far else None
