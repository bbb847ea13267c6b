"""Tasks that repeat while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Self

from farhand.store.ports import StoreError

log = logging.getLogger(__name__)

# After a failure of the store.
RETRY_SECONDS = 60.0


class PeriodicTask:
    """Calls `run_once` repeatedly, for as long as it is used as a context manager."""

    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def first_delay(self) -> float | None:
        """Return the seconds until the first run; None: it never runs."""
        return 0.0

    async def run_once(self) -> float:
        """Do the work and return the seconds until the next run. May raise StoreError, which is logged."""
        raise NotImplementedError

    async def _repeat(self) -> None:
        delay = self.first_delay()
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                delay = await self.run_once()
            except StoreError as error:
                log.warning("%s failed: %s; trying again in %g s", type(self).__name__, error, RETRY_SECONDS)
                delay = RETRY_SECONDS
