"""Delays between connections: the seed's bounds, and really random inside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.sdk import ReconnectBackoff


def test_the_defaults_of_the_guide() -> None:
    backoff = ReconnectBackoff()
    assert (backoff.initial_delay, backoff.max_delay, backoff.backoff_factor, backoff.max_attempts) == (1, 60, 2, 0)


@pytest.mark.parametrize("attempt", range(12))
def test_the_delay_lies_between_the_base_and_a_quarter_more(attempt: int) -> None:
    base = min(2.0**attempt, 60)
    delays = [ReconnectBackoff().delay(attempt) for _ in range(500)]
    assert base <= min(delays)
    assert max(delays) <= base * 1.25
    assert max(delays) - min(delays) > base * 0.2, "jitter covers the whole range, the first attempt's too"


def test_delays_grow_until_the_longest() -> None:
    backoff = ReconnectBackoff(initial_delay=0.5, max_delay=30, backoff_factor=1.5)
    delays = [backoff.delay(attempt) for attempt in range(40)]
    assert delays[0] < delays[1] < delays[2]
    assert max(delays) <= 30 * 1.25
    assert delays[-1] >= 30


def test_two_nodes_do_not_come_back_together() -> None:
    assert len({ReconnectBackoff().delay(3) for _ in range(50)}) > 40
    assert len({ReconnectBackoff().delay(0) for _ in range(50)}) > 40


@given(
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.floats(1, 10),
    st.integers(0, 1_000_000),
)
def test_no_setting_and_no_attempt_leaves_the_bounds(
    initial: float, longest: float, factor: float, attempt: int
) -> None:
    delay = ReconnectBackoff(initial, longest, factor).delay(attempt)
    try:
        base = min(initial * factor**attempt, longest)
    except OverflowError:
        base = longest
    if initial:
        assert base <= delay <= base * 1.25 or delay == pytest.approx(base)
    assert 0 <= delay <= longest * 1.25


@pytest.mark.parametrize(("attempt", "over"), [(0, False), (4, False), (5, True), (6, True)])
def test_giving_up_when_limited(attempt: int, over: bool) -> None:
    assert ReconnectBackoff(max_attempts=5).exhausted(attempt) is over


def test_without_a_limit_it_never_gives_up() -> None:
    assert not ReconnectBackoff().exhausted(1_000_000)


def test_a_whole_number_as_factor_works_at_any_attempt() -> None:
    assert 60 <= ReconnectBackoff(backoff_factor=2).delay(100_000) <= 75
