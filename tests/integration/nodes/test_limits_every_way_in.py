"""Every limit of a node against every way in: a gateway that sends whatever it likes gets nothing that is not lent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from farhand.protocol.messages import FEATURE_TRANSFER, FEATURES
from tests.support.harness import end_marked, marked
from tests.unit.sdk.wire import PLAIN, FakeGateway, Peer, asynchronous

WELCOME = {**PLAIN, "farhand": {"features": [*FEATURES, FEATURE_TRANSFER], "gateway_id": "g1"}}
SECRET = "needle-in-the-file"
OFFER = {"name": "in", "folder": False, "files": 1, "size": 1, "manifest_bytes": 2, "manifest_digest": "sha256:0"}

Way = Callable[["Ways"], Awaitable[Any]]


class Ways:
    """A node in a process of its own, and a gateway that asks it anything."""

    def __init__(self, peer: Peer, folder: Path, mark: str, pid: int) -> None:
        self.peer = peer
        self.folder = folder
        self.mark = mark
        self.pid = pid
        self.asked = 0

    async def call(self, tool: str, **args: Any) -> Any:
        self.asked += 1
        return await self.peer.call(tool, args, f"call-{self.asked}")

    async def query(self, kind: str, **params: Any) -> Any:
        self.asked += 1
        await self.peer.send({"type": "node_query", "query_id": self.asked, "kind": kind, "params": params or None})
        answer = await self.peer.receive("node_answer")
        assert answer["query_id"] == self.asked
        return answer

    async def transfer(self, role: str, path: str, transfer_id: str, **more: Any) -> Any:
        self.asked += 1
        opened = {"type": "transfer_open", "stream": self.asked, "transfer_id": transfer_id, "role": role}
        await self.peer.send({**opened, "path": path, **more})
        while (answer := await self.peer.receive())["type"] not in ("transfer_ready", "transfer_done"):
            pass
        await self.peer.send({"type": "transfer_stop", "transfer_id": transfer_id, "keep": True})
        return answer


def refused(answer: Any) -> str | None:
    """Why a way is closed; None when it is open. Nothing of the file may be in a refusal."""
    error = answer.get("error")
    note = (answer.get("result") or {}).get("note", "") if isinstance(answer.get("result"), dict) else ""
    text: str | None = None
    if error is not None and error["kind"] == "not_allowed":
        text = error["message"]
    elif "is not allowed" in note:
        text = note
    if text is not None:
        assert SECRET not in json.dumps(answer)
    return text


async def resumed(ways: Ways, role: str, transfer_id: str, **more: Any) -> Any:
    await ways.transfer(role, "file.txt" if role == "send" else "in.txt", transfer_id, **more)
    return await ways.transfer(role, "file.txt" if role == "send" else "in.txt", transfer_id, **more)


WAYS: dict[str, Way] = {
    "Read": lambda ways: ways.call("Read", path="file.txt"),
    "Glob": lambda ways: ways.call("Glob", pattern="*"),
    "Grep": lambda ways: ways.call("Grep", pattern="needle"),
    "Write": lambda ways: ways.call("Write", path="new.txt", content="x"),
    "Edit": lambda ways: ways.call("Edit", path="edited.txt", oldString="old", newString="new"),
    "Bash": lambda ways: ways.call("Bash", command="touch ran"),
    "Bash background": lambda ways: ways.call("Bash", command="touch ran", background=True),
    "Process list": lambda ways: ways.call("Process", action="list"),
    "Process kill": lambda ways: ways.call("Process", action="kill", sessionId="x"),
    "Undo": lambda ways: ways.call("Undo", call="x"),
    "Undo dry run": lambda ways: ways.call("Undo", call="x", dryRun=True),
    "jobs": lambda ways: ways.query("jobs"),
    "output": lambda ways: ways.query("output", job_id="x"),
    "logs": lambda ways: ways.query("logs", lines=5),
    "probe": lambda ways: ways.query("probe", bins=["sh"]),
    "preview of Write": lambda ways: ways.query("preview", tool="Write", args={"path": "file.txt", "content": "x"}),
    "preview of Edit": lambda ways: ways.query(
        "preview", tool="Edit", args={"path": "file.txt", "oldString": "in", "newString": "on"}
    ),
    "preview of Bash": lambda ways: ways.query("preview", tool="Bash", args={"command": "ls"}),
    "send": lambda ways: ways.transfer("send", "file.txt", "00000000000000000000000000000001"),
    "send again": lambda ways: resumed(ways, "send", "00000000000000000000000000000002"),
    "receive": lambda ways: ways.transfer("receive", "in.txt", "00000000000000000000000000000003", offer=OFFER),
    "receive again": lambda ways: resumed(ways, "receive", "00000000000000000000000000000004", offer=OFFER),
}
SHELL = {"Bash", "Bash background", "Process list", "Process kill", "jobs", "output", "probe", "preview of Bash"}
READING = {"Read", "Undo dry run", "logs", "preview of Write", "preview of Edit", "send", "send again"}
WRITING = {"Write", "Undo", "Undo dry run", "preview of Write", "receive", "receive again"}

TABLE: dict[str, tuple[list[str], set[str]]] = {
    "no limit": ([], set()),
    "--root": (["--root", "{workspace}", "--sandbox", "none"], SHELL),
    "--root, --allow-tool Bash": (["--root", "{workspace}", "--allow-tool", "Bash"], set()),
    "--read-only": (
        ["--read-only"],
        {"Write", "Edit", "Bash", "Bash background", "Process kill", "Undo", "Undo dry run", "receive", "receive again"}
        | {"preview of Write", "preview of Edit", "preview of Bash", "probe"},
    ),
    "--deny-tool Read": (["--deny-tool", "Read"], READING),
    "--deny-tool Write": (["--deny-tool", "Write"], WRITING),
    "--deny-tool Edit": (["--deny-tool", "Edit"], {"Edit", "preview of Edit"}),
    "--deny-tool Bash": (["--deny-tool", "Bash"], SHELL),
    "--deny-tool Process": (["--deny-tool", "Process"], {"Process list", "Process kill", "jobs", "output"}),
    "--deny-tool Undo": (["--deny-tool", "Undo"], {"Undo", "Undo dry run"}),
    "--deny-tool Bash, --allow-tool Bash": (["--deny-tool", "Bash", "--allow-tool", "Bash"], SHELL),
}


@contextlib.asynccontextmanager
async def lending(folder: Path, *options: str) -> AsyncIterator[Ways]:
    workspace = folder / "workspace"
    workspace.mkdir(exist_ok=True)
    (workspace / "file.txt").write_text(f"{SECRET}\n")
    (workspace / "edited.txt").write_text("old\n")
    mark = f"TEST_NODE=ways-{os.getpid()}-{folder.name}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SA_", "FARHAND_", "BASH_ENV"))}
    env = {**clean, "HOME": str(folder), "SHELL": "/bin/bash", "SA_NODE_TOKEN": "t", **dict([mark.split("=")])}
    async with FakeGateway() as gateway:
        command = [sys.executable, "-m", "farhand", "node", "--gateway", gateway.url, "--id", "n"]
        command += ["--home", str(folder / "home"), "--workspace", str(workspace), *options]
        node = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.DEVNULL)
        try:
            yield Ways(await gateway.accept(WELCOME), workspace, mark, node.pid)
        finally:
            node.terminate()
            await node.wait()
            end_marked(mark)


@pytest.mark.parametrize("limit", TABLE)
def test_a_limit_holds_for_every_way_in(tmp_path: Path, limit: str) -> None:
    options, closed = TABLE[limit]

    @asynchronous
    async def run() -> None:
        given = [option.format(workspace=tmp_path / "workspace") for option in options]
        async with lending(tmp_path, *given) as ways:
            found = {name: refused(await way(ways)) for name, way in WAYS.items()}
            assert {name for name, text in found.items() if text is not None} == closed
            for name, text in found.items():
                assert text is None or "--" in text, f"{name}: {text} does not name the rule"
            if "Bash" in closed:
                assert not (ways.folder / "ran").exists()

    run()


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/passwd", "{folder}/outside.txt", "link"])
@pytest.mark.parametrize("role", ["send", "receive"])
def test_a_transfer_stays_inside_the_roots(tmp_path: Path, role: str, path: str) -> None:
    (tmp_path / "outside.txt").write_text(f"{SECRET}\n")

    @asynchronous
    async def run() -> None:
        async with lending(tmp_path, "--root", str(tmp_path / "workspace")) as ways:
            (ways.folder / "link").symlink_to(tmp_path / "outside.txt")
            more = {} if role == "send" else {"offer": OFFER}
            answer = await ways.transfer(role, path.format(folder=tmp_path), "5" * 32, **more)
            assert refused(answer) is not None, answer

    run()


def test_nothing_starts_a_process_on_a_frozen_node(tmp_path: Path) -> None:
    """Neither a call nor a question does."""
    profile = f"touch {tmp_path}/profile-ran\n"
    for name in (".profile", ".bash_profile", ".bashrc"):
        (tmp_path / name).write_text(profile)
    order = {"since": 1, "by": "owner", "reason": "test", "gateway_id": "g1"}

    @asynchronous
    async def run() -> None:
        async with lending(tmp_path) as ways:
            await ways.peer.send({"type": "node_freeze", "number": 1, "order": order})
            report = await ways.peer.receive("freeze_report")
            assert report["frozen"] is True
            for name, way in WAYS.items():
                await way(ways)
                assert not (tmp_path / "profile-ran").exists(), f"{name} started a shell"
            assert refused(await WAYS["probe"](ways)) is not None
            assert not (ways.folder / "ran").exists()

    run()


def test_a_node_that_starts_frozen_starts_no_process(tmp_path: Path) -> None:
    """Not even the keeper of its commands."""

    @asynchronous
    async def run() -> None:
        async with lending(tmp_path) as ways:
            await ways.peer.send({"type": "node_freeze", "number": 1, "order": {"since": 1, "by": "owner"}})
            assert (await ways.peer.receive("freeze_report"))["frozen"] is True
        async with lending(tmp_path) as ways:
            assert ways.peer.hello["farhand"]["frozen"]["by"] == "owner"
            assert marked(ways.mark) == [ways.pid]

    run()


def test_a_probe_starts_no_process(tmp_path: Path) -> None:
    for name in (".profile", ".bash_profile", ".bashrc"):
        (tmp_path / name).write_text(f"touch {tmp_path}/profile-ran\n")

    @asynchronous
    async def run() -> None:
        async with lending(tmp_path) as ways:
            answer = await ways.query("probe", bins=["sh", "no-such-program", "file.txt"])
            assert answer["result"]["hostBinStatus"] == {"sh": True, "no-such-program": False, "file.txt": False}
            assert (await ways.query("jobs"))["result"] == []
            assert not (tmp_path / "profile-ran").exists()

    run()
