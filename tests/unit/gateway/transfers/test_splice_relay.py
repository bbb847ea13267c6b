"""The connections of a long transfer: how they begin, what is moved, and how they end."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from farhand.gateway.transfers import splice_relay as splice
from farhand.gateway.transfers.splice_relay import GO, SpliceRelay

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not splice.CAN_CARRY, reason="this system has no splice")]


class Ends:
    """The gateway's two connections, and what is at the other side of each."""

    def __init__(self) -> None:
        self.sender, self.from_sender = _connected()
        self.receiver, self.to_receiver = _connected()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.settimeout(10)
    far.setblocking(False)  # as it comes out of the loop
    return near, far


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for each in (made.sender, made.from_sender, made.receiver, made.to_receiver):
        each.close()


async def both(moving: SpliceRelay, ends: Ends) -> None:
    moving.expect("send")(ends.from_sender)
    moving.expect("receive")(ends.to_receiver)
    assert await moving.start()


async def ended(name: str = "farhand-splice") -> None:
    while any(thread.name == name for thread in threading.enumerate()):
        await asyncio.sleep(0.01)


async def test_the_sender_is_notified_and_every_byte_arrives(ends: Ends) -> None:
    breaks: list[str] = []
    moving = SpliceRelay(lambda: breaks.append("broke"))
    await both(moving, ends)
    content = os.urandom(5_000_000)
    threading.Thread(target=ends.sender.sendall, args=(content,), daemon=True).start()

    def receive() -> bytes:
        assert ends.sender.recv(1) == GO
        return _exactly(ends.receiver, len(content))

    assert await asyncio.to_thread(receive) == content
    moving.close()
    await ended()
    assert breaks == []
    assert ends.sender.recv(1) == ends.receiver.recv(1) == b"", "both were hung up"


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := connection.recv(65536)):
        data += more
    return bytes(data)


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_an_end_that_disconnects_is_reported_once(ends: Ends, who: str) -> None:
    broke = asyncio.Event()
    times: list[int] = []

    def reported() -> None:
        times.append(1)
        broke.set()

    moving = SpliceRelay(reported)
    await both(moving, ends)
    assert await asyncio.to_thread(ends.sender.recv, 1) == GO
    getattr(ends, who).close()  # and the sender has nothing to send
    async with asyncio.timeout(60):
        await broke.wait()
    moving.close()
    await ended()
    assert times == [1]


async def test_without_both_it_does_not_start_and_hangs_up_on_the_one(ends: Ends) -> None:
    moving = SpliceRelay(lambda: None)
    moving.expect("send")(ends.from_sender)
    assert moving.expects("send") and not moving.expects("receive")
    assert not await moving.start()
    assert ends.sender.recv(1) == b"", "no word that it is used"


async def test_one_that_was_lost_on_its_way_does_not_start(ends: Ends) -> None:
    moving = SpliceRelay(lambda: None)
    moving.expect("send")(ends.from_sender)
    moving.expect("receive")(None)
    assert not await moving.start()


async def test_one_that_does_not_come_in_time_is_not_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "ARRIVE_SECONDS", 0.01)
    moving = SpliceRelay(lambda: None)
    moving.expect("send")(ends.from_sender)
    late = moving.expect("receive")
    assert not await moving.start()
    late(ends.to_receiver)
    assert ends.receiver.recv(1) == b"", "too late, and hung up"


async def test_tickets_are_hard_to_guess_and_differ() -> None:
    tickets = [ticket for _ in range(50) for ticket in SpliceRelay(lambda: None).tickets.values()]
    assert len(set(tickets)) == 100 and min(map(len, tickets)) >= 32


async def test_closing_twice_is_not_an_error(ends: Ends) -> None:
    moving = SpliceRelay(lambda: None)
    await both(moving, ends)
    moving.close()
    moving.close()
    await ended()
