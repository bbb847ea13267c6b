"""`examples/hello_node.py` as a user starts it, against a gateway that knows only the guide."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from tests.harness import ROOT
from tests.sdk.wire import FakeGateway, asynchronous


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
    env = {k: v for k, v in os.environ.items() if not k.startswith("SA_")}
    env |= {"SA_ALLOWED_DIR": str(allowed), "SA_NODE_TOKEN": "secret", "SA_NODE_ID": "hello-node"}
    async with FakeGateway() as gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "examples" / "hello_node.py"), gateway.url, env=env
        )
        try:
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
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
