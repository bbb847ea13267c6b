"""Frames between gateways are put together from their parts, within limits."""

from __future__ import annotations

import pytest

from farhand.gateway.fleet import links
from farhand.gateway.fleet.links import Joiner, Packet


def part(data: bytes, offset: int = 0, *, more: bool = True, socket: str = "s") -> Packet:
    return Packet("front", "box", socket, "text", data, more, offset)


def test_parts_are_joined_and_incomplete_frames_dropped() -> None:
    joiner = Joiner()
    assert joiner.whole(part(b"all", more=False)) == b"all"
    assert joiner.whole(part(b"a")) is None
    assert joiner.whole(part(b"x", socket="other")) is None
    assert joiner.whole(part(b"b", 1)) is None
    assert joiner.whole(part(b"c", 2, more=False)) == b"abc"
    # The rest of a frame whose beginning was lost.
    assert joiner.whole(part(b"c", 2, more=False)) is None
    # A frame whose end was lost does not become the beginning of the next one.
    assert joiner.whole(part(b"a")) is None
    assert joiner.whole(part(b"next", more=False)) == b"next"
    assert joiner.whole(part(b"y", 1, more=False, socket="other")) == b"xy"


def test_what_is_never_completed_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_FRAME_BYTES", 10)
    monkeypatch.setattr(links, "MOST_PART_BYTES", 40)
    joiner = Joiner()
    for number in range(100):
        assert joiner.whole(part(b"12345678", socket=str(number))) is None
    assert sum(map(len, joiner._parts.values())) <= 40
    assert joiner.whole(part(b"9", 8, more=False, socket="99")) == b"123456789"
    assert joiner.whole(part(b"12345678", socket="long")) is None
    assert joiner.whole(part(b"9ab", 8, more=False, socket="long")) is None
