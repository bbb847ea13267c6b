"""What every engine of the store shares: one writer thread that commits all queued writes as a group."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from pathlib import Path
from typing import Any, Final, TypeVar

from farhand.store.ports import EngineError, Operation, Seals, StoreError, Tx
from farhand.store.tables.metrics import Durations

T = TypeVar("T")

READERS: Final = 2
# How long a store that is being closed waits for an engine that does not answer.
CLOSE_SECONDS: Final = 10.0

AnyFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]
# An operation, the future of its value, and whether its commit must be durable.
Write = tuple[Operation[Any], AnyFuture, bool]
Result = tuple[AnyFuture, Any, Exception | None]


class GroupCommit:
    """A `Store` without its engine, which implements `_commit`, `_read` and `shut`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: threading.Thread | None = None
        # Writes whose futures are not done.
        self._unfinished = 0
        self._reading = concurrent.futures.ThreadPoolExecutor(READERS, "farhand-read")
        self._watchers: list[asyncio.Event] = []
        # Why no write is accepted; an engine may recover from it.
        self.broken: StoreError | None = None
        # The number of groups that were committed.
        self.commits = 0
        # The times that durable commits took, in microseconds.
        self.commit_times = Durations()

    # -- the engine -------------------------------------------------------------------------------------

    def _commit(self, group: list[Write]) -> list[Result]:
        """Run the operations of a group and commit; a failing one leaves nothing behind."""
        raise NotImplementedError

    def _read(self, query: Operation[T]) -> T:
        """Run a query on a snapshot, in a thread for readers. Raises StoreError."""
        raise NotImplementedError

    def shut(self) -> None:
        """Close a store on which only `query` was used."""
        raise NotImplementedError

    def _hang_up(self) -> None:
        """End what threads wait for from an engine that does not answer. What they do then fails."""

    @property
    def sealer(self) -> Seals:
        """Makes and checks the seals of this store's journal."""
        raise NotImplementedError

    @property
    def files(self) -> dict[str, Path]:
        """The files of the store on this machine, if any: `store` and `log`."""
        return {}

    @property
    def _pause(self) -> float | None:
        """How long the writer waits for the next write before it commits an empty group; None: without a limit."""
        return None

    def _after_group(self) -> None:
        """Called in the writer thread after the results of a group were given back."""

    # -- writing ----------------------------------------------------------------------------------------

    def write(self, operation: Operation[T], *, durable: bool = True) -> asyncio.Future[T]:
        future: asyncio.Future[T] = (self._loop or self._start()).create_future()
        if self.broken is not None:
            future.set_exception(self.broken)
        else:
            self._unfinished += 1
            self._queue.put((operation, future, durable))
        return future

    def query(self, operation: Operation[T]) -> T:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._writer is None:
            _settle(self._commit([(operation, future, True)]))
            if not future.done():  # the engine was lost during the commit, and no writer finds out how it ended
                raise self.broken or EngineError("the store was lost during a commit; try again later")
        else:
            self._queue.put((operation, future, True))
        return future.result()

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._writer = threading.Thread(target=self._write_groups, name="farhand-write", daemon=True)
        self._writer.start()
        return self._loop

    def _write_groups(self) -> None:
        """Commit one group after the other, until None is queued."""
        assert self._loop is not None
        last = False
        while not last:
            group, last = self._next_group()
            results = self._commit(group) if group or self._pause is not None else []
            _settle([result for result in results if isinstance(result[0], concurrent.futures.Future)])
            if results:
                with contextlib.suppress(RuntimeError):  # the loop was closed and the store was not
                    self._loop.call_soon_threadsafe(self._deliver, results)
            self._after_group()

    def _next_group(self) -> tuple[list[Write], bool]:
        """Return everything that is queued, and whether it is the last; nothing after a pause."""
        group: list[Write] = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=self._pause)
            while item is not None:
                group.append(item)
                item = self._queue.get_nowait()
            return group, True
        return group, False

    def _deliver(self, results: list[Result]) -> None:
        self.wake()
        for future, value, error in results:
            if isinstance(future, asyncio.Future):
                self._unfinished -= 1
                if not future.done():
                    future.set_result(value) if error is None else future.set_exception(error)

    # -- reading ----------------------------------------------------------------------------------------

    async def read(self, query: Operation[T]) -> T:
        if self._unfinished and self.broken is None:
            await self.write(_nothing, durable=False)
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, query)

    def watch(self) -> asyncio.Event:
        event = asyncio.Event()
        self._watchers.append(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.remove(event)

    def wake(self) -> None:
        """Set the watchers' events without a commit, for something else that they should look at."""
        for event in self._watchers:
            event.set()

    # -- life cycle -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of writes that are not committed yet."""
        return self._unfinished

    @property
    def healthy(self) -> bool:
        return self.broken is None

    async def close(self) -> None:
        if self._writer is not None:
            if self.broken is None:
                try:
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await self.write(_nothing)
                except StoreError:
                    pass
                except TimeoutError:
                    self._hang_up()
            self._queue.put(None)
            await asyncio.to_thread(self._writer.join)
        reading = asyncio.ensure_future(asyncio.to_thread(self._reading.shutdown, cancel_futures=True))
        if not (await asyncio.wait([reading], timeout=CLOSE_SECONDS))[0]:
            self._hang_up()
        await reading
        self.shut()


def _settle(results: list[Result]) -> None:
    for future, value, error in results:
        future.set_result(value) if error is None else future.set_exception(error)


def _nothing(_: Tx) -> None:
    pass
