"""Follow what other gateways record: the journal is the one list of everything that happens in the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from farhand.gateway.repeating import set_within
from farhand.protocol.errors import FarhandError
from farhand.store.group_commit import GroupCommit
from farhand.store.journal.events import Event, events_after, last_event
from farhand.store.ports import Bus, Subscription

log = logging.getLogger(__name__)

EVENTS: Final = "fh.events"
POLL_SECONDS: Final = 1.0
# Commits within this time are announced together.
BURST_SECONDS: Final = 0.005
PAGE: Final = 1000

Handler = Callable[[Event], Awaitable[None]]


class JournalFollower:
    """Calls handlers for new events of any gateway, and announces the commits of this one. Use as a context manager.

    Announcements are hints: an event whose announcement was lost is found within a second.
    """

    def __init__(self, bus: Bus, database: GroupCommit, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: by kind of event, or by the first part of the kind and a dot."""
        self._bus = bus
        self._database = database
        self._handlers = handlers
        self._hint = asyncio.Event()
        # The last event whose handler has run, and who waits for later ones.
        self._position = 0
        self._moved = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> JournalFollower:
        self._position = await self._database.read(last_event)
        self._subscription = self._bus.serve(EVENTS, self._hinted)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow()), loop.create_task(self._announce())]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription is not None:
            self._subscription.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def catch_up(self, seconds: float = POLL_SECONDS) -> None:
        """Return once everything is known here that any gateway has recorded by now, or after some time."""
        with contextlib.suppress(TimeoutError, FarhandError):
            async with asyncio.timeout(seconds):
                wanted = await self._database.read(last_event)
                self._hint.set()
                async with self._moved:
                    await self._moved.wait_for(lambda: self._position >= wanted)

    async def _hinted(self, _: bytes) -> bytes:
        self._hint.set()
        return b""

    async def _announce(self) -> None:
        commits = self._database.commits
        wakes = self._database.watch()
        try:
            while True:
                await wakes.wait()
                wakes.clear()
                if self._database.commits != commits:
                    commits = self._database.commits
                    self._bus.publish(EVENTS, b"")
                    await asyncio.sleep(BURST_SECONDS)
        finally:
            self._database.unwatch(wakes)

    async def _follow(self) -> None:
        while True:
            await set_within(self._hint, POLL_SECONDS)
            self._hint.clear()
            try:
                page = await self._database.read(partial(events_after, last=self._position, limit=PAGE))
            except FarhandError as error:
                log.debug("failed to read the journal: %s", error)
                continue
            if page:
                self._hint.set()
                self._database.wake()
                await self._handle(page)
                async with self._moved:
                    self._position = page[-1].id
                    self._moved.notify_all()

    async def _handle(self, page: list[Event]) -> None:
        for event in page:
            handler: Any = self._handlers.get(event.kind) or self._handlers.get(f"{event.kind.partition('.')[0]}.")
            if handler is not None:
                try:
                    await handler(event)
                except Exception:
                    log.exception("failed to follow the event %s", event.kind)
