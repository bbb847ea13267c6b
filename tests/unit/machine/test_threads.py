"""Plain functions in threads of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from farhand.machine.threads import in_own_thread

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def test_the_context_is_carried_over() -> None:
    async def main() -> str:
        place.set("here")
        return await in_own_thread(place.get)

    assert asyncio.run(main()) == "here"


def test_its_parameters_may_have_any_name() -> None:
    def known_by(function: str, loop: str) -> str:
        return function + loop

    assert asyncio.run(in_own_thread(known_by, function="a", loop="b")) == "ab"


def test_exceptions_are_passed_on() -> None:
    def fail(reason: str, *, times: int) -> None:
        raise KeyError(reason * times)

    with pytest.raises(KeyError, match="nono"):
        asyncio.run(in_own_thread(fail, "no", times=2))


@pytest.mark.parametrize("loop_is", ["open", "closed"])
def test_one_whose_waiter_was_cancelled_ends_unheard(loop_is: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, release = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    complaints: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def block() -> None:
        threads.append(threading.current_thread())
        started.set()
        release.wait(20)

    def end() -> None:
        release.set()
        threads[0].join(60)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        waiter = asyncio.ensure_future(in_own_thread(block))
        while not started.is_set():
            await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        if loop_is == "open":
            end()
            await asyncio.sleep(0.01)

    asyncio.run(main())
    end()
    assert not threads[0].is_alive()
    assert complaints == []
