"""Binary frames: sixteen bytes of header, then payload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.errors import ProtocolError
from farhand.protocol.frames import (
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    BinaryFrame,
    FrameKind,
    decode_frame,
    encode_frame,
)

GOOD = bytes.fromhex("fa 01 0000 00000007 0000000000000100".replace(" ", "")) + b"abc"


def test_the_exact_bytes() -> None:
    assert HEADER_BYTES == 16
    assert encode_frame(BinaryFrame(FrameKind.DATA, 7, 256, b"abc")) == GOOD
    assert decode_frame(GOOD) == BinaryFrame(FrameKind.DATA, 7, 256, b"abc")


@given(st.sampled_from(FrameKind), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=100))
def test_every_frame_comes_back_as_it_went(kind: FrameKind, stream: int, offset: int, payload: bytes) -> None:
    frame = BinaryFrame(kind, stream, offset, payload)
    data = encode_frame(frame)
    assert len(data) == HEADER_BYTES + len(payload)
    assert decode_frame(data) == frame
    assert decode_frame(bytearray(data)) == frame
    assert decode_frame(memoryview(data)) == frame
    assert isinstance(decode_frame(memoryview(data)).payload, bytes)
    assert isinstance(decode_frame(data).kind, FrameKind)


def test_the_largest_payload() -> None:
    frame = BinaryFrame(FrameKind.DATA, 1, 0, bytes(MAX_PAYLOAD_BYTES))
    assert decode_frame(encode_frame(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        BinaryFrame(FrameKind.DATA, 1, 0, bytes(MAX_PAYLOAD_BYTES + 1)),
        BinaryFrame(FrameKind.DATA, -1, 0),
        BinaryFrame(FrameKind.DATA, 2**32, 0),
        BinaryFrame(FrameKind.DATA, 0, -1),
        BinaryFrame(FrameKind.DATA, 0, 2**64),
        BinaryFrame(0, 0, 0),
        BinaryFrame(3, 0, 0),
        BinaryFrame(300, 0, 0),
        BinaryFrame(-1, 0, 0),
    ],
    ids=lambda frame: repr(frame)[:60],
)
def test_a_frame_that_could_not_be_read_back_is_not_written(frame: BinaryFrame) -> None:
    with pytest.raises(ValueError):
        encode_frame(frame)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[: HEADER_BYTES - 1],
        b"\x00" + GOOD[1:],
        bytes([MAGIC ^ 1]) + GOOD[1:],
        GOOD[:1] + b"\x00" + GOOD[2:],
        GOOD[:1] + b"\x03" + GOOD[2:],
        GOOD[:2] + b"\x00\x01" + GOOD[4:],
        GOOD[:2] + b"\x80\x00" + GOOD[4:],
        GOOD[:HEADER_BYTES] + bytes(MAX_PAYLOAD_BYTES + 1),
        b'{"type":"ping","timestamp":5}',
    ],
    ids=lambda data: data[:20].hex(),
)
def test_a_frame_that_is_not_ours_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="binary frame"):
        decode_frame(data)


@given(st.binary() | st.binary().map(lambda tail: GOOD[:2] + tail))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        frame = decode_frame(data)
    except ProtocolError as error:
        assert str(error)
    else:
        assert encode_frame(frame) == data
