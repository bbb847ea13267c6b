"""A bus within one process, which passes the contract suite of the bus."""

from __future__ import annotations

import asyncio
import itertools
import logging

from farhand.store.ports import Handler, NoResponder, ReplyUnknown

log = logging.getLogger(__name__)


class LocalSubscription:
    def __init__(self, subscribers: dict[int, Handler], number: int) -> None:
        self._subscribers = subscribers
        self._number = number

    def close(self) -> None:
        self._subscribers.pop(self._number, None)


class LocalBus:
    """Delivers messages as tasks of the running event loop."""

    def __init__(self) -> None:
        self._subjects: dict[str, dict[int, Handler]] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        handler = next(iter(self._subjects.get(subject, {}).values()), None)
        if handler is None:
            raise NoResponder(f"no subscriber for {subject!r}: the request was not delivered")
        try:
            return await asyncio.wait_for(handler(body), seconds)
        except TimeoutError:
            raise ReplyUnknown(f"no reply to {subject!r} within {seconds:g} s") from None
        except Exception as error:
            log.exception("the handler of %s failed", subject)
            raise ReplyUnknown(f"the handler of {subject!r} failed: {type(error).__name__}") from None

    def publish(self, subject: str, body: bytes) -> None:
        for handler in list(self._subjects.get(subject, {}).values()):
            task = asyncio.get_running_loop().create_task(self._deliver(subject, handler, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def serve(self, subject: str, handler: Handler) -> LocalSubscription:
        number = next(self._numbers)
        subscribers = self._subjects.setdefault(subject, {})
        subscribers[number] = handler
        return LocalSubscription(subscribers, number)

    @staticmethod
    async def _deliver(subject: str, handler: Handler, body: bytes) -> None:
        try:
            await handler(body)
        except Exception:  # a failing subscriber must not stop the others
            log.exception("the handler of %s failed", subject)
