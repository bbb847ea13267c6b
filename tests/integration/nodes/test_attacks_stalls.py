"""Hostile nodes that try to hold up the event loop: whatever they send, other clients are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import websockets

from farhand.protocol.manifest import EntryKind, Manifest, ManifestEntry
from tests.integration.nodes.test_attacks_nodes import Hostile, joined
from tests.integration.nodes.test_attacks_transfers import sending
from tests.support.harness import PATIENCE, ROOT, GatewayProcess

# Twice what is promised. On a busy machine a try may still exceed it, by chance; a real stall does so every time.
LONGEST_STALL = 0.5
TRIES = 4


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("stalls") / "home")
    process.start()
    try:
        yield process
    finally:  # one that is stuck does not react to SIGTERM
        assert process.process is not None
        process.process.kill()
        process.process.wait(30)


class Watch:
    """The answer times of /healthz, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @property
    def worst(self) -> float:
        return max(self.times)


@contextlib.contextmanager
def watched(gateway: GatewayProcess) -> Iterator[Watch]:
    command = [sys.executable, "-m", "tests.support.health_probe", str(gateway.port)]
    probe = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert probe.stdout is not None and probe.stdout.readline() == "ready\n"
    watch = Watch()
    time.sleep(0.1)
    try:
        yield watch
    finally:
        time.sleep(0.1)
        out, _ = probe.communicate("over\n", timeout=180)
        watch.times = json.loads(out)[0]


def holds_nobody_up(attack: Callable[[], Coroutine[Any, Any, float]]) -> None:
    """`attack` returns how long the gateway took to answer others meanwhile."""
    worst: list[float] = []
    while len(worst) < TRIES and min(worst, default=LONGEST_STALL) >= LONGEST_STALL:
        worst.append(asyncio.run(attack()))
    assert min(worst) < LONGEST_STALL, worst


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    for _ in range(depth):
        schema = {"allOf": [schema], "unevaluatedProperties": False}
    return schema


def product(keyword: str, rule: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {keyword: [{"items": rule} for _ in range(1700)]}}}


@pytest.mark.parametrize(
    ("schema", "args"),
    [
        (nested(30), {"a": 1}),
        (product("allOf", {"not": {"const": 0}}), {"x": [-1] * 5_000}),
        (product("anyOf", {"type": "string"}), {"x": [-1] * 5_000}),
        ({"properties": {"x": {"pattern": r"(?:\w{100}){100}" * 5}}}, {"x": "a"}),
    ],
    ids=["nested", "product", "errors", "patterns"],
)
def test_a_schema_takes_no_longer_than_its_size(gateway: GatewayProcess, schema: Any, args: Any) -> None:
    async def attack() -> float:
        async with joined(gateway, tools=[{"name": "Slow", "parameters": schema}]) as node:
            with watched(gateway) as watch:
                call = asyncio.create_task(gateway.ainvoke("evil__Slow", args))
                await answer_to(node, call)
            return watch.worst

    holds_nobody_up(attack)


async def answer_to(node: Hostile, call: asyncio.Task[Any]) -> None:
    """Answer a call, unless its arguments are refused before the node sees them."""
    async with asyncio.timeout(PATIENCE):
        while not call.done():
            for one in [one for one in node.heard if one["type"] == "tool_request"]:
                node.heard.remove(one)
                await node.send({"type": "tool_response", "request_id": one["request_id"], "ok": True})
            await asyncio.sleep(0.02)


async def request_of(node: Hostile, tool: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        while True:
            for one in node.heard:
                if one["type"] == "tool_request" and one["tool"].endswith(tool):
                    return one
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "frame",
    [
        '{"type":"pong","timestamp":1,' + ",".join(f'"{number:x}":1' for number in range(1_500_000)) + "}",
        '{"type":"pong","timestamp":1,' + ",".join(f'"{number:x}":1' for number in range(90_000)) + "}",
        "[" + "1," * 7_000_000 + "1]",
        '{"type":"tools_update","capabilities":[],"tools":[{"name":"x","parameters":{"a":[%s1]}}]}' % ("{}," * 340_000),
        '{"type":"node_answer","query_id":1,"error":{"kind":"failed","message":"",%s"a":1}}' % ('"a":1,' * 1_500_000),
    ],
    ids=["keys", "fewer-keys", "items", "tools", "error"],
)
def test_a_frame_of_many_values_does_not_block_others(gateway: GatewayProcess, frame: str) -> None:
    async def attack() -> float:
        async with joined(gateway) as node:
            with watched(gateway) as watch, contextlib.suppress(websockets.ConnectionClosed):
                await node.send(frame)
                await node.settled()
            return watch.worst

    holds_nobody_up(attack)


@pytest.mark.parametrize("count", [400_000, 4_000_000])
def test_a_result_of_many_values_is_not_decoded(gateway: GatewayProcess, count: int) -> None:
    async def attack() -> float:
        async with joined(gateway) as node:
            call = asyncio.create_task(gateway.ainvoke("evil__Bash", {}))
            request = await request_of(node, "Bash")
            frame = '{"type":"tool_response","request_id":"%s","ok":true,"result":{"matches":[%s1]}}'
            with watched(gateway) as watch:
                await node.send(frame % (request["request_id"], "{}," * count))
                answer = await call
            assert not answer["ok"] and "values" in answer["error"]["message"], answer
            return watch.worst

    holds_nobody_up(attack)


@pytest.mark.parametrize("kind", ["probe", "jobs"])
def test_an_answer_of_many_values_is_not_decoded(gateway: GatewayProcess, kind: str) -> None:
    async def attack() -> float:
        async with joined(gateway) as node:
            node.lies["probe"] = {
                "type": "node_answer",
                "result": {"hostBinStatus": {str(n): True for n in range(300_000)}},
            }
            node.lies["jobs"] = {"type": "node_answer", "result": [{} for _ in range(300_000)]}
            with watched(gateway) as watch:
                if kind == "probe":
                    await asyncio.to_thread(gateway.request, "POST", "/v1/nodes/evil/probe", {"bins": ["git"]})
                else:
                    await asyncio.to_thread(gateway.request, "GET", "/v1/jobs")
            return watch.worst

    holds_nobody_up(attack)


def test_small_frames_leave_others_their_turn(gateway: GatewayProcess) -> None:
    """Frames are handled for a few milliseconds at a time, however many come at once."""
    frames = [
        '{"timestamp":1,"type":"ping"}',
        '{"type":"tool_response","request_id":"01a1e9b4-b1ff-7c5e-a993-ddcaee46495e","ok":true,"result":1}',
        '{"type":"transfer_credit","stream":1,"offset":1,"until":1,"x":[' + "1," * 2_000 + "1]}",
    ]

    async def flood(node: Hostile, frame: str) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                for _ in range(100):
                    await node.send(frame)
                await asyncio.sleep(0)

    async def attack() -> float:
        async with contextlib.AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(joined(gateway, f"evil{number}")) for number in range(6)]
            floods = [asyncio.create_task(flood(node, frames[at % 3])) for at, node in enumerate(nodes)]
            with watched(gateway) as watch:
                await asyncio.sleep(3)
            for task in floods:
                task.cancel()
        times = sorted(watch.times)
        return times[int(len(times) * 0.99)]

    holds_nobody_up(attack)


def test_messages_keep_their_order_and_are_handled_before_the_node_leaves(gateway: GatewayProcess) -> None:
    """A large result is decoded in a thread; a smaller one behind it, and the end of the connection, wait for it."""

    async def attack() -> None:
        large, small = "x" * 3_000_000, "y"
        async with joined(gateway, features=[]) as node:
            tasks = [asyncio.create_task(gateway.ainvoke("evil__Read", {"path": name})) for name in ("a", "b")]
            async with asyncio.timeout(PATIENCE):
                while len(asked := [one for one in node.heard if one["type"] == "tool_request"]) < 2:
                    await asyncio.sleep(0.02)
            for request, result in zip(asked, (large, small), strict=True):
                answer = {"type": "tool_response", "request_id": request["request_id"], "ok": True, "result": result}
                await node.send(answer)
            await node.socket.close()
            answers = [await task for task in tasks]
        assert {len(answer["result"]) for answer in answers} == {3_000_000, 1}, [str(one)[:200] for one in answers]

    asyncio.run(attack())


def test_a_manifest_of_millions_of_entries_is_not_decoded(gateway: GatewayProcess) -> None:
    """Decoding holds the interpreter lock, so that a thread does not help."""
    manifest = b"[" + b" ,".join([b'["","file"]'] * 3_000_000) + b"]"

    async def attack() -> float:
        async with sending(gateway, "x", manifest, [], folder=True):
            with watched(gateway) as watch:
                answer = await gateway.ainvoke("gsv__Transfer", {"source": "evil:/x", "destination": "gsv:media/x"})
            assert not answer["ok"] and "entries" in answer["error"]["message"], answer
            return watch.worst

    holds_nobody_up(attack)


def test_the_list_of_a_large_folder_does_not_block_others(gateway: GatewayProcess) -> None:
    manifest = Manifest([ManifestEntry(f"{number:070d}", EntryKind.FILE) for number in range(199_000)]).encoded

    async def attack() -> float:
        async with sending(gateway, "x", manifest, [], folder=True, files=199_000):
            with watched(gateway) as watch:
                path = "/v1/transfers/manifest?source=evil:/x"
                answer = await asyncio.to_thread(gateway.request, "GET", path)
            assert answer.status == 200 and len(answer.json()["entries"]) == 199_000
            return watch.worst

    holds_nobody_up(attack)
