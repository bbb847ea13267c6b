"""Attempts of an attacker that nodes withstand: what changes while the node looks at it, and other gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets

from farhand.gateway.nodes.registry import JOINS_AT_ONCE
from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.sandbox.levels import ChosenSandbox, SandboxPlan, writable_mounts
from farhand.machine.sandbox.trials import _remove
from farhand.machine.search.grep import grep_files
from farhand.protocol.errors import Failed
from farhand.protocol.freeze import FreezeOrder, FreezeState
from farhand.protocol.messages import NodeFreeze, NodeThaw
from farhand.sdk.accepted_calls import AcceptedCalls
from farhand.sdk.dispatcher import Dispatcher
from farhand.sdk.freeze import FreezeHandler
from farhand.sdk.registry import ToolRegistry
from tests.integration.nodes.test_lent_folder_shell import LEVELS
from tests.support.harness import PATIENCE, SHARED_TOKEN, GatewayProcess, NodeProcess, hello_frame
from tests.unit.sdk.wire import asynchronous

# Exchanges two names as fast as it can.
EXCHANGE = """
import ctypes, sys
libc = ctypes.CDLL(None)
one, two = (name.encode() for name in sys.argv[1:])
print(flush=True)
while True:
    libc.renameat2(-100, one, -100, two, 2)
"""


@contextlib.contextmanager
def exchanging(one: Path, two: Path) -> Iterator[None]:
    """Exchange two paths all the time, as a command in a lent folder can."""
    words = [sys.executable, "-I", "-S", "-c", EXCHANGE, str(one), str(two)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


# -- what changes while the node looks at it ------------------------------------------------------------------------


def test_a_search_does_not_tell_whether_the_target_of_a_link_matches(tmp_path: Path) -> None:
    """A link that was a file again when the line was read was reported, so patterns could spell out any file."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("first line\nwhat is not lent\n")
    (root / "file").write_text("some line\n" * 5)
    (root / "link").symlink_to(tmp_path / "secret")
    files = Files(root, roots=[ConfinedRoot(root)])
    with exchanging(root / "file", root / "link"):
        found = [grep_files(files, "what is n.t", str(root)) for _ in range(150)]
    assert [matches for matches, _ in found if matches] == []


def test_removing_a_trial_does_not_change_the_modes_of_other_folders(tmp_path: Path) -> None:
    """Its command may still run, and put a link in the place of a folder."""
    outside, upper = tmp_path / "outside", tmp_path / "trial" / "upper0"
    (outside / "folder").mkdir(parents=True)
    with exchanging(upper / "folder", upper / "link"):
        for _ in range(60):
            (upper / "folder" / "folder").mkdir(parents=True)
            (upper / "link").symlink_to(outside)
            _remove(tmp_path / "trial")
            assert [stat.S_IMODE(one.stat().st_mode) for one in (outside, outside / "folder")] == [0o755, 0o755]
    _remove(tmp_path / "trial")
    assert not upper.exists()


@pytest.mark.parametrize("level", LEVELS)
def test_a_command_of_one_node_does_not_replace_the_folder_of_another(
    shared_gateway: GatewayProcess, tmp_path: Path, level: str
) -> None:
    """One is lent a folder, another one a folder in it: a link in its place led commands and trials anywhere."""
    root, other, outside = (tmp_path / name for name in ("root", "other", "outside"))
    inner = root / "inner"
    for folder in (inner, other, outside, tmp_path / "first", tmp_path / "second"):
        folder.mkdir(parents=True)
    (outside / "secret").write_text("what is not lent\n")
    above = ["--root", str(root), "--sandbox", level]
    within = ["--root", str(inner), "--root", str(other), "--sandbox", level]
    with (
        NodeProcess(shared_gateway, tmp_path / "first", f"above-{level}", *above) as first,
        NodeProcess(shared_gateway, tmp_path / "second", f"inner-{level}", *within) as second,
    ):
        second.ok("Bash", {"command": "true"})
        first.ok("Bash", {"command": f"cd {root}; mv inner moved; ln -s {outside} inner"})
        command = f"cat {inner}/secret {outside}/secret; touch {inner}/planted {outside}/planted"
        for more in ({}, {"trial": True}, {"workdir": str(other)}, {"workdir": str(other), "trial": True}):
            said = shared_gateway.invoke(f"inner-{level}__Bash", {"command": command, **more})
            assert "what is not lent" not in str(said) and not (outside / "planted").exists(), (more, said)
        first.ok("Bash", {"command": f"cd {root}; rm inner; mkdir inner"})
        second.ok("Bash", {"command": f"touch {inner}/made"})
        assert (inner / "made").exists()


@pytest.mark.parametrize("level", LEVELS)
def test_a_folder_that_is_replaced_while_a_command_starts_is_not_mounted(tmp_path: Path, level: str) -> None:
    inner, other, outside = (tmp_path / name for name in ("inner", "other", "outside"))
    for folder in (inner, other, outside):
        folder.mkdir()
    folders = [str(other), str(inner)]
    sandbox = ChosenSandbox(SandboxPlan(workspace=str(other), mounts=writable_mounts(folders, other), level=level))
    words = sandbox.words(str(other))
    inner.rename(tmp_path / "moved")
    inner.symlink_to(outside)
    command = f"touch {inner}/planted {outside}/planted"
    done = subprocess.run([*words, command], check=False, capture_output=True, text=True)
    assert done.returncode == 126 and "was replaced" in done.stderr, done
    assert not list(outside.iterdir())
    with pytest.raises(Failed, match="replaced by a link"):
        sandbox.words(str(other))


# -- several gateways -----------------------------------------------------------------------------------------------


@asynchronous
async def test_a_second_gateway_does_not_lift_the_freeze_of_the_first() -> None:
    """Its own order replaced the first one, and then it lifted that."""
    sent: list[str | bytes] = []
    handler = FreezeHandler(FreezeState(), None)
    dispatcher = Dispatcher(
        ToolRegistry(),
        ledger=AcceptedCalls(),
        max_concurrent=1,
        max_request_bytes=1000,
        max_response_bytes=1000,
        freeze_state=handler.freeze_state,
    )
    for number, gateway in enumerate(("first", "second"), 1):
        order = FreezeOrder(number, "owner", "why", gateway)
        handler.freeze(NodeFreeze(number, order), dispatcher, sent.append)
        while len(sent) < number:
            await asyncio.sleep(0)
    handler.thaw(NodeThaw(3, "second"), sent.append)
    assert handler.freeze_state.order is not None and handler.freeze_state.order.gateway_id == "first"
    handler.thaw(NodeThaw(4, "first"), sent.append)
    assert handler.freeze_state.order is None


# -- a node that fills the journal ----------------------------------------------------------------------------------


@asynchronous
async def test_a_node_writes_little_into_the_journal_by_connecting(shared_gateway: GatewayProcess) -> None:
    refused = 0
    for _ in range(JOINS_AT_ONCE + 40):
        url = f"{shared_gateway.ws_url}?token={SHARED_TOKEN}&node_id=flapping"
        async with websockets.connect(url, compression=None) as socket:
            await socket.send(json.dumps(hello_frame("flapping", ["flapping.x"])))
            try:
                await asyncio.wait_for(socket.recv(), PATIENCE)
            except websockets.ConnectionClosed as closed:
                assert closed.rcvd is not None and closed.rcvd.code == 1013, closed
                refused += 1
    assert refused
