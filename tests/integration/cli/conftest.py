"""The command in processes of its own, against a gateway with two nodes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, ForkedProcess, start_process
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, PluginProcess

SLOW_NODE = '''
import asyncio, contextlib, os, signal
from farhand.sdk import Cancelled, Failed, NodeClient, NodeInfo, Shutdown, ToolContext, ToolRegistry

registry = ToolRegistry()


@registry.tool("slow.sleep")
async def sleep(ctx: ToolContext, seconds: float = 60.0) -> str:
    """Sleep until cancelled."""
    await asyncio.wait_for(ctx.cancel.cancelled(), seconds)
    raise Cancelled("stopped")


@registry.tool("slow.text")
async def text(ctx: ToolContext, text: str) -> dict:
    """Give a text back, as the agent tools do."""
    return {"content": text}


@registry.tool("slow.evil")
async def evil(ctx: ToolContext) -> dict:
    """Evil \\x1b[31m words."""
    raise Failed("bad \\x1b[2J thing")


async def main():
    shutdown = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.set)
    with contextlib.suppress(Shutdown):
        await NodeClient(node_info=NodeInfo.from_env("slow", "0.1.0")).run(registry, shutdown)

asyncio.run(main())
'''


class Outcome:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err

    def json(self) -> Any:
        """The one document on standard output; anything beside it is an error."""
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"<{self.status} out={self.out[:1000]!r} err={self.err[:1000]!r}>"


class Command:
    """`farhand …` with a home of its own and nothing of the tester's environment."""

    def __init__(self, home: Path, **env: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SA_", "FARHAND_", "NO_COLOR"))}
        self.env = {**clean, "FARHAND_HOME": str(home), "TERM": "xterm-256color", **env}

    def with_env(self, **env: str) -> Command:
        other = Command(Path(self.env["FARHAND_HOME"]))
        other.env = {**self.env, **env}
        return other

    def __call__(self, *arguments: str, stdin: str = "", seconds: float = 60) -> Outcome:
        pipe = subprocess.PIPE
        process = start_process([*FARHAND, *arguments], self.env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            out, err = process.communicate(stdin, seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Outcome(process.wait(), out, err)

    def start(self, *arguments: str) -> subprocess.Popen[str] | ForkedProcess:
        return start_process(
            [*FARHAND, *arguments], self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def on_terminal(self, *arguments: str, columns: int = 80) -> str:
        """What appears on a terminal of that width."""
        main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        env = {key: value for key, value in self.env.items() if key not in ("COLUMNS", "LINES")}
        process = start_process([*FARHAND, *arguments], env, stdout=terminal, stderr=terminal)
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal disappears when no process has it open
            while piece := os.read(main, 65536):
                shown += piece
        os.close(main)
        process.wait(60)
        return shown.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def command(shared_gateway: GatewayProcess) -> Command:
    return Command(shared_gateway.home)


@pytest.fixture(scope="module")
def hello(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginProcess]:
    """The example plug-in, connected as `hello`; its folder holds notes.txt."""
    folder = tmp_path_factory.mktemp("hello")
    (folder / "notes.txt").write_text("buy milk\n")
    with PluginProcess(ROOT / "examples/hello_node.py", folder, node_env(shared_gateway, "hello", folder)) as process:
        shared_gateway.wait_for_node("hello")
        yield process


@pytest.fixture(scope="module")
def slow(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginProcess]:
    """A plug-in whose tools take their time, or fail; connected as `slow`."""
    folder = tmp_path_factory.mktemp("slow")
    with PluginProcess(SLOW_NODE, folder, node_env(shared_gateway, "slow", folder)) as process:
        shared_gateway.wait_for_node("slow")
        yield process


def node_env(gateway: GatewayProcess, node_id: str, folder: Path) -> dict[str, str]:
    return {
        "SA_GATEWAY_WS_URL": gateway.ws_url,
        "SA_NODE_TOKEN": SHARED_TOKEN,
        "SA_NODE_ID": node_id,
        "SA_ALLOWED_DIR": str(folder),
    }
