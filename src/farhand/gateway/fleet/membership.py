"""The life of a gateway in the fleet: it shows that it is alive, and takes over the work of one that is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from farhand.gateway.repeating import PeriodicTask, set_within
from farhand.store.ports import Bus, NoResponder, ReplyUnknown, Store, StoreError, Subscription, Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fleet import beat, owner_of, take_over

log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 2.0
# A gateway that was silent for this time, by the database's clock, is taken for dead.
DEAD_SECONDS: Final = 10.0
ASK_SECONDS: Final = 30.0
POLL_SECONDS: Final = 1.0


class Membership(PeriodicTask):
    """Use as a context manager; the gateway's epoch was taken before."""

    def __init__(
        self,
        replica: str,
        database: Store,
        *,
        clock: Callable[[], int],
        superseded: Callable[[], bool],
        taken_over: Callable[[], Awaitable[None]],
        handed_on: Callable[[], Awaitable[Any]],
        settings: Callable[[], str],
        restart: Callable[[], None],
    ) -> None:
        """`superseded` tells whether others have taken over the work of this gateway; `restart` then restarts it.
        `taken_over` takes up work that this gateway has taken over, `handed_on` runs that others have stored for it.
        `settings` returns a digest of the settings, which others compare with theirs."""
        self._replica = replica
        self._database = database
        self._clock = clock
        self._superseded = superseded
        self._taken_over = taken_over
        self._handed_on = handed_on
        self._settings = settings
        self._restart = restart
        self._steady_since = self._last = time.monotonic()

    async def run_once(self) -> float | None:
        try:
            # Only a gateway that was alive itself all the time can tell that another one was not.
            patient = time.monotonic() - self._steady_since > DEAD_SECONDS
            lost = await self._database.write(
                partial(self._beat, patient=patient, settings=self._settings()), durable=False
            )
            now = time.monotonic()
            self._steady_since = self._steady_since if now - self._last < 2 * BEAT_SECONDS else now
            self._last = now
            if lost:
                log.warning("took over the work of %s, which was silent for %g s", ", ".join(lost), DEAD_SECONDS)
                await self._taken_over()
            await self._handed_on()
        except StoreError as error:
            if self._superseded():
                log.error("%s", error)
                self._restart()
                return None
        except Exception:
            log.exception("failed to take over the work of another gateway")
        return BEAT_SECONDS

    def _beat(self, tx: Tx, patient: bool, settings: str) -> list[str]:
        beat(tx, self._replica, settings)
        return take_over(tx, self._replica, DEAD_SECONDS, self._clock()) if patient else []


class FleetCalls:
    """Calls that other gateways own. Its owner calls `start` and `close`."""

    def __init__(
        self,
        replica: str,
        bus: Bus,
        database: Store,
        *,
        sync: Callable[[], Awaitable[None]],
        cancel: Callable[[str, str], Awaitable[CallRecord | None]],
    ) -> None:
        """`sync` looks where the nodes are connected; `cancel` cancels a call of this gateway."""
        self._replica = replica
        self._bus = bus
        self._database = database
        self._sync = sync
        self._cancel = cancel
        self._waiters: dict[str, asyncio.Event] = {}
        self._subscription: Subscription | None = None

    def start(self) -> None:
        self._subscription = self._bus.serve(f"fh.cancel.{self._replica}", self._asked_to_cancel)

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    async def moved(self, seconds: float) -> None:
        await self._sync()
        await asyncio.sleep(seconds)

    async def cancel(self, call_id: str, reason: str) -> None:
        owner = await self._database.read(partial(owner_of, call_id=call_id))
        if owner is not None and owner != self._replica:
            with contextlib.suppress(NoResponder, ReplyUnknown):
                await self._bus.ask(f"fh.cancel.{owner}", f"{call_id}\n{reason}".encode(), ASK_SECONDS)

    async def _asked_to_cancel(self, body: bytes) -> bytes:
        call_id, _, reason = body.decode().partition("\n")
        await self._cancel(call_id, reason)
        return b""

    async def end_of(self, call_id: str) -> CallRecord | None:
        ended = self._waiters.setdefault(call_id, asyncio.Event())
        try:
            while True:
                ended.clear()
                record = await self._database.read(lambda tx: calls.find(tx, call_id))
                if record is None or record.ended_at is not None:
                    return record
                await set_within(ended, POLL_SECONDS)
        finally:
            self._waiters.pop(call_id, None)

    def ended(self, call_id: str) -> None:
        """Take note of the end of a call of any gateway."""
        event = self._waiters.get(call_id)
        if event is not None:
            event.set()
