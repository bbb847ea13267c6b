"""A job that came due while the gateway was down does not begin before the machines had time to return."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.integration.agent.test_agent import open_house
from tests.support.harness import NodeProcess, wait_until
from tests.support.model_server import calls, text

# Much shorter than the time that machines have for their return, which is 15 s.
AWAY_SECONDS = 4.0


def test_a_late_job_begins_with_the_machine_that_returns_after_the_gateway(tmp_path: Path) -> None:
    """P3: it began at once and did not find the machine."""
    opened = contextlib.contextmanager(open_house)(tmp_path / "home")
    with opened as house, NodeProcess(house.gateway, tmp_path / "node", "laptop") as laptop:
        (laptop.workspace / "n.txt").write_text("a note\n")
        word = f"late-{uuid.uuid4().hex[:8]}"
        house.script(word, calls(("laptop__Read", {"path": "n.txt"})), text("done"))
        due = datetime.now(UTC) + timedelta(seconds=3)
        schedule = {"kind": "at", "at": due.isoformat()}
        job = {"name": "late", "schedule": schedule, "spec": {"mode": "task", "message": word}}
        added = house.gateway.request("POST", "/v1/cron", job)
        assert added.status in (200, 201), added
        os.kill(laptop.pid, signal.SIGSTOP)
        try:
            assert house.gateway.stop() == 0
            wait_until(lambda: datetime.now(UTC) > due)
            house.gateway.start()
            # Away until the job begins without it, or for this long.
            end = time.monotonic() + AWAY_SECONDS
            wait_until(lambda: house.asked(word) or time.monotonic() > end)
        finally:
            os.kill(laptop.pid, signal.SIGCONT)
        wait_until(lambda: len(house.asked(word)) == 2, what="the second request of the job")
        first, second = house.asked(word)
        results = [one["content"] for one in second.messages if one["role"] == "tool"]
        reported = str(first.messages[0]["content"])
        assert ("- laptop (" in reported, "a note" in results[0]) == (True, True), (results, reported)
