"""`examples/hello_node.py` as a user starts it, against a gateway that knows only the guide."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from farhand.sdk import MAX_TOOL_RESPONSE_BYTES
from tests.support.harness import ROOT
from tests.unit.sdk.wire import FakeGateway, asynchronous


@contextlib.asynccontextmanager
async def hello_node(url: str, allowed: Path, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The example as a process, gone when the block ends."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SA_")}
    env |= {"SA_ALLOWED_DIR": str(allowed), "SA_NODE_TOKEN": "secret", "SA_NODE_ID": "hello-node", **more}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / "hello_node.py"), url, env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said_at_the_end(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Its exit status, and what it wrote to stderr."""
    _, errors = await asyncio.wait_for(process.communicate(), 15)
    return process.returncode, errors.decode()


@asynchronous
async def test_hello_node(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    (allowed / "notes").mkdir(parents=True)
    (allowed / "notes" / "today.txt").write_text("Grüße\n")
    (allowed / "broken.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "secret.txt").write_text("secret")
    (allowed / "link.txt").symlink_to(tmp_path / "secret.txt")
    (allowed.parent / "allowed-too").mkdir()
    (allowed.parent / "allowed-too" / "x.txt").write_text("a sibling whose name begins alike")
    async with FakeGateway() as gateway, hello_node(gateway.url, allowed) as process:
        peer = await gateway.accept()
        assert peer.path == "/v1/nodes/ws?token=secret&node_id=hello-node"
        assert peer.hello["node"]["node_type"] == "reference"
        assert peer.hello["node"]["name"] == "sa-node-reference"
        assert peer.hello["capabilities"] == ["node", "node.fs"]
        pong = (await peer.call("node.ping", {}, "r1"))["result"]
        assert pong["pong"] is True
        assert abs(pong["timestamp"] - time.time() * 1000) < 60_000
        assert (await peer.call("node.echo", {"x": [1, None]}, "r2"))["result"] == {"x": [1, None]}
        file = allowed / "notes" / "today.txt"
        assert (await peer.call("node.fs.read_text", {"path": "notes/today.txt"}, "r3"))["result"] == {
            "path": str(file.resolve()),
            "content": "Grüße\n",
        }
        for number, (args, kind) in enumerate(
            [
                ({}, "invalid_args"),
                (None, "invalid_args"),
                ({"path": 5}, "invalid_args"),
                ({"path": "../secret.txt"}, "not_allowed"),
                ({"path": str(tmp_path / "secret.txt")}, "not_allowed"),
                ({"path": "../allowed-too/x.txt"}, "not_allowed"),
                ({"path": "link.txt"}, "not_allowed"),
                ({"path": "absent.txt"}, "failed"),
                ({"path": "nul\x00"}, "failed"),
                ({"path": "notes"}, "failed"),
                ({"path": "broken.bin"}, "failed"),
            ]
        ):
            answer = await peer.call("node.fs.read_text", args, f"bad{number}")
            assert answer["error"]["kind"] == kind, (args, answer)
            assert "secret" not in answer["error"]["message"] or kind != "not_allowed"
        process.terminate()
        assert await peer.ended() == 1001
        assert await asyncio.wait_for(process.wait(), 10) == 0


@asynchronous
async def test_ping_takes_whatever_it_is_given(tmp_path: Path) -> None:
    async with FakeGateway() as gateway, hello_node(gateway.url, tmp_path):
        peer = await gateway.accept()
        for number, args in enumerate([None, {}, {"x": 1}, [1], "str", 5]):
            assert (await peer.call("node.ping", args, f"r{number}"))["result"]["pong"] is True


@asynchronous
async def test_a_file_comes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "large.txt").write_text("x" * 1_200_000)
    (tmp_path / "larger.txt").write_text("ü" * 3_000_000)
    async with FakeGateway() as gateway, hello_node(gateway.url, tmp_path, LC_ALL="POSIX"):
        peer = await gateway.accept()
        lines = await peer.call("node.fs.read_text", {"path": "lines.txt"}, "lines")
        assert lines["result"]["content"] == "\ufeffone\r\ntwo\rthree\n"
        large = await peer.call("node.fs.read_text", {"path": "large.txt"}, "large")
        assert large["result"]["content"] == "x" * 1_200_000
        larger = await peer.call("node.fs.read_text", {"path": "larger.txt"}, "larger")
        assert larger["result"]["_truncated"] is True
        assert larger["result"]["_original_bytes"] > 6_000_000
        frame = json.dumps(larger, ensure_ascii=False, separators=(",", ":")).encode()
        assert MAX_TOOL_RESPONSE_BYTES - 10 < len(frame) <= MAX_TOOL_RESPONSE_BYTES


@asynchronous
async def test_a_file_that_never_ends_holds_up_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with FakeGateway() as gateway, hello_node(gateway.url, tmp_path) as process:
        peer = await gateway.accept()
        await peer.request("reading", "node.fs.read_text", {"path": "pipe"})
        assert (await peer.call("node.echo", 5))["result"] == 5
        process.send_signal(signal.SIGINT)
        assert (await peer.receive("tool_response"))["request_id"] == "reading"
        assert await asyncio.wait_for(process.wait(), 15) == 0


@asynchronous
async def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    async with FakeGateway() as gateway, hello_node(gateway.url, tmp_path) as process:
        await gateway.accept()
        process.send_signal(signal.SIGINT)
        assert await said_at_the_end(process) == (0, "")


@asynchronous
async def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    async with FakeGateway() as gateway:
        gateway.refusals = [(401, "missing or wrong token")]
        async with hello_node(gateway.url, tmp_path) as process:
            reason = "hello-node: the gateway answered HTTP 401: missing or wrong token\n"
            assert await said_at_the_end(process) == (1, reason)


@asynchronous
async def test_an_address_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    async with hello_node("ftp://localhost:3210", tmp_path) as process:
        status, reason = await said_at_the_end(process)
        assert status == 1
        assert reason.startswith("hello-node: gateway_ws_url must be ws://")
        assert reason.count("\n") == 1
