"""Work beside the callers: tasks in the background, and work that repeats while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from farhand.store.ports import StoreError

log = logging.getLogger(__name__)

# After a failure.
RETRY_SECONDS = 60.0
T = TypeVar("T")


class BackgroundTasks(set[asyncio.Task[Any]]):
    """Tasks that their starter does not await; each is kept until it ends."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    def cancel(self) -> None:
        for task in self:
            task.cancel()

    async def stop(self) -> None:
        """Cancel the tasks and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self, return_exceptions=True)


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until an event is set, but not longer than `seconds`; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class Repeating:
    """Call `work` again and again, from `start` until `stop`, or until `work` returns None."""

    def __init__(
        self,
        work: Callable[[], Awaitable[float | None]],
        name: str,
        *,
        first_delay: float | None = 0.0,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Create the task; `work` returns the seconds until the next call, and is called again if it raises.

        `first_delay` is the seconds until the first call; None: it is never called.
        """
        self._work = work
        self._name = name
        self._first_delay = first_delay
        self._retry = retry_seconds
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._repeat(), name=self._name)

    def wake(self) -> None:
        """Call the work now, or right after the current call."""
        self._woken.set()

    async def stop(self, *, cancel: bool = True) -> None:
        """End the work; without `cancel`, wait until it returns None."""
        if self._task is not None:
            if cancel:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        delay = self._first_delay
        while delay is not None:
            await set_within(self._woken, delay)
            self._woken.clear()
            try:
                delay = await self._work()
            except StoreError as error:
                log.warning("%s failed: %s; trying again in %g s", self._name, error, self._retry)
                delay = self._retry
            except Exception:
                log.exception("%s failed; trying again in %g s", self._name, self._retry)
                delay = self._retry


class PeriodicTask:
    """Calls `run_once` repeatedly, for as long as it is used as a context manager."""

    _repeating: Repeating | None = None

    async def __aenter__(self) -> Self:
        self._repeating = Repeating(self.run_once, type(self).__name__, first_delay=self.first_delay())
        self._repeating.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._repeating is not None:
            await self._repeating.stop()

    def first_delay(self) -> float | None:
        """Return the seconds until the first run; None: it never runs."""
        return 0.0

    async def run_once(self) -> float | None:
        """Do the work and return the seconds until the next run; None: it is the last.

        An exception is logged, and the work repeated.
        """
        raise NotImplementedError
