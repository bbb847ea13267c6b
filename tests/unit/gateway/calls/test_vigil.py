"""Short waits are spent awake, long ones asleep; how short is short is set to never or always, so no clock decides."""

import asyncio

import pytest

from farhand.gateway.calls import vigil
from farhand.gateway.calls.vigil import Vigil

pytestmark = pytest.mark.anyio


@pytest.fixture
def always_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "SHORT_SECONDS", 3600.0)


async def one_wait(waiting: Vigil) -> None:
    waiting.begin()
    await asyncio.sleep(0)
    waiting.over()


async def turns_until_asleep(waiting: Vigil) -> int:
    for turns in range(10):
        if not waiting.awake:
            return turns
        await asyncio.sleep(0)
    raise AssertionError("it stays awake")


async def test_the_first_wait_is_slept(always_short: None) -> None:
    waiting = Vigil(cores=2)
    waiting.begin()
    assert not waiting.awake


async def test_after_a_short_wait_the_next_is_spent_awake_until_it_is_over(always_short: None) -> None:
    waiting = Vigil(cores=2)
    await one_wait(waiting)
    waiting.begin()
    for _ in range(100):
        assert waiting.awake
        await asyncio.sleep(0)
    waiting.over()
    assert await turns_until_asleep(waiting) <= 2


async def test_a_wait_that_begins_while_the_last_one_ends_stays_awake(always_short: None) -> None:
    waiting = Vigil(cores=2)
    await one_wait(waiting)
    waiting.begin()
    waiting.over()
    waiting.begin()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting.awake
    waiting.over()


async def test_after_a_long_wait_the_next_is_slept(always_short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Vigil(cores=2)
    await one_wait(waiting)
    waiting.begin()
    monkeypatch.setattr(vigil, "SHORT_SECONDS", 0.0)
    waiting.over()
    await turns_until_asleep(waiting)
    waiting.begin()
    assert not waiting.awake


async def test_a_wait_without_an_end_is_slept_after_a_while(
    always_short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Vigil(cores=2)
    await one_wait(waiting)
    monkeypatch.setattr(vigil, "SHORT_SECONDS", 0.001)
    waiting.begin()
    while waiting.awake:
        await asyncio.sleep(0.001)


async def test_on_one_core_every_wait_is_slept(always_short: None) -> None:
    waiting = Vigil(cores=1)
    await one_wait(waiting)
    waiting.begin()
    assert not waiting.awake


async def test_an_end_without_a_wait_says_nothing(always_short: None) -> None:
    waiting = Vigil(cores=2)
    waiting.over()
    waiting.begin()
    assert not waiting.awake
