"""The flow of a transfer: credit, frame sizes, and the order in which a receiver accepts bytes."""

from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from farhand.protocol.errors import Failed
from farhand.protocol.transfer import (
    CREDIT_BYTES,
    CREDIT_SECONDS,
    CreditPacer,
    DigestMismatch,
    ReceivePosition,
    SendWindow,
)
from farhand.protocol.version import TRANSFER_FRAME_BYTES as FRAME


def window(written: int, until: int) -> SendWindow:
    made = SendWindow()
    made.credit(written, until)
    return made


def test_the_first_credit_says_where_the_stream_begins() -> None:
    made = SendWindow()
    assert made.begin is None and made.frame_bytes(0, 0, FRAME) == 0
    made.credit(100, 200)
    made.credit(150, 300)
    assert (made.begin, made.written, made.until) == (100, 150, 300)


def test_an_old_credit_takes_nothing_back() -> None:
    made = window(500, 5000)
    made.credit(100, 1000)
    assert (made.written, made.until) == (500, 5000)


@pytest.mark.parametrize(
    ("written", "until", "offset", "left", "expected"),
    [
        (0, 10 * FRAME, 0, 3 * FRAME, FRAME),
        (0, 10 * FRAME, 0, 100, 100),
        (0, 10 * FRAME, 10, 3 * FRAME, FRAME - 10),
        (0, FRAME - 1, 0, 3 * FRAME, FRAME - 1),
        (0, FRAME + 5, FRAME, 3 * FRAME, 0),
        (FRAME, FRAME + 5, FRAME, 3 * FRAME, 5),
        (FRAME, FRAME, FRAME, 3 * FRAME, 0),
    ],
    ids=["whole", "the rest", "up to a boundary", "small window", "wait", "small window again", "no credit"],
)
def test_frames_are_whole_unless_the_window_is_smaller(
    written: int, until: int, offset: int, left: int, expected: int
) -> None:
    assert window(written, until).frame_bytes(offset, 0, left) == expected


@given(st.integers(0, 5 * FRAME), st.integers(0, 5 * FRAME), st.integers(0, 5 * FRAME), st.integers(1, 5 * FRAME))
def test_a_frame_stays_within_credit_part_and_boundary(written: int, until: int, offset: int, left: int) -> None:
    size = window(written, until).frame_bytes(offset, 0, left)
    assert 0 <= size <= min(left, FRAME - offset % FRAME)
    assert size == 0 or offset + size <= until


def test_credit_is_due_at_once_then_by_bytes_or_by_time() -> None:
    pacer = CreditPacer()
    assert pacer.due(0, 1000.0)
    assert not pacer.due(CREDIT_BYTES - 1, 1000.0)
    assert pacer.due(CREDIT_BYTES, 1000.0)
    assert not pacer.due(CREDIT_BYTES + 1, 1000.0 + CREDIT_SECONDS / 2)
    assert pacer.due(CREDIT_BYTES + 1, 1000.0 + 2 * CREDIT_SECONDS)


def test_a_receiver_accepts_bytes_in_order_and_parts_by_digest() -> None:
    position = ReceivePosition(5)
    with pytest.raises(Failed, match="offset 1; expected offset 0"):
        position.advance(1, 2)
    with pytest.raises(Failed, match="at most 5 bytes"):
        position.advance(0, 6)
    position.advance(0, 5)
    position.digest.update(b"hello")
    assert position.end_part(0, blake3(b"hello").digest())
    position.begin_part(1, 3)
    assert not position.end_part(0, blake3(b"hello").digest()), "repeated after a lost link"
    with pytest.raises(Failed, match="part 1 still lacks 3 bytes"):
        position.end_part(1, b"")
    with pytest.raises(Failed, match="ended part 2"):
        position.end_part(2, b"")
    position.advance(5, 3)
    position.digest.update(b"xyz")
    with pytest.raises(DigestMismatch):
        position.end_part(1, blake3(b"abc").digest())
