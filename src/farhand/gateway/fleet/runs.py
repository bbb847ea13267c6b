"""Runs of sessions that another gateway of the fleet works on: follow them, wait for their end, and stop them.

A session is worked on by one gateway at a time. A message that another one gets is stored as a run of that gateway,
which is woken. The other one has a copy of the run: it asks for its events, a page at a time, and settles with its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from farhand.gateway.repeating import BackgroundTasks
from farhand.gateway.sessions.runs import Run, RunEvent, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.protocol.errors import FarhandError, ToolError
from farhand.store.ports import Bus, NoResponder, ReplyUnknown, Store, Subscription, Tx
from farhand.store.tables.fleet import assign_run, other_worker, run_owner
from farhand.store.tables.sessions import OPEN_STATES, RunRecord, find_run

log = logging.getLogger(__name__)

# How long a gateway waits for the next event of a run before it answers, and how long it is waited for.
PAGE_SECONDS: Final = 10.0
ASK_SECONDS: Final = 15.0
STOP_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 0.5
# The bus takes at most a megabyte at once.
PAGE_BYTES: Final = 256 * 1024


class RunWish(msgspec.Struct, frozen=True):
    """A request to the gateway that works on a session or run."""

    # Take up runs that were stored for it.
    wake: bool = False
    # Stop the runs of this session.
    stop: str = ""
    reason: str = ""
    # Tell the events of this run from a position on; of an event that does not fit, from a byte on.
    run_id: str = ""
    position: int = 0
    skip: int = 0


class EventPage(msgspec.Struct, frozen=True):
    """Events of a run, or a part of one that does not fit into a message."""

    # Whether the run is known here.
    known: bool = True
    events: tuple[bytes, ...] = ()
    part: bytes = b""
    part_is_last: bool = False
    # There are no further events after these.
    over: bool = False


_packed: Final = msgspec.msgpack.Encoder().encode
_wish: Final = msgspec.msgpack.Decoder(RunWish).decode
_page: Final = msgspec.msgpack.Decoder(EventPage).decode
_ids: Final = msgspec.msgpack.Decoder(list[str]).decode
_event: Final[Any] = msgspec.json.Decoder(RunEvent).decode


class FleetRuns:
    """Follow runs of other gateways, and let them follow those of this one. Its owner calls `start` and `close`."""

    def __init__(
        self,
        replica: str,
        bus: Bus,
        database: Store,
        sessions: Callable[[], Sessions],
        take_up: Callable[[], Awaitable[Any]],
    ) -> None:
        """`take_up` begins the runs that belong to this gateway and that it does not work on yet."""
        self._replica = replica
        self._bus = bus
        self._database = database
        self._sessions = sessions
        self.take_up = take_up
        self._copies: dict[str, Run] = {}
        self._tasks = BackgroundTasks()
        self._subscription: Subscription | None = None

    def start(self) -> None:
        self._subscription = self._bus.serve(f"fh.runs.{self._replica}", self._asked)

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        self._tasks.cancel()
        for run in self._copies.values():
            run.let_go()

    # -- runs of this gateway ---------------------------------------------------------------------------

    async def _asked(self, body: bytes) -> bytes:
        wish = _wish(body)
        if wish.wake:
            await self.take_up()
            return b""
        if wish.stop:
            return _packed(await self._sessions().stop_here(wish.stop, wish.reason))
        run = self._sessions().known(wish.run_id)
        if run is None:
            return _packed(EventPage(known=False))
        events, over = await run.events_after(wish.position, PAGE_SECONDS)
        return _packed(page_of(events, wish.skip, over=over))

    # -- runs of other gateways -------------------------------------------------------------------------

    def worker(self, tx: Tx, key: str) -> str | None:
        """Return the other gateway that works on the runs of a session, if one does."""
        return other_worker(tx, key, self._replica)

    def assign(self, tx: Tx, run_id: str, replica: str) -> None:
        assign_run(tx, run_id, replica)

    async def wake(self, replica: str) -> None:
        """Have a gateway take up the runs that were stored for it; if this fails, it does so by itself soon."""
        try:
            await self._ask(replica, RunWish(wake=True), ASK_SECONDS)
        except (NoResponder, ReplyUnknown) as error:
            log.debug("failed to wake gateway %s: %s", replica, error)

    async def stop(self, replica: str, key: str, reason: str) -> list[str]:
        """Stop the runs of a session that another gateway works on; return their ids. Raises FarhandError."""
        return _ids(await self._ask(replica, RunWish(stop=key, reason=reason), STOP_SECONDS))

    def copy(self, record: RunRecord) -> Run:
        """Return a run of another gateway as one that can be followed and awaited here."""
        run = self._copies.get(record.id)
        if run is None:
            run = self._copies[record.id] = Run(record)
            self._tasks.start(self._follow(run))
        return run

    async def _ask(self, replica: str, wish: RunWish, seconds: float) -> bytes:
        return await self._bus.ask(f"fh.runs.{replica}", _packed(wish), seconds)

    async def _follow(self, run: Run) -> None:
        """Pass on the events of a run and its end; the gateway that works on it may change meanwhile."""
        owner, position = "", 0
        try:
            while not run.over:
                try:
                    record, now = await self._database.read(lambda tx: (find_run(tx, run.id), run_owner(tx, run.id)))
                    if record is None or record.state not in OPEN_STATES:
                        await self._last_events(run, owner, position)
                        run.settle(RunOutcome.of(record or run.record))
                        return
                    if now != owner:
                        owner, position = now or "", 0
                    if owner == self._replica:
                        await self._pass_on_own(run)
                    elif owner:
                        position = await self._pass_on(run, owner, position)
                    else:
                        await asyncio.sleep(AGAIN_SECONDS)
                except (ToolError, FarhandError) as error:
                    log.debug("failed to follow run %s of another gateway: %s", run.id, error)
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._copies.pop(run.id, None)

    async def _pass_on_own(self, run: Run) -> None:
        """Pass on a run that this gateway has taken over meanwhile."""
        own = self._sessions().known(run.id)
        if own is None:
            await asyncio.sleep(AGAIN_SECONDS)
            return
        async for event in own.follow():
            run.happened(event)
        run.settle(msgspec.structs.replace(await own.reply(), run_id=run.id))

    async def _pass_on(self, run: Run, owner: str, position: int) -> int:
        """Pass on what happened after a position, and return the next one."""
        part = b""
        while True:
            wish = RunWish(run_id=run.id, position=position, skip=len(part))
            page = _page(await self._ask(owner, wish, ASK_SECONDS))
            if not page.known:
                await asyncio.sleep(AGAIN_SECONDS)
                return position
            part += page.part
            events = (part,) if page.part_is_last else page.events
            for event in events:
                run.happened(_event(event))
            if not page.part or page.part_is_last:
                if page.over and not events:
                    await asyncio.sleep(AGAIN_SECONDS / 10)  # its end is being recorded
                return position + len(events)

    async def _last_events(self, run: Run, owner: str, position: int) -> None:
        """Pass on events from just before the end, which the gateway keeps for a while."""
        try:
            while owner and owner != self._replica:
                following = await self._pass_on(run, owner, position)
                if following == position:
                    return
                position = following
        except FarhandError as error:
            log.debug("failed to read the last events of run %s: %s", run.id, error)


def page_of(events: list[RunEvent], skip: int, *, over: bool) -> EventPage:
    """Return as many events as fit into a message, or a part of the first one."""
    chosen: list[bytes] = []
    size = 0
    for event in events:
        encoded = msgspec.json.encode(event)
        if not chosen and (skip or len(encoded) > PAGE_BYTES):
            part = encoded[skip : skip + PAGE_BYTES]
            return EventPage(part=part, part_is_last=skip + PAGE_BYTES >= len(encoded))
        size += len(encoded)
        if size > PAGE_BYTES:
            return EventPage(events=tuple(chosen))
        chosen.append(encoded)
    return EventPage(events=tuple(chosen), over=over)
