"""Blocking functions in a thread of their own, for work that must not queue behind the shared thread pool."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns, or raise what it raises, from a new daemon thread.

    If the caller is cancelled, the thread continues and its result is dropped. The end of the program does not wait
    for it.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future cannot carry it
            deliver(outcome.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            deliver(outcome.set_exception, error)
        else:
            deliver(outcome.set_result, result)

    def deliver(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if outcome.done() else settle(value))

    threading.Thread(target=work, name=getattr(function, "__name__", "tool"), daemon=True).start()
    return await outcome
