"""Neither end of a transfer can make the gateway hold more than a window, or believe what was not sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from farhand.gateway.transfers.relay import StartAgain, Stream
from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Failed, NotFound
from farhand.protocol.frames import BinaryFrame, FrameKind, encode_frame, part_end
from farhand.protocol.messages import Message, TransferCredit, TransferDone, TransferOffer, TransferReady
from farhand.protocol.version import MIB, TRANSFER_WINDOW_BYTES

OFFER = TransferOffer("x", False, 1, 64 * MIB, 26, "00")


class Ear:
    def __init__(self) -> None:
        self.reported: list[Message] = []
        self.frames: list[bytes] = []

    def tell(self, message: Message) -> None:
        self.reported.append(message)

    def pass_on(self, frame: bytes) -> None:
        self.frames.append(frame)


def scene(work: Callable[[Stream, Ear, Ear], None]) -> None:
    async def run() -> None:
        sender, receiver = Ear(), Ear()
        stream = Stream(1, sender, receiver, lambda _offset: None)
        stream.heard("send", TransferReady(1, offer=OFFER))
        stream.heard("receive", TransferReady(1, offset=0))
        stream.heard("receive", TransferCredit(1, 0, TRANSFER_WINDOW_BYTES))
        work(stream, sender, receiver)

    asyncio.run(run())


def data(stream: Stream, offset: int, size: int) -> None:
    frame = encode_frame(BinaryFrame(FrameKind.DATA, 1, offset, bytes(size)))
    stream.relay(FrameKind.DATA, offset, frame)


def failed(stream: Stream, kind: type[Exception] = Failed) -> None:
    with pytest.raises(kind):
        stream.done.result()


def test_allowed_frames_are_passed_on() -> None:
    def work(stream: Stream, sender: Ear, receiver: Ear) -> None:
        data(stream, 0, 26)
        stream.relay(FrameKind.END, 26, part_end(1, 26, 0, bytes(32)))
        assert len(receiver.frames) == 2 and not stream.done.done()
        assert sender.reported == [TransferCredit(1, 0, TRANSFER_WINDOW_BYTES)]

    scene(work)


def test_beyond_the_credit() -> None:
    def work(stream: Stream, _sender: Ear, receiver: Ear) -> None:
        for number in range(TRANSFER_WINDOW_BYTES // MIB):
            data(stream, number * MIB, MIB)
        assert not stream.done.done()
        data(stream, TRANSFER_WINDOW_BYTES, 1)
        failed(stream)
        assert len(receiver.frames) == TRANSFER_WINDOW_BYTES // MIB

    scene(work)


def test_out_of_order() -> None:
    def work(stream: Stream, _sender: Ear, receiver: Ear) -> None:
        data(stream, 5, 5)
        failed(stream)
        assert receiver.frames == []

    scene(work)


def test_a_receiver_cannot_ask_for_more_than_a_window() -> None:
    def work(stream: Stream, sender: Ear, _receiver: Ear) -> None:
        stream.heard("receive", TransferCredit(1, 0, 2**50))
        assert sender.reported[-1] == TransferCredit(1, 0, TRANSFER_WINDOW_BYTES)

    scene(work)


def test_a_receiver_cannot_have_what_was_not_sent() -> None:
    scene(lambda stream, _s, _r: (stream.heard("receive", TransferCredit(1, 99, 200)), failed(stream)))  # type: ignore[arg-type,return-value]
    scene(lambda stream, _s, _r: (stream.heard("receive", TransferDone(1)), failed(stream)))  # type: ignore[arg-type,return-value]


def test_a_sender_cannot_say_that_it_arrived() -> None:
    def work(stream: Stream, _sender: Ear, _receiver: Ear) -> None:
        stream.heard("send", TransferDone(1))
        stream.heard("send", TransferCredit(1, 0, 100))
        assert not stream.done.done()

    scene(work)


def test_failures_of_the_ends() -> None:
    def missing(stream: Stream, _sender: Ear, _receiver: Ear) -> None:
        stream.heard("send", TransferDone(1, ToolFailure("not_found", "gone")))
        failed(stream, NotFound)

    def again(stream: Stream, _sender: Ear, _receiver: Ear) -> None:
        stream.heard("receive", TransferDone(1, ToolFailure("failed", "digest"), True))
        failed(stream, StartAgain)

    scene(missing)
    scene(again)


def test_bytes_on_the_node_socket_are_an_error_while_a_separate_connection_is_used() -> None:
    def work(stream: Stream, sender: Ear, receiver: Ear) -> None:
        breaks: list[str] = []
        stream.carried(lambda: breaks.append("broke"))
        stream.heard("receive", TransferCredit(1, 32 * MIB, 40 * MIB))
        assert sender.reported[-1] == TransferCredit(1, 32 * MIB, 40 * MIB)
        data(stream, 0, 1000)
        assert breaks == ["broke"] and receiver.frames == []
        stream.heard("receive", TransferDone(1))
        assert stream.done.done() and stream.done.exception() is None

    scene(work)
