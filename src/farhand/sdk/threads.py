"""Plain functions beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns or raises, from a thread of its own.

    Not from a pool: there, whoever is cancelled and does not listen keeps the next one waiting. Cancelled, it goes on
    unheard, and the end of the program does not wait for it.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:  # a future cannot carry it: whoever waits would wait for ever
            tell(outcome.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            tell(outcome.set_exception, error)
        else:
            tell(outcome.set_result, result)

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(unless_cancelled, settle, value)

    def unless_cancelled(settle: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            settle(value)

    threading.Thread(target=work, name=getattr(function, "__name__", "tool"), daemon=True).start()
    return await outcome
