"""What every implementation of the bus promises. A new one adds itself to `BUSES`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from farhand.store.bus.nats import NatsBus, NatsUnavailable
from farhand.store.ports import Bus, NoResponder, ReplyUnknown
from tests.support.fleet_servers import NatsServer, running_nats
from tests.support.local_bus import LocalBus

Pair = AbstractAsyncContextManager[tuple[Bus, Bus]]


@asynccontextmanager
async def local_buses(_: pytest.FixtureRequest) -> AsyncIterator[tuple[Bus, Bus]]:
    bus = LocalBus()
    yield bus, bus


@asynccontextmanager
async def nats_buses(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Bus, Bus]]:
    server: NatsServer = request.getfixturevalue("nats")
    one, other = await NatsBus.open(server.url), await NatsBus.open(server.url)
    try:
        yield one, other
    finally:
        await one.close()
        await other.close()


# Each makes two connections to one bus, as two gateways have them.
BUSES: dict[str, Callable[[pytest.FixtureRequest], Pair]] = {"local": local_buses, "nats": nats_buses}


@pytest.fixture(params=BUSES)
def on_buses(request: pytest.FixtureRequest) -> Callable[[Callable[[Bus, Bus], Coroutine[Any, Any, None]]], None]:
    if request.param == "nats":
        request.getfixturevalue("nats")

    async def run(test: Callable[[Bus, Bus], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(30), BUSES[request.param](request) as buses:
            await test(*buses)

    return lambda test: asyncio.run(run(test))


OnBuses = Callable[[Callable[[Bus, Bus], Coroutine[Any, Any, None]]], None]


async def _settled(*buses: Bus) -> None:
    """Wait until what was served or closed counts: a request of a bus is sent after it."""
    for bus in buses:
        with contextlib.suppress(NoResponder):
            await bus.ask("nothing", b"", 5)


async def echo(body: bytes) -> bytes:
    return b"echo " + body


def test_a_request_is_answered_by_the_subscriber_of_its_subject(on_buses: OnBuses) -> None:
    async def test(one: Bus, other: Bus) -> None:
        one.serve("fh.node.a", echo)
        await _settled(one)
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
        await _settled(one, other)
        await one.ask("s", b"x", 5)
        assert heard == [b"x"]

    on_buses(test)


def test_without_a_subscriber_the_request_is_known_not_to_be_delivered(on_buses: OnBuses) -> None:
    async def test(one: Bus, other: Bus) -> None:
        with pytest.raises(NoResponder, match="nobody"):
            await one.ask("nobody", b"x", 5)
        serving = other.serve("nobody", echo)
        await _settled(other)
        assert await one.ask("nobody", b"x", 5)
        serving.close()
        serving.close()
        await _settled(other)
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
        await _settled(one)
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
        await _settled(one, other)
        one.publish("nobody", b"lost")
        for number in range(10):
            one.publish("events", b"%d" % number)
        await complete.wait()
        assert heard["one"] == heard["other"] == [b"%d" % number for number in range(10)]

    on_buses(test)


def test_after_a_restart_of_the_server_subscriptions_work_again() -> None:
    async def test(server: NatsServer) -> None:
        one, other = await NatsBus.open(server.url), await NatsBus.open(server.url)
        one.serve("s", echo)
        await _settled(one)
        assert await other.ask("s", b"1", 5) == b"echo 1"
        await asyncio.to_thread(server.stop)
        while other.connected or one.connected:
            await asyncio.sleep(0.01)
        with pytest.raises(NoResponder):
            await other.ask("s", b"2", 5)
        await asyncio.to_thread(server.start)
        while True:
            with contextlib.suppress(NoResponder, ReplyUnknown):
                assert await other.ask("s", b"3", 1) == b"echo 3"
                break
            await asyncio.sleep(0.05)
        await one.close()
        await other.close()

    async def main(server: NatsServer) -> None:
        async with asyncio.timeout(60):
            await test(server)

    with running_nats() as server:
        asyncio.run(main(server))


@pytest.mark.parametrize(
    "url", ["nats://u:s3cret@127.0.0.1:1", "nats://u:s3cret@nowhere.invalid", "nats://u:s3cret@[x"]
)
def test_a_bus_that_cannot_be_reached_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(NatsUnavailable) as caught:
        asyncio.run(NatsBus.open(url))  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)
