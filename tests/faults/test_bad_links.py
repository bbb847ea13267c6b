"""A link that drops, delays and goes half-open, again and again; and machines that claim to be the same one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, PlainNode, Plugin, Proxy, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(1800 if LONG else 240)]


class Nemesis(threading.Thread):
    """Disturbs a link at random, by its seed, until it is stopped; then the link works again."""

    def __init__(self, proxy: Proxy, faults: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._proxy = proxy
        self._faults = faults
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        for number in range(self._faults):
            time.sleep(self._random.random() * 0.3)
            kind = ("drop", "delay", "half-open", "refuse")[number % 4]
            self.done[kind] += 1
            if kind == "drop":
                self._proxy.cut()
            elif kind == "delay":
                self._proxy.pace = 200.0  # seconds for a MiB: some ten milliseconds for each frame
                time.sleep(self._random.random() * 0.5)
                self._proxy.pace = 0.0
            elif kind == "half-open":
                self._proxy.freeze()
                time.sleep(self._random.random() * 0.5)
                self._proxy.cut()
                self._proxy.thaw()
            else:
                self._proxy.cut(refuse=True)
                time.sleep(self._random.random() * 0.3)
                self._proxy.admit()


def test_p3_p9_a_bad_link_repeats_nothing_and_loses_no_answer(gateway: GatewayProcess, tmp_path: Path) -> None:
    faults = 200 if LONG else 16
    answers: list[Any] = []
    with Proxy(gateway.port) as proxy, Plugin(gateway, tmp_path, "worker", url=proxy.url) as worker:
        nemesis = Nemesis(proxy, faults, seed=9)
        nemesis.start()
        number = 0
        while nemesis.is_alive():
            number += 1
            answers.append(gateway.invoke("worker.effect", {"text": str(number)}, timeout_ms=30_000))
        wait_until(lambda: gateway.invoke("worker.effect", {"text": "x"}, timeout_ms=5000)["ok"], 60, "a sound link")
        wait_until(lambda: not gateway.get("/v1/calls?state=running")["calls"], 60, "the end of every call")
        starts = Counter(worker.started())
        assert not worker.ended
    ok = [answer["request_id"] for answer in answers if answer["ok"]]
    single = sum(starts[call] == 1 for call in starts)
    kept = sum(starts[call] == 1 and gateway.get(f"/v1/calls/{call}")["state"] == "ok" for call in ok)
    refused = [answer for answer in answers if not answer["ok"] and answer["state"] == "error"]
    print(f"{dict(nemesis.done)}; {len(answers)} calls, {len(ok)} well, {len(refused)} not begun")
    print(f"calls over a bad link that started once: {len(starts)} tried, {single} held")
    print(f"answers that the record bears out: {len(ok)} tried, {kept} held")
    assert single == len(starts) and kept == len(ok) > 0
    assert not any(starts[answer["request_id"]] for answer in refused), "a plain failure did not run"


def test_p9_the_newest_of_several_machines_with_one_id_is_the_node(gateway: GatewayProcess) -> None:
    """Each takes over from the one before; what the older ones still send, including their close, has no effect."""
    rounds = 60 if LONG else 12

    async def fight() -> int:
        held = 0
        async with contextlib.AsyncExitStack() as stack:
            older: list[PlainNode] = []
            for number in range(rounds):
                node = await stack.enter_async_context(PlainNode.connect(gateway, "twin", ["twin"]))
                call = asyncio.create_task(gateway.ainvoke("twin.work", {"n": number}))
                request = await node.receive("tool_request")
                for one in older[-3:]:
                    with contextlib.suppress(Exception):
                        await one.answer(request, "forged")
                        await one.socket.close()
                await node.answer(request, {"n": number})
                answer = await call
                online = await asyncio.to_thread(gateway.get, "/v1/nodes")
                held += answer["result"] == {"n": number} and online["nodes"][0]["online"]
                older.append(node)
        return held

    held = asyncio.run(fight())
    print(f"calls to the newest of several with one id: {rounds} tried, {held} held")
    assert held == rounds
    wait_until(lambda: not gateway.get("/v1/nodes")["nodes"][0]["online"], 15, "the last one is gone")
