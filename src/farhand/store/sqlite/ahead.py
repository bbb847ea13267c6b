"""What goes ahead of the tables: into a log of intents at once, and into the tables a moment later, many together.

A call with effects is promised, on disk, before it leaves; a call that is answered is told of first. Both take a few
bytes in a log (`intents.py`). Most calls are over by the time the tables are written, and go into them once and whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import apsw

from farhand.store.journal.seal import Chain
from farhand.store.sqlite.blocks import QUICK_SECONDS, BlockWriter, Region, unable
from farhand.store.sqlite.intents import LARGEST, IntentLog

if TYPE_CHECKING:
    from farhand.store.sqlite.database import Database

log = logging.getLogger(__name__)

PROMISES_SUFFIX: Final = "-promises"
TIDINGS_SUFFIX: Final = "-tidings"
# In the order in which they are taken up: a call's promise comes before the tidings of its end.
INTENTS_SUFFIXES: Final = (PROMISES_SUFFIX, TIDINGS_SUFFIX)
# An item waits for the tables at least this long, and less than twice as long.
RIPE_SECONDS: Final = 0.025
# No longer than this while somebody watches the journal.
WATCHED_SECONDS: Final = 0.005
MOST: Final = 2048


class Keeper(Protocol):
    """Whose items go ahead, and who brings them into the tables."""

    def promised(self, items: list[Any], error: Exception | None) -> None:
        """The intents of these are on disk, or cannot be put there."""
        ...

    def write(self, store: apsw.Connection, items: list[Any]) -> None:
        """Bring these into the tables; when this raises, what it wrote is taken back."""
        ...

    def kept(self, items: list[Any], error: Exception | None) -> None:
        """The tables have these, or would not take them."""
        ...


class Ahead:
    """Opened by `Database.open_intents`. What `Database.close` closes."""

    def __init__(
        self,
        database: Database,
        keeper: Keeper,
        promises: IntentLog,
        tidings: IntentLog,
        writer: BlockWriter | None,
    ) -> None:
        self._database = database
        self._keeper = keeper
        # What is synced before anybody is told.
        self._promises = promises
        # Writes the promises; without one, the database syncs them.
        self._writer = writer
        # What a killed process must not lose, and a machine without power may.
        self._tidings = tidings
        self._young: list[Any] = []
        self._ripe: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None
        self._promising: list[Any] = []
        self._under_way = False

    def promise(self, intent: bytes, item: Any, *, at_once: bool = False) -> None:
        """Have an intent on disk, for `Keeper.promised` to be told.

        `at_once`: do not wait for others to share the write with.
        """
        if not self._takes(self._promises, intent):
            items = [item]
            self._database.write_then(partial(self._write, items), partial(self._both, items), at_once=at_once)
            return
        self._add(item)
        self._promising.append(item)
        if at_once:
            self._keep_promises(at_once=True)
        elif len(self._promising) == 1:
            # At the end of this turn of the loop: what its sockets bring shares the write.
            self._database.loop.call_soon(self._keep_promises)

    def tell(self, intent: bytes, item: Any) -> bool:
        """Whether the system has the intent when this returns, so that a killed process does not lose it; what is too
        large for the log, or comes when that is of no use, is only there when `Keeper.kept` is told."""
        if self._takes(self._tidings, intent):
            self._add(item)
            return True
        items = [item]
        self._database.write_then(partial(self._write, items), partial(self._kept, items), durable=False)
        return False

    def catch_up(self) -> None:
        """Have all that is here written before whatever the database has to write."""
        self._hand_over(self._ripe + self._young)
        self._ripe, self._young = [], []

    def retire(self) -> None:
        """The tables did not take what they were given: keep the logs for the next start, and promise nothing more."""
        self._promises.retire()
        self._tidings.retire()

    def clear(self) -> None:
        """Forget what the logs hold: the tables have it."""
        self._promises.clear()
        self._tidings.clear()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """After the last write."""
        if self._writer is not None:
            self._writer.close()
        for intents in (self._promises, self._tidings):
            if self._database.broken is None and not intents.retired:
                intents.clear()
            intents.close()

    def _add(self, item: Any) -> None:
        self._young.append(item)
        if self._timer is None:
            seconds = WATCHED_SECONDS if self._database.watched else RIPE_SECONDS
            self._timer = self._database.loop.call_later(seconds, self._ripen)

    def _ripen(self) -> None:
        self._timer = None
        if self._database.watched or len(self._young) > MOST:
            self.catch_up()
        else:
            self._hand_over(self._ripe)
            self._ripe, self._young = self._young, []
            if self._ripe:
                self._timer = self._database.loop.call_later(RIPE_SECONDS, self._ripen)
        self._database.commit()

    def _hand_over(self, items: list[Any]) -> None:
        if items:
            self._database.write_first(partial(self._write, items), partial(self._kept, items))

    def _takes(self, intents: IntentLog, intent: bytes) -> bool:
        """Whether a log has taken an intent; one that is full goes on in its other half, if that is free."""
        if len(intent) > LARGEST or self._database.broken is not None:
            return False
        if intents.add(intent):
            return True
        try:
            left = intents.turn()
        except OSError as error:
            self._database.lose_trust(error)
            return False
        if left is None:
            return False
        self._database.flush_all().add_done_callback(
            lambda done: intents.free(left) if done.exception() is None else None
        )
        return intents.add(intent)

    def _keep_promises(self, *, at_once: bool = False) -> None:
        """Write what waits, unless something is on its way: the log is read to its first gap, so there must be none."""
        if not self._promising or self._under_way:
            return
        items, self._promising = self._promising, []
        regions = self._promises.take()
        written = partial(self._written, items, regions)
        self._under_way = True
        if self._database.broken is not None:
            self._promised(items, None, self._database.broken)
        elif self._writer is None:
            self._sync(items, regions)
        elif at_once and self._writer.seconds < QUICK_SECONDS:
            self._writer.write_now(regions, written)
        elif not self._writer.write(regions, written):
            self._sync(items, regions)

    def _written(self, items: list[Any], regions: list[Region], error: OSError | None) -> None:
        assert self._writer is not None
        self._database.syncs.add(self._writer.took * 1_000_000)
        if error is not None and unable(error):
            log.info("the file system cannot write past its cache (%s): promises are synced instead", error)
            self._writer.close()
            self._writer = None
            self._sync(items, regions)
            return
        if error is not None:
            self._database.lose_trust(error)
        self._promised(items, None, self._database.broken)

    def _sync(self, items: list[Any], regions: list[Region]) -> None:
        settle = partial(self._promised, items)
        try:
            self._promises.write(regions)
        except OSError as error:
            self._database.lose_trust(error)
            settle(None, self._database.broken)
        else:
            self._database.sync(self._promises.file, [(settle, None)], len(items))

    def _promised(self, items: list[Any], _: object, error: Any) -> None:
        self._under_way = False
        try:
            self._keeper.promised(items, error)
        finally:
            self._keep_promises()

    def _write(self, items: list[Any], store: apsw.Connection) -> list[tuple[Any, Exception]]:
        """Those that the tables would not take, each with the reason."""
        chain: Chain = store.chain  # type: ignore[attr-defined]
        told = len(chain.pending)
        try:
            with store:
                self._keeper.write(store, items)
        except apsw.Error as error:
            if not isinstance(error, apsw.ConstraintError | apsw.MismatchError):
                raise
            reason: Exception = error
        except Exception as error:
            reason = error
        else:
            return []
        chain.drop(told)
        if len(items) == 1:
            return [(items[0], reason)]
        return [refused for item in items for refused in self._write([item], store)]

    def _kept(self, items: list[Any], refused: list[tuple[Any, Exception]] | None, error: Any) -> None:
        if refused:
            for item, reason in refused:
                self._keeper.kept([item], reason)
            out = [id(item) for item, _ in refused]
            items = [item for item in items if id(item) not in out]
        self._keeper.kept(items, error)

    def _both(self, items: list[Any], refused: list[tuple[Any, Exception]] | None, error: Any) -> None:
        self._kept(items, refused, error)
        self._keeper.promised(items, refused[0][1] if refused else error)


def open_ahead(database: Database, keeper: Keeper) -> tuple[Ahead, list[bytes]]:
    """With the logs of a store, and what they still hold. Raises OSError."""
    path = database.path
    promises_path = path.with_name(f"{path.name}{PROMISES_SUFFIX}")
    promises, promised = IntentLog.open(promises_path)
    tidings, told = IntentLog.open(path.with_name(f"{path.name}{TIDINGS_SUFFIX}"), mapped=True)
    writer = None
    with contextlib.suppress(OSError):
        writer = BlockWriter(promises_path, promises.memory)
    return Ahead(database, keeper, promises, tidings, writer), promised + told
