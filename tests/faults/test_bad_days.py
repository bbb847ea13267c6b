"""Links that corrupt, disks that fill, descriptors that run out, storms of reconnections, and hostile peers.

Each says how often it tried and how often the promise held; one that was not tried enough fails as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.harness import GatewayProcess, PlainNode, Plugin, Proxy, hello_frame, wait_until

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(1800 if LONG else 300)]


def report(what: str, tried: int, held: int) -> None:
    print(f"{what}: {tried} tried, {held} held")
    assert tried == held and tried > 0, f"{what}: {tried} tried, only {held} held"


class Corrupting(Proxy):
    """Changes a byte here and there while it is active."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.rate = 0.0
        self.changed = 0
        self._random = random.Random(9)

    def spoiled(self, data: bytes) -> bytes:
        if self._random.random() >= self.rate:
            return data
        self.changed += 1
        place = self._random.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << self._random.randrange(8))]) + data[place + 1 :]


def test_p3_p9_a_link_that_corrupts_repeats_nothing_and_does_not_affect_others(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    rounds = 400 if LONG else 30
    with Corrupting(gateway.port) as proxy, Plugin(gateway, tmp_path, "sound") as sound:
        with Plugin(gateway, tmp_path, "noisy", url=proxy.url) as noisy:
            proxy.rate = 0.3
            good, states = 0, Counter[str]()
            for number in range(rounds):
                answer = gateway.invoke("noisy.effect", {"text": str(number)}, timeout_ms=600)
                states["ok" if answer["ok"] else answer["error"]["kind"]] += 1
                good += gateway.invoke("sound.echo", {"text": str(number)})["ok"] is True
            proxy.rate = 0.0
            proxy.cut()
            # By itself: a refusal that a garbled hello or token brought about is not the end of a node.
            wait_until(
                lambda: gateway.invoke("noisy.effect", {"text": "end"}, timeout_ms=5000)["ok"], 90, "the node's return"
            )
            assert not noisy.ended
            starts = Counter(noisy.started())
        assert sound.process is not None and sound.process.poll() is None
    print(f"corrupted {proxy.changed} pieces; {dict(states)}")
    assert proxy.changed > 0
    report("calls of the sound node beside a corrupting link", rounds, good)
    report("starts of calls over it that were single", len(starts), sum(count == 1 for count in starts.values()))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a file system takes root and the program mount")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_p1_a_full_disk_acknowledges_nothing_it_cannot_keep(small_disk: Path, tmp_path: Path) -> None:
    gateway = GatewayProcess(small_disk / "home", env={"FARHAND_BACKUP_EVERY_SECONDS": "0"})
    gateway.log = tmp_path / "gateway.log"
    gateway.start()
    try:
        with Plugin(gateway, tmp_path, "worker") as worker:
            said: list[str] = []
            refused = 0

            def one() -> None:
                nonlocal refused
                answer = gateway.request("POST", "/v1/tools/invoke", {"tool": "worker.effect", "args": {"text": "x"}})
                if answer.status == 200 and answer.json()["ok"]:
                    said.append(answer.json()["request_id"])
                else:
                    refused += 1

            for _ in range(20):
                one()
            with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(b"\0" * 4096):
                    pass
            for _ in range(30):
                one()
            full = refused
            started_when_full = len(worker.started())
            (small_disk / "filler").unlink()
            wait_until(lambda: gateway.invoke("worker.effect", {"text": "y"})["ok"], 20, "a call that is kept again")
            gateway.kill()
            gateway.start()
            kept = sum(gateway.get(f"/v1/calls/{call_id}")["state"] == "ok" for call_id in said)
        assert full > 0, "the disk was full"
        report("acknowledged calls around a full disk", len(said), kept)
        print(f"{full} refused while it was full; {started_when_full} started in all")
        assert started_when_full <= len(said) + full
    finally:
        gateway.stop()


def test_p9_p10_exhausted_descriptors_are_released(tmp_path: Path) -> None:
    attempts = 300
    with GatewayProcess(tmp_path / "home") as gateway:
        assert gateway.process is not None
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (96, 96))
        before = descriptors(gateway)
        taken = []
        for _ in range(attempts):
            with contextlib.suppress(OSError):
                taken.append(socket.create_connection(("127.0.0.1", gateway.port), timeout=5))
        wait_until(lambda: descriptors(gateway) >= 90, 15, "no descriptor left")
        for one in taken:
            one.close()
        wait_until(lambda: answers(gateway), 30, "an answer after the crowd")
        held = sum(answers(gateway) for _ in range(50))
        wait_until(lambda: descriptors(gateway) <= before + 8, 15, "the descriptors given back")
        assert gateway.log.stat().st_size < 5_000_000, "the log is not flooded"
    report("requests after descriptors ran out", 50, held)


def descriptors(gateway: GatewayProcess) -> int:
    assert gateway.process is not None
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))


def answers(gateway: GatewayProcess) -> bool:
    try:
        return gateway.request("GET", "/v1/health", timeout=5).status == 200
    except OSError:
        return False


def test_p9_mass_reconnections_leave_every_node_connected_once(gateway: GatewayProcess) -> None:
    nodes, waves = (200, 10) if LONG else (60, 3)

    async def joined(stack: contextlib.AsyncExitStack, number: int) -> PlainNode:
        """As a node does: one that was slow to say who it is, and had to make room for others, comes again."""
        while True:
            with contextlib.suppress(websockets.InvalidHandshake, websockets.ConnectionClosed, OSError):
                return await stack.enter_async_context(PlainNode.connect(gateway, f"n{number}", [f"n{number}"]))

    async def storm() -> int:
        back = 0
        for _ in range(waves):
            async with contextlib.AsyncExitStack() as stack:
                sockets = await asyncio.gather(*(joined(stack, number) for number in range(nodes)))
                listed = await asyncio.to_thread(gateway.get, "/v1/nodes")
                back += sum(node["online"] for node in listed["nodes"])
                for node in sockets:
                    node.socket.transport.abort()
        return back

    back = asyncio.run(storm())
    report("nodes back after storms", nodes * waves, back)
    wait_until(lambda: not any(node["online"] for node in gateway.get("/v1/nodes")["nodes"]), 15, "all gone again")


DEEP = "[" * 100_000
HOSTILE: list[Any] = [
    "",
    "null",
    DEEP,
    '{"type":"tool_response"' + ',"a":1' * 1000 + "}",
    b"\x00" * 1000,
    '{"type":"tool_response","request_id":"%CALL%","ok":true,"result":"forged"}',
    '{"type":"tool_response","request_id":"%CALL%","ok":false,"error":{"kind":"failed","message":"forged"}}',
    '{"type":"node_hello","protocol_version":1,"node":{"id":"good","name":"g","node_type":"t","version":"1"},"capabilities":["good"]}',
    '{"type":"tool_response","request_id":12,"ok":"yes"}',
    '{"type":"ping","timestamp":1e999}',
    '{"type":"pong","timestamp":' + "9" * 5000 + "}",
    '{"type":"\\ud800"}',
    json.dumps({"type": "tools_update", "tools": [{"name": "x" * 100_000}] * 10}),
    "x" * 2_000_000,
]


def test_p9_hostile_peers_answer_no_other_calls_and_do_not_block_others(gateway: GatewayProcess) -> None:
    """Beside a node that works, one says what it likes, before and after its hello, with the id of the other's call."""

    tokens = {
        name: gateway.request("POST", "/v1/tokens", {"node_id": name}).json()["token"] for name in ("good", "bad")
    }

    async def attack() -> tuple[int, int]:
        tried = held = 0
        async with PlainNode.connect(gateway, "good", ["good"], token=tokens["good"]) as good:
            for greeted in (False, True):
                for number, frame in enumerate(HOSTILE):
                    call = asyncio.create_task(gateway.ainvoke("good.work", {"n": number}))
                    request = await good.receive("tool_request")
                    said = frame
                    if isinstance(frame, str):
                        said = frame.replace("%CALL%", request["request_id"])
                    with contextlib.suppress(websockets.WebSocketException, OSError, TimeoutError):
                        async with PlainNode.connect(gateway, "bad", token=tokens["bad"], hello=False) as bad:
                            if greeted:
                                await bad.send(hello_frame("bad", ["bad"]))
                                await bad.receive("gateway_welcome")
                            for _ in range(5):
                                await bad.send(said)
                            await bad.send({"type": "ping", "timestamp": 1})
                            await bad.receive("pong", seconds=2 if greeted else 0.2)
                    await good.answer(request, {"n": number})
                    answer = await call
                    tried += 1
                    held += answer["ok"] is True and answer["result"] == {"n": number}
        return tried, held

    tried, held = asyncio.run(attack())
    report("calls beside a hostile peer", tried, held)
    assert gateway.get("/v1/health")["status"] == "ok"
    assert resident(gateway) < 512 * 1024 * 1024


def test_p9_p10_readers_that_do_not_read_cost_little_and_do_not_block_others(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    readers = []
    with Plugin(gateway, tmp_path, "worker"):
        before = resident(gateway)
        for _ in range(20):
            one = socket.create_connection(("127.0.0.1", gateway.port))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"GET /v1/events?last_event_id=0 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {gateway.token}\r\n\r\n"
            one.sendall(head.encode())
            readers.append(one)
        calls = 600 if LONG else 150
        held = 0
        lock = threading.Lock()

        def some(count: int) -> None:
            nonlocal held
            for _ in range(count):
                ok = gateway.invoke("worker.echo", {"text": "x" * 2000})["ok"] is True
                with lock:
                    held += ok

        threads = [threading.Thread(target=some, args=(calls // 3,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        grown = resident(gateway) - before
        for one in readers:
            one.close()
    report("calls beside twenty readers that do not read", calls, held)
    print(f"resident memory grew by {grown // 1024} KiB")
    assert grown < 100 * 1024 * 1024


def resident(gateway: GatewayProcess) -> int:
    assert gateway.process is not None
    pages = int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
