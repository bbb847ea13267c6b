"""The node program, in this process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from farhand.node.program import CALLS_AT_ONCE, NodeOptions, run_node
from tests.unit.sdk.wire import RESUMING, FakeGateway, asynchronous


def test_there_is_a_thread_for_every_call_and_none_before_it_is_needed(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("farhand-node") for thread in threading.enumerate())

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway:
            options = NodeOptions(
                gateway_ws_url=gateway.url, node_id="n", token="t", workspace=tmp_path, home=tmp_path / "home"
            )
            shutdown = asyncio.Event()
            node = asyncio.ensure_future(run_node(options, shutdown))
            await gateway.accept(RESUMING)
            assert threads() < CALLS_AT_ONCE, "only those that the start needed"
            all_there = threading.Barrier(CALLS_AT_ONCE + 1)  # as the tools do that are no coroutines, and a question
            await asyncio.gather(*(asyncio.to_thread(all_there.wait, 8) for _ in range(CALLS_AT_ONCE + 1)))
            shutdown.set()
            await node

    run()
    assert threads() == 0
