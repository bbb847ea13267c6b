"""A clock that is set forward and back at random: no slot runs twice, and each one has a row."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from farhand.store.tables.cron import Every
from tests.unit.gateway.schedule.test_scheduler import MINUTE, T0, House, run

STEPS = 5000 if os.environ.get("FARHAND_SIEGE") == "long" else 300


@pytest.mark.siege
@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_p12_clock_steps_run_nothing_twice_and_lose_nothing(tmp_path: Path, policy: str) -> None:
    async def test(house: House) -> None:
        chance = random.Random(12)
        await house.add("a", Every(MINUTE, T0), missed=policy)
        moment = furthest = T0
        for _ in range(STEPS):
            by = chance.choice([MINUTE, MINUTE, MINUTE, chance.randrange(-30 * MINUTE, 30 * MINUTE)])
            moment = max(T0, moment + by)
            furthest = max(furthest, moment)
            house.move(moment)
            await house.tick()
        house.move(furthest + MINUTE)
        await house.tick()
        due = [T0 + number * MINUTE for number in range(1, (furthest + MINUTE - T0) // MINUTE + 1)]
        reported = {slot for slot, _ in house.slots("a")}
        runs = Counter(slot for _, slot in house.ran)
        single = sum(count == 1 for count in runs.values())
        accounted = sum(slot in reported for slot in due)
        print(f"steps of the clock, {policy}: {STEPS}; slots accounted for: {len(due)} tried, {accounted} held")
        assert accounted == len(due) and single == len(runs) > 0

    run(tmp_path, test, keep_runs=1_000_000)
