"""Many nodes connect and leave in a short time: everything that was opened for them is closed."""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
from pathlib import Path

import pytest

from tests.support.harness import GatewayProcess, PlainNode, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(900)]
CYCLES = 3000 if LONG else 60
NODES = 10
MOST_GROWTH = 64 * 1024  # KiB, once everything is warm


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


async def come_and_go(gateway: GatewayProcess, number: int) -> bool:
    """A node joins, is called, and leaves; a client follows the journal for a moment."""
    async with PlainNode.connect(gateway, f"node-{number % NODES}", [f"soak{number % NODES}"]) as node:
        call = asyncio.create_task(gateway.ainvoke(f"soak{number % NODES}.do", {"number": number}))
        await node.answer(await node.receive("tool_request"), {"text": "x" * 1000})
        return bool((await call)["ok"])


def follow(gateway: GatewayProcess) -> None:
    line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    line.request("GET", "/v1/events", headers={"Authorization": f"Bearer {gateway.token}"})
    line.getresponse().read(10)
    line.close()


def test_p10_everything_that_was_opened_is_closed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:
        assert gateway.process is not None
        pid = gateway.process.pid

        def cycles(count: int) -> int:
            async def run() -> int:
                held = 0
                for start in range(0, count, NODES):
                    held += sum(await asyncio.gather(*(come_and_go(gateway, start + one) for one in range(NODES))))
                    await asyncio.to_thread(follow, gateway)
                return held

            return asyncio.run(run())

        cycles(max(NODES, CYCLES // 10))  # until everything is there that stays
        gc.collect()
        before, used = descriptors(pid), memory(pid)
        held = cycles(CYCLES)
        wait_until(lambda: descriptors(pid) <= before + 5, 60, "the descriptors of those who left")
        grown = memory(pid) - used
        print(f"nodes that came, worked and left: {CYCLES} tried, {held} held")
        print(f"descriptors {before} before, {descriptors(pid)} after; memory grew by {grown // 1024} MiB")
        assert held == CYCLES and grown < MOST_GROWTH
