"""What is over is kept for a while and then forgotten: sent messages, posts that were given on, runs of jobs long gone.

Nothing that is still on its way is ever touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import apsw

from farhand.gateway.repeating import Repeating
from farhand.store import cron, hooks, outbox
from farhand.store.database import Database, StoreError

log = logging.getLogger("farhand.retention")

EVERY_SECONDS: Final = 3600.0
DAY_MS: Final = 24 * 3600 * 1000
AT_ONCE: Final = 500
"""Rows that are dropped in one go: others write meanwhile."""

Forget = Callable[[apsw.Connection, int, int], int]
"""Drops rows that ended before a moment, at most so many; how many that were."""
FORGETTING: Final[tuple[Forget, ...]] = (
    outbox.forget_ended,
    outbox.forget_answered,
    hooks.forget_posts,
    cron.forget_orphans,
)


class Retention(Repeating):
    """Looks once in an hour what may be forgotten. Use as a context manager."""

    def __init__(self, database: Database, keep_days: Callable[[], float], *, clock: Callable[[], int]) -> None:
        """`keep_days`: how long what has ended is kept, as the settings have it now; 0: for ever."""
        self._database = database
        self._keep_days = keep_days
        self._clock = clock

    async def _repeat(self) -> None:
        while True:
            try:
                await self.forget()
            except StoreError as error:
                log.warning("what is over could not be forgotten: %s", error)
            await asyncio.sleep(EVERY_SECONDS)

    async def forget(self) -> int:
        """Drop what ended long enough ago; how many rows that were."""
        days = self._keep_days()
        if days <= 0:
            return 0
        before = self._clock() - int(days * DAY_MS)
        dropped = 0
        for forget in FORGETTING:
            while True:
                gone = await self._database.write(_at_most(forget, before), durable=False)
                dropped += gone
                if gone < AT_ONCE:
                    break
        return dropped


def _at_most(forget: Forget, before: int) -> Callable[[apsw.Connection], int]:
    return lambda store: forget(store, before, AT_ONCE)
