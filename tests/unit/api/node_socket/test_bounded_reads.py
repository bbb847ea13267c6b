"""A connection that receives a file is read in small portions, so that others are served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from farhand.api.node_socket.bounded_reads import IDLE_BYTES, READ_BYTES, BoundedReads

RUN: dict[str, Callable[..., object]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


class Hungry(asyncio.BufferedProtocol):
    """Has room for all there is, as picows has."""

    def __init__(self) -> None:
        self.room = bytearray(8 << 20)
        self.received = bytearray()
        self.this_turn = self.most = 0
        # Notified with every read that a frame of a file has arrived.
        self.reads: BoundedReads | None = None
        self.lost = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.room)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self.room[:nbytes]
        self.this_turn += nbytes
        self.most = max(self.most, self.this_turn)
        if self.reads is not None:
            self.reads.read = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


async def connected() -> tuple[asyncio.Transport, Hungry, socket.socket]:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    transport, protocol = await loop.create_connection(Hungry, sock=ours)
    return transport, protocol, theirs


async def turns(protocol: Hungry) -> None:
    while not protocol.lost.done():
        await asyncio.sleep(0)
        protocol.this_turn = 0


@pytest.mark.parametrize("loop", RUN)
def test_one_sip_a_turn_and_nothing_lost(loop: str) -> None:
    async def run() -> None:
        transport, protocol, theirs = await connected()
        protocol.reads = BoundedReads.begin(transport)
        counting = asyncio.ensure_future(turns(protocol))
        data = bytes(range(256)) * 40_000
        for start in range(0, len(data), 1 << 20):
            await asyncio.get_running_loop().sock_sendall(theirs, data[start : start + (1 << 20)])
        theirs.close()
        assert await protocol.lost is None
        await counting
        assert protocol.received == data
        assert 0 < protocol.most <= 2 * READ_BYTES

    RUN[loop](run())


@pytest.mark.parametrize("loop", RUN)
def test_it_steps_aside_when_no_more_of_a_file_comes(loop: str) -> None:
    async def run() -> None:
        transport, protocol, theirs = await connected()
        reads = BoundedReads.begin(transport)
        assert transport.get_protocol() is reads
        await asyncio.get_running_loop().sock_sendall(theirs, bytes(IDLE_BYTES))
        assert not reads.over
        await asyncio.get_running_loop().sock_sendall(theirs, bytes(IDLE_BYTES))
        while not reads.over:
            await asyncio.sleep(0.001)
        assert transport.get_protocol() is protocol
        await asyncio.get_running_loop().sock_sendall(theirs, b"and so on")
        while len(protocol.received) < 2 * IDLE_BYTES + 9:
            await asyncio.sleep(0.001)
        transport.close()
        theirs.close()

    RUN[loop](run())


@pytest.mark.parametrize("loop", RUN)
def test_a_connection_may_end_between_two_reads(loop: str) -> None:
    async def run() -> None:
        transport, protocol, theirs = await connected()
        BoundedReads.begin(transport)
        await asyncio.get_running_loop().sock_sendall(theirs, bytes(4 * READ_BYTES))
        while not protocol.received:
            await asyncio.sleep(0)
        transport.abort()
        await protocol.lost
        await asyncio.sleep(0.01)
        theirs.close()

    RUN[loop](run())
