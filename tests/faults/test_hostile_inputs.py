"""Hostile inputs: each is answered or refused, other clients do not wait long, and memory stays bounded."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, hello_frame

LONG = os.environ.get("FARHAND_SIEGE") == "long"
pytestmark = [pytest.mark.siege, pytest.mark.timeout(600)]
MOST_MEMORY = 512 * 1024  # KiB
PATIENCE = 20.0


class Beside:
    """Requests of another client meanwhile, and the longest time that one of them took."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._over = threading.Event()
        self.tried = 0
        self.held = 0
        self.took: list[float] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        headers = {"Authorization": f"Bearer {self._gateway.token}"}
        while not self._over.wait(0.005):
            self.tried += 1
            began = time.perf_counter()
            line = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=PATIENCE)
            try:
                line.request("GET", "/v1/health", headers=headers)
                self.held += line.getresponse().status == 200
            except OSError:
                pass
            finally:
                line.close()
            self.took.append((time.perf_counter() - began) * 1000)


def bodies() -> Iterator[tuple[str, bytes]]:
    """Of requests to call a tool."""
    size = 8_000_000 if LONG else 2_000_000

    def call(args: str) -> bytes:
        return f'{{"tool":"hands__Grep","args":{args}}}'.encode()

    yield "deep lists", call("[" * 100_000 + "]" * 100_000)
    yield "deep objects", call('{"a":' * 100_000 + "1" + "}" * 100_000)
    yield "a list without end", call("[" * 500_000)
    yield "a number of many digits", call('{"pattern":' + "9" * 1_000_000 + "}")
    yield "a number out of range", call('{"pattern":1e999999}')
    yield "many names", call("{" + ",".join(f'"k{number}":1' for number in range(size // 12)) + "}")
    yield "one name many times", call("{" + ",".join('"pattern":"x"' for _ in range(size // 14)) + "}")
    yield "a long text", call('{"pattern":"' + "x" * size + '"}')
    yield "a text of escapes", call('{"pattern":"' + "\\u0001" * (size // 6) + '"}')
    yield "half a character", call('{"pattern":"\\ud800"}')
    yield "no text", b'{"tool":"\xff\xfe"}'
    yield "no number", call('{"pattern":NaN}')
    yield "zeros", b"\0" * 100_000
    yield "a tool of a long name", b'{"tool":"' + b"a." * (size // 2) + b'"}'
    yield "a session of a long name", b'{"tool":"hands__Grep","session_key":"' + b"a:" * (size // 2) + b'","args":{}}'


def tools(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What a model may ask of tools."""
    (folder / "as").write_text("a" * 30 + "!\n" + "b" * 200_000)
    for expression in (
        r"(a+)+$",
        r"(a|aa)+$",
        r"(.*)*x",
        "a{1000}{1000}",
        "(" * 5000 + ")" * 5000,
        r"(?:a?){500}a{500}",
    ):
        yield "an expression that runs away", "hands__Grep", {"pattern": expression, "path": "as"}
        yield "an expression that runs away", "grep", {"pattern": expression, "path": "."}
    for pattern in ("**/" * 200 + "x", "{a,b}" * 200, "*" * 5000, "[" * 1000, "{" * 1000):
        yield "a pattern that unfolds", "hands__Glob", {"pattern": pattern}
        yield "a pattern that unfolds", "glob", {"pattern": pattern}
    yield "a device", "hands__Read", {"path": "/dev/zero"}
    yield "a flood", "hands__Bash", {"command": f"head -c {200_000_000 if LONG else 50_000_000} /dev/zero | tr '\\0' y"}
    yield "a patch of nothing", "apply_patch", {"patch": "*** Begin Patch\n" + "@@\n" * 100_000 + "*** End Patch"}
    yield "a long question", "memory_search", {"query": "x " * 500_000}
    yield "an invalid moment", "cron", {"action": "add", "schedule": "*/1 " * 10_000, "prompt": "x"}


def post(gateway: GatewayProcess, path: str, body: bytes) -> int:
    line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    headers = {"Authorization": f"Bearer {gateway.token}", "Content-Type": "application/json"}
    try:
        line.request("POST", path, body, headers)
        answer = line.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0  # it was cut off
    finally:
        line.close()


async def frames(gateway: GatewayProcess) -> list[bool]:
    """What a node may send; a connection of its own each."""
    size = 8 * 1024 * 1024
    hello = json.dumps(hello_frame("liar", ["liar"]))
    bad: list[Any] = [
        "[" * 200_000,
        '{"type":' + '{"a":' * 100_000,
        '{"type":"tool_response","request_id":"' + "x" * size + '"}',
        b"\0" * size,
        "x" * size,
        json.dumps({"type": "tools_update", "tools": [{"name": f"liar.t{number}"} for number in range(50_000)]}),
        json.dumps(hello_frame("liar", [f"c{number}" for number in range(100_000)])),
    ]
    held = []
    for one in bad:
        headers = {"Authorization": f"Bearer {SHARED_TOKEN}"}
        try:
            async with websockets.connect(gateway.ws_url, additional_headers=headers, max_size=None) as socket:
                await socket.send(hello)
                await socket.recv()
                await socket.send(one)
                await asyncio.wait_for(socket.ping(), 10)
        except (websockets.WebSocketException, OSError, TimeoutError):
            pass
        held.append(await asyncio.to_thread(lambda: gateway.request("GET", "/v1/health").status == 200))
    return held


def wrong_lists(gateway: GatewayProcess) -> bool:
    """A tool whose schema every item of a long list breaks."""
    schema = {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "integer"}}}}
    tool = {"name": "list.take", "description": "", "parameters": schema}

    async def scenario() -> Any:
        hello = hello_frame("list", ["list"], farhand={"features": ["resume"], "tools": [tool]})
        async with websockets.connect(
            gateway.ws_url, additional_headers={"Authorization": f"Bearer {SHARED_TOKEN}"}
        ) as socket:
            await socket.send(json.dumps(hello))
            await socket.recv()
            return await gateway.ainvoke("list.take", {"items": ["x"] * 90_000}, timeout_ms=20_000)

    answer = asyncio.run(scenario())
    return bool(answer["error"]["kind"] == "invalid_args" and "items.0" in answer["error"]["message"])


def memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def test_p10_hostile_inputs_are_answered_and_do_not_block_others(tmp_path: Path) -> None:
    with (
        GatewayProcess(tmp_path / "home") as gateway,
        NodeProcess(gateway, tmp_path / "hands", "hands") as node,
    ):
        tried = held = 0

        def one(what: str, work: Callable[[], bool]) -> None:
            nonlocal tried, held
            tried += 1
            good = work()
            held += good
            assert good, what

        with Beside(gateway) as beside:
            for path in ("/v1/tools/invoke", "/agent/process", "/mcp", "/v1/chat/completions", "/v1/tokens"):
                for what, body in bodies():
                    one(f"{what} at {path}", lambda path=path, body=body: post(gateway, path, body) < 500)  # type: ignore[misc]
            bomb = zlib.compress(b"\0" * 100_000_000)
            one("a body that unfolds", lambda: post(gateway, "/v1/tools/invoke", bomb) < 500)
            one("a list of faults", lambda: wrong_lists(gateway))
            for what, tool, args in tools(node.workspace):
                body = json.dumps({"tool": tool, "args": args, "timeout_ms": 60_000}).encode()
                one(f"{what}: {tool}", lambda body=body: post(gateway, "/v1/tools/invoke", body) in (200, 413))  # type: ignore[misc]
            answers = asyncio.run(frames(gateway))
            tried, held = tried + len(answers), held + sum(answers)
        assert gateway.process is not None
        peak = memory(gateway.process.pid)
        took = sorted(beside.took)
        print(f"inputs that are made to hurt: {tried} tried, {held} held")
        print(f"requests of another client meanwhile: {beside.tried} tried, {beside.held} held")
        print(f"the longest of those took {took[-1]:.0f} ms, 99 of 100 at most {took[len(took) * 99 // 100]:.0f} ms")
        print(f"the gateway's memory at its highest: {peak // 1024} MiB")
        assert held == tried and beside.held == beside.tried > 0
        assert peak < MOST_MEMORY
