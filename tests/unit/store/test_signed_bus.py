"""Others on the server of the bus can neither send messages to a fleet nor answer for it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from farhand.store.bus.signed import FRESH_SECONDS, REORDERED, SignedBus
from farhand.store.ports import ReplyUnknown
from tests.support.local_bus import LocalBus


def test_only_messages_of_the_fleet_are_handled() -> None:
    async def scenario() -> None:
        server = LocalBus()
        one, other, stranger = SignedBus(server, "ours"), SignedBus(server, "ours"), SignedBus(server, "theirs")
        heard: list[bytes] = []
        captured: list[bytes] = []

        async def handle(body: bytes) -> bytes:
            heard.append(body)
            return b"reply to " + body

        async def capture(data: bytes) -> bytes:
            captured.append(data)
            return b""

        one.serve("a", handle)
        one.serve("b", handle)
        server.serve("c", capture)
        assert await other.ask("a", b"question", 5) == b"reply to question"
        other.publish("c", b"elsewhere")
        await asyncio.sleep(0)
        for forged in (b"", b"question", bytes(32) + b"question", captured[0]):
            assert await server.ask("a", forged, 5) == b""
        with pytest.raises(ReplyUnknown):
            await stranger.ask("a", b"question", 5)
        server.serve("d", capture)
        with pytest.raises(ReplyUnknown):
            await one.ask("d", b"question", 5)
        assert heard == [b"question"]

    asyncio.run(scenario())


class Recorder(LocalBus):
    """A bus whose server notes what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[bytes] = []

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        reply = await super().ask(subject, body, seconds)
        self.passed += [body, reply]
        return reply


def test_a_repeated_message_is_dropped() -> None:
    async def scenario() -> None:
        server, clock = Recorder(), [1_000_000.0]
        one, other = (SignedBus(server, "ours", lambda: clock[0]) for _ in range(2))
        heard: list[bytes] = []

        async def handle(body: bytes) -> bytes:
            heard.append(body)
            return b"reply %d" % len(heard)

        serving = one.serve("a", handle)
        for number in range(REORDERED + 2):
            await other.ask("a", b"%d" % number, 5)
        expected = list(heard)
        asked, replies = server.passed[::2], server.passed[1::2]
        for message in (asked[0], asked[1], asked[-2], asked[-1]):
            assert await server.ask("a", message, 5) == b""
        assert heard == expected
        # Also after a restart of the receiver, once the message is old, and with a clock that is far away.
        serving.close()
        one.serve("a", handle)
        for away in (FRESH_SECONDS + 1, -FRESH_SECONDS - 1):
            clock[0] = 1_000_000.0 + away
            assert await server.ask("a", asked[-1], 5) == b""
        assert heard == expected
        # A reply to an earlier request is none to a later one.
        repeated = itertools.repeat(replies[0])

        async def repeat(_: bytes) -> bytes:
            return next(repeated)

        server.serve("b", repeat)
        with pytest.raises(ReplyUnknown):
            await other.ask("b", b"0", 5)

    asyncio.run(scenario())


def test_messages_that_overtake_each_other_are_all_handled_once() -> None:
    async def scenario() -> None:
        server = LocalBus()
        one, other = SignedBus(server, "ours"), SignedBus(server, "ours")
        heard: list[bytes] = []
        waiting: list[bytes] = []

        async def hold(data: bytes) -> bytes:
            waiting.append(data)
            return b""

        async def handle(body: bytes) -> bytes:
            heard.append(body)
            return b""

        holding = server.serve("a", hold)
        for number in range(50):
            other.publish("a", b"%d" % number)
        while len(waiting) < 50:
            await asyncio.sleep(0)
        holding.close()
        one.serve("a", handle)
        for message in [*waiting[::-1], *waiting]:
            await server.ask("a", message, 5)
        assert heard == [b"%d" % number for number in range(50)][::-1]

    asyncio.run(scenario())
