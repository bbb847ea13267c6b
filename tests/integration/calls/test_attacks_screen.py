"""A hostile node sends control sequences: none of them reaches the terminal of a user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.integration.nodes.test_attacks_nodes import joined
from tests.support.fork_server import FARHAND, start_process
from tests.support.harness import PATIENCE, GatewayProcess
from tests.unit.sdk.wire import asynchronous

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
COMMAND = {"output": ESCAPES, "durationMs": 1, "exitCode": 1, "signal": None, "status": "failed"}
FAILURE = {"ok": False, "error": {"kind": ESCAPES, "message": ESCAPES}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("screen") / "home") as gateway:
        yield gateway


def on_terminal(gateway: GatewayProcess, *arguments: str) -> str:
    """Return what a command shows on a terminal without colours."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "FARHAND_HOME": str(gateway.home), "NO_COLOR": "1"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    with start_process([*FARHAND, *arguments], environment, **streams) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
        process.wait(PATIENCE)
    return shown.decode().replace("\r\n", "\n")


@contextlib.asynccontextmanager
async def answering(gateway: GatewayProcess, answer: dict[str, Any]) -> AsyncIterator[None]:
    """A node that ends each call with this answer."""
    async with joined(gateway, "evil", features=["cancel", "tools"], tools=[{"name": "evil.x"}]) as node:

        async def answer_calls() -> None:
            answered = 0
            while True:
                requests = [one for one in node.heard if one["type"] == "tool_request"]
                for request in requests[answered:]:
                    await node.send({"type": "tool_response", "request_id": request["request_id"], **answer})
                answered = len(requests)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(answer_calls())
        try:
            yield
        finally:
            task.cancel()


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (FAILURE, "owned"),
        ({"ok": True, "result": f"a\tb\n{ESCAPES}"}, "a       b\n"),
        ({"ok": True, "result": {"content": ESCAPES}}, "owned"),
        ({"ok": True, "result": {**COMMAND, "status": ESCAPES}}, "exit status 1"),
        ({"ok": True, "result": {**COMMAND, "exitCode": ESCAPES}}, "exit status"),
        ({"ok": True, "result": {**COMMAND, "signal": ESCAPES}}, "ended by"),
        ({"ok": True, "result": {**COMMAND, "durationMs": ESCAPES}}, "exit status 1"),
        ({"ok": True, "result": {"output": ESCAPES}}, "exit status None"),
    ],
)
@asynchronous
async def test_the_end_of_a_call(gateway: GatewayProcess, answer: dict[str, Any], shown: str) -> None:
    async with answering(gateway, answer):
        screen = await asyncio.to_thread(on_terminal, gateway, "call", "evil.x", "--follow")
    assert shown in screen or shown.replace("       ", "\t") in screen, screen
    assert "mistake in Farhand" not in screen
    assert all(character.isprintable() or character in "\n\t" for character in screen), repr(screen)


def test_errors_of_the_command_line(gateway: GatewayProcess) -> None:
    screen = on_terminal(gateway, "cp", f"evil{ESCAPES}:/x", "/dev/null/x")
    assert "owned" in screen  # the progress bar has escape sequences of its own
    assert not any(part in screen for part in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e")), repr(screen)
