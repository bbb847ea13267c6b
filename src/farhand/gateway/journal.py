"""The journal as the gateway's services use it: record what happened, and follow what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from farhand.store.journal.events import Event, append_event, events_after, last_event
from farhand.store.ports import Store

EVENT_PAGE = 500
# Between two empty pages for a reader that follows the journal.
PULSE_SECONDS = 15
# Events that happen in a burst are read as one page.
BURST_SECONDS = 0.02
# What must be on disk before the caller continues.
DURABLE = ("token.", "freeze.", "policy.always", "policy.saved", "node.described")


class EventJournal:
    def __init__(self, database: Store, clock: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock

    def note(self, kind: str, subject: str, data: Mapping[str, Any]) -> None:
        self.record(lambda _: None, kind, subject, data)

    def record(
        self, operation: Callable[[Any], object], kind: str, subject: str, data: Mapping[str, Any]
    ) -> asyncio.Future[None]:
        """Run `operation` and append its event in one transaction; the future ends with it."""
        now = self._clock()

        def write(store: Any) -> None:
            operation(store)
            append_event(store, now, kind, subject, data)

        return self._database.write(write, durable=kind.startswith(DURABLE))

    async def last(self) -> int:
        """Return the id of the newest event; 0 when there is none."""
        return await self._database.read(last_event)

    async def events(
        self, last: int, *, follow: bool, closing: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[list[Event]]:
        """Yield the events after `last`, in pages; with `follow`, until `closing`.

        An empty page means that nothing happened for a while, so that a reader can be sent a sign of life.
        """
        position = last
        wakes = self._database.watch()
        try:
            while True:
                wakes.clear()
                page = await self._database.read(partial(events_after, last=position, limit=EVENT_PAGE))
                if page:
                    position = page[-1].id
                    yield page
                elif not follow or closing():
                    return
                else:
                    try:
                        async with asyncio.timeout(PULSE_SECONDS):
                            await wakes.wait()
                        await asyncio.sleep(BURST_SECONDS)
                    except TimeoutError:
                        yield []
        finally:
            self._database.unwatch(wakes)
