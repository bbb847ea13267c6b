"""Others on the server of the bus can neither send messages to a fleet nor answer for it."""

from __future__ import annotations

import asyncio

import pytest

from farhand.store.bus.local import LocalBus
from farhand.store.bus.signed import SignedBus
from farhand.store.ports import ReplyUnknown


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
