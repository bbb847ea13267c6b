"""Answers of a worker are received even if it has ended before the next request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from farhand.machine.jobs.jobs import Jobs


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_is_not_lost_to_a_later_word_that_came_too_late(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Input that ends the command was taken, whatever else was asked of its worker meanwhile."""

    async def scenario() -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SHELL": "/bin/sh"}
        async with Jobs(tmp_path / "jobs", environment=environment, linger=0.2) as jobs:
            for _ in range(10):
                job = await jobs.start("read line", workdir="/", stdin=True)
                following = jobs.follow(job)
                writing = asyncio.ensure_future(jobs.write(job, b"\n"))
                await asyncio.sleep(0)
                time.sleep(0.05)  # we hear nothing while the command and its worker end
                assert await anext(following, None) is None
                assert await writing == 1
                assert await jobs.wait(job, 10)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())
