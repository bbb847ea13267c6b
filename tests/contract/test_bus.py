"""What every implementation of the bus promises. A new one adds itself to `BUSES`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from farhand.store.bus.local import LocalBus
from farhand.store.ports import Bus, NoResponder, ReplyUnknown

# Each makes two connections to one bus, as two gateways have them.
BUSES: dict[str, Callable[[], tuple[Bus, Bus]]] = {"local": lambda: (LocalBus(),) * 2}  # type: ignore[return-value,dict-item]


@pytest.fixture(params=BUSES)
def on_buses(request: pytest.FixtureRequest) -> Callable[[Callable[[Bus, Bus], Coroutine[Any, Any, None]]], None]:
    async def run(test: Callable[[Bus, Bus], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(30):
            await test(*BUSES[request.param]())

    return lambda test: asyncio.run(run(test))


OnBuses = Callable[[Callable[[Bus, Bus], Coroutine[Any, Any, None]]], None]


async def echo(body: bytes) -> bytes:
    return b"echo " + body


def test_a_request_is_answered_by_the_subscriber_of_its_subject(on_buses: OnBuses) -> None:
    async def test(one: Bus, other: Bus) -> None:
        one.serve("fh.node.a", echo)
        assert await other.ask("fh.node.a", b"\0 call", 5) == b"echo \0 call"
        assert await asyncio.gather(*(other.ask("fh.node.a", b"%d" % n, 5) for n in range(100))) == [
            b"echo %d" % n for n in range(100)
        ]

    on_buses(test)


def test_one_of_several_subscribers_answers(on_buses: OnBuses) -> None:
    heard: list[bytes] = []

    async def listen(body: bytes) -> bytes:
        heard.append(body)
        return b""

    async def test(one: Bus, other: Bus) -> None:
        one.serve("s", listen)
        other.serve("s", listen)
        await one.ask("s", b"x", 5)
        assert heard == [b"x"]

    on_buses(test)


def test_without_a_subscriber_the_request_is_known_not_to_be_delivered(on_buses: OnBuses) -> None:
    async def test(one: Bus, other: Bus) -> None:
        with pytest.raises(NoResponder, match="nobody"):
            await one.ask("nobody", b"x", 5)
        serving = other.serve("nobody", echo)
        assert await one.ask("nobody", b"x", 5)
        serving.close()
        serving.close()
        with pytest.raises(NoResponder):
            await one.ask("nobody", b"x", 5)

    on_buses(test)


def test_a_reply_that_is_late_or_never_comes_is_unknown(on_buses: OnBuses) -> None:
    async def sleep(_: bytes) -> bytes:
        await asyncio.sleep(30)
        return b""

    async def fail(_: bytes) -> bytes:
        raise ValueError("secret")

    async def test(one: Bus, other: Bus) -> None:
        one.serve("slow", sleep)
        one.serve("fails", fail)
        with pytest.raises(ReplyUnknown):
            await other.ask("slow", b"", 0.05)
        with pytest.raises(ReplyUnknown) as caught:
            await other.ask("fails", b"", 5)
        assert "secret" not in str(caught.value)

    on_buses(test)


def test_a_published_message_reaches_every_subscriber_in_order(on_buses: OnBuses) -> None:
    heard: dict[str, list[bytes]] = {"one": [], "other": []}
    complete = asyncio.Event()

    def listener(name: str) -> Callable[[bytes], Coroutine[Any, Any, bytes]]:
        async def listen(body: bytes) -> bytes:
            heard[name].append(body)
            if all(len(bodies) == 10 for bodies in heard.values()):
                complete.set()
            return b""

        return listen

    async def fail(_: bytes) -> bytes:
        raise ValueError

    async def test(one: Bus, other: Bus) -> None:
        one.serve("events", fail)
        one.serve("events", listener("one"))
        other.serve("events", listener("other"))
        one.publish("nobody", b"lost")
        for number in range(10):
            one.publish("events", b"%d" % number)
        await complete.wait()
        assert heard["one"] == heard["other"] == [b"%d" % number for number in range(10)]

    on_buses(test)
