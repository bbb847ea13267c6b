"""Remove data older than the settings allow: sent messages, handled hook posts, runs of deleted jobs, stored responses,
and history.

Unfinished work is never removed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from farhand.gateway.repeating import PeriodicTask
from farhand.store.history import pruning
from farhand.store.journal.events import last_event
from farhand.store.ports import Store, Tx
from farhand.store.tables import cron, hooks, outbox, responses
from farhand.store.tables.accounts import budgets

log = logging.getLogger(__name__)

EVERY_SECONDS: Final = 3600.0
# How often to check how much the store has grown.
LOOK_SECONDS: Final = 5.0
# The minimum pause after a transaction that removes history; the pause lasts at least as long as the transaction.
PAUSE_SECONDS: Final = 0.01
DAY_MS: Final = 24 * 3600 * 1000
# Rows to remove per transaction, so that other writers can proceed.
AT_ONCE: Final = 500

# Removes a limited number of rows that ended before a moment; returns how many it removed.
Forget = Callable[[Tx, int, int], int]
FORGETTING: Final[tuple[Forget, ...]] = (
    outbox.forget_ended,
    outbox.forget_answered,
    hooks.forget_posts,
    cron.forget_orphans,
    responses.forget,
    budgets.forget,
)


class Retention(PeriodicTask):
    """Remove expired rows once an hour. Use as a context manager."""

    def __init__(self, database: Store, keep_days: Callable[[], float], *, clock: Callable[[], int]) -> None:
        """Create the task; `keep_days` returns the current retention period of ended rows, 0 for unlimited."""
        self._database = database
        self._keep_days = keep_days
        self._clock = clock

    async def run_once(self) -> float:
        await self.forget()
        return EVERY_SECONDS

    async def forget(self) -> int:
        """Remove rows that ended before the retention period; return how many."""
        days = self._keep_days()
        if days <= 0:
            return 0
        before = self._clock() - int(days * DAY_MS)
        dropped = 0
        for forget in FORGETTING:
            while True:
                gone = await self._database.write(partial(_forget, forget, before), durable=False)
                dropped += gone
                if gone < AT_ONCE:
                    break
        return dropped


def _forget(forget: Forget, before: int, store: Tx) -> int:
    return forget(store, before, AT_ONCE)


class HistoryLimits(msgspec.Struct, frozen=True):
    """Limit the age and size of the journal and the call records; 0 means unlimited."""

    days: float = 0.0
    megabytes: int = 0

    @property
    def most_bytes(self) -> int:
        return self.megabytes * 1024 * 1024


class HistoryRetention(PeriodicTask):
    """Keep the journal and the call records within their limits. Use as a context manager.

    Checks once an hour, and whenever the store has grown by a twentieth of its limit. Removes small batches with
    pauses, so that calls can proceed.
    """

    def __init__(
        self,
        database: Store,
        limits: Callable[[], HistoryLimits],
        *,
        clock: Callable[[], int],
        has_undo: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Create the task; `has_undo` returns whether a call can still be undone, in which case it is kept."""
        self._database = database
        self._limits = limits
        self._clock = clock
        self._has_undo = has_undo
        # When the history was last pruned, and its size after that.
        self._pruned_at, self._used = -math.inf, 0

    async def run_once(self) -> float:
        limits = self._limits()
        used = await self._database.read(lambda tx: tx.used_bytes())
        grown = limits.most_bytes and used - self._used > limits.most_bytes / 20
        if grown or time.monotonic() - self._pruned_at > EVERY_SECONDS:
            await self.prune()
            self._pruned_at, self._used = time.monotonic(), await self._database.read(lambda tx: tx.used_bytes())
        return LOOK_SECONDS

    async def prune(self) -> int:
        """Remove what exceeds the limits, oldest first; return how many bytes."""
        limits, now = self._limits(), self._clock()
        if not limits.days and not limits.megabytes:
            return 0
        before = now - int(limits.days * DAY_MS) if limits.days else 0
        to_free = await self._excess(limits) if limits.megabytes else 0
        newest = await self._database.read(last_event)
        freed = 0
        while True:
            began = time.monotonic()
            batch = await self._database.read(
                lambda store: pruning.plan(
                    store,
                    self._database.sealer,
                    now=now,
                    before=before,
                    to_free=to_free - freed,  # noqa: B023 (it is called before the next turn)
                    last=newest - pruning.TAIL,
                    has_undo=self._has_undo,
                )
            )
            if batch is None:
                break
            freed += await self._database.write(partial(pruning.apply, batch=batch, now=now), durable=False)
            await asyncio.sleep(max(PAUSE_SECONDS, time.monotonic() - began))
        if freed:
            await self._database.write(partial(pruning.forget_fanouts, now=now), durable=False)
            log.info("pruned %d bytes of history", freed)
        return freed

    async def _excess(self, limits: HistoryLimits) -> int:
        """Return how many bytes to remove to reach nine tenths of the limit; 0 while within the limit."""
        used = (await self._database.read(pruning.usage)).total
        return used - limits.most_bytes * 9 // 10 if used > limits.most_bytes else 0
