"""How transfers end whose nodes do not return, or keep disconnecting: the reported state of the destination is true."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, hello_frame, wait_until

MIB = 1024 * 1024
HURRY = """
import farhand.gateway.transfers.transfers as transfers
transfers.AWAY_SECONDS, transfers.BROKEN_SECONDS = 1.0, 10.0
from farhand.cli.main import main
main()
"""


class Scene:
    """A gateway that does not wait long, a real sender, and a receiver that is played by the test."""

    def __init__(self, gateway: GatewayProcess, sender: NodeProcess) -> None:
        self.gateway = gateway
        self.sender = sender

    async def begin(self, name: str, size: int, to: str = "actor") -> str:
        (self.sender.workspace / name).write_bytes(os.urandom(size))
        body = {"source": f"sender:{name}", "destination": f"{to}:/copy", "background": True}
        answer = await asyncio.to_thread(self.gateway.request, "POST", "/v1/transfers", body)
        assert answer.status == 202, answer
        return str(answer.json()["id"])

    async def end_of(self, transfer_id: str) -> Any:
        def ended() -> Any:
            record = self.gateway.get(f"/v1/transfers/{transfer_id}")
            return record if record["state"] != "running" else None

        return await asyncio.to_thread(wait_until, ended, 60, "the end of the transfer")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    gateway = GatewayProcess(tmp_path / "home")
    gateway._command[1:3] = ["-c", HURRY]
    with gateway, NodeProcess(gateway, tmp_path / "sender", "sender") as sender:
        yield Scene(gateway, sender)


@contextlib.asynccontextmanager
async def actor(gateway: GatewayProcess) -> AsyncIterator[PlainNode]:
    """A node that can transfer, and does what the test says."""
    features = {"features": ["transfer", "resume", "query.transfers"], "resume": {"boot": "actor"}}
    async with PlainNode.connect(gateway, "actor", hello=False) as node:
        await node.send(hello_frame("actor", ["test"], farhand=features))
        await node.receive("gateway_welcome")
        yield node


async def take(node: PlainNode, size: int) -> int:
    """Let the sender send, and wait until `size` bytes and whatever ends a part have come."""
    stream: int = (await node.receive("transfer_open"))["stream"]
    await node.send({"type": "transfer_ready", "stream": stream, "offset": 0, "complete": False})
    await node.send({"type": "transfer_credit", "stream": stream, "offset": 0, "until": 8 * MIB})
    came = 0
    while came < size:
        frame = await node.socket.recv()
        if isinstance(frame, bytes):
            came += len(frame)
    return stream


async def question(node: PlainNode) -> Any:
    """What the node is asked of the transfer."""
    async with asyncio.timeout(60):
        while True:
            frame = await node.socket.recv()
            message = {} if isinstance(frame, bytes) else json.loads(frame)
            if message.get("type") == "node_query" and message.get("params"):
                return message


def test_a_transfer_that_had_arrived_when_its_sender_left_is_ok(scene: Scene) -> None:
    async def run() -> None:
        async with actor(scene.gateway) as node:
            transfer_id = await scene.begin("left", MIB)
            await take(node, MIB)
            scene.sender.kill()
            asked = await question(node)
            await node.send({"type": "node_answer", "query_id": asked["query_id"], "result": {"placed": True}})
            ended = await scene.end_of(transfer_id)
            assert ended["state"] == "ok" and ended["bytesTransferred"] == MIB, ended

    asyncio.run(run())


@pytest.mark.parametrize("size", [MIB, 20 * MIB])
def test_a_receiver_that_stays_away_leaves_unknown_only_what_is_unknown(scene: Scene, size: int) -> None:
    async def run() -> None:
        async with actor(scene.gateway) as node:
            transfer_id = await scene.begin("away", size)
            await take(node, min(size, 2 * MIB))
        ended = await scene.end_of(transfer_id)
        assert ended["state"] == "error" and ended["error"]["kind"] == "failed", ended
        message = ended["error"]["message"]
        assert "Destination node not connected: actor (offline, last seen " in message
        assert "it did not come back within 1 s" in message
        assert message.startswith("outcome unknown:") is (size == MIB), message

    asyncio.run(run())


def test_who_reads_again_what_was_sent_before_may_be_silent_longer(tmp_path: Path) -> None:
    """After a break both ends read what is there, for its digest: of a long file on a slow disk, for minutes."""
    gateway = GatewayProcess(tmp_path / "home")
    slow = "import farhand.gateway.transfers.transfers as t; t.IDLE_SECONDS, t.REREAD_BYTES = 5.0, 65536"
    gateway._command[1:3] = ["-c", f"{slow}; from farhand.cli.main import main; main()"]

    async def run(scene: Scene) -> None:
        async with actor(gateway) as node:
            transfer_id = await scene.begin("long", 20 * MIB)
            stream = await take(node, 4 * MIB)
            await node.send({"type": "transfer_credit", "stream": stream, "offset": 4 * MIB, "until": 8 * MIB})
            path = f"/v1/transfers/{transfer_id}"
            await asyncio.to_thread(wait_until, lambda: gateway.get(path)["bytesTransferred"], 20, "progress")
        async with actor(gateway) as node:
            stream = (await node.receive("transfer_open"))["stream"]
            await asyncio.sleep(7)  # longer than an end may otherwise be silent
            assert gateway.get(path)["state"] == "running", gateway.get(path)
            await node.send({"type": "transfer_ready", "stream": stream, "offset": 4 * MIB, "complete": False})
            await node.send({"type": "transfer_credit", "stream": stream, "offset": 4 * MIB, "until": 8 * MIB})
            assert isinstance(await node.socket.recv(), bytes), "it goes on"

    with gateway, NodeProcess(gateway, tmp_path / "sender", "sender") as sender:
        asyncio.run(run(Scene(gateway, sender)))


def test_one_that_breaks_off_again_and_again_ends(scene: Scene) -> None:
    async def run() -> None:
        transfer_id = ""
        ended: Any = None
        while ended is None or ended["state"] == "running":
            async with actor(scene.gateway) as node:
                transfer_id = transfer_id or await scene.begin("broken", MIB)
                with contextlib.suppress(TimeoutError):
                    await node.receive("transfer_open", 2)
            ended = await asyncio.to_thread(scene.gateway.get, f"/v1/transfers/{transfer_id}")
        assert ended["state"] == "timeout" and "again and again" in ended["error"]["message"], ended

    asyncio.run(run())
