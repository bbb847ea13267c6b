"""`[sandbox]` confines the nodes of its home, the one beside `farhand up` included, as it confines `exec`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.node.names import default_node_id
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

HERE = default_node_id()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("up") / "home"
    home.mkdir()
    (home / "farhand.toml").write_text("[sandbox]\nenabled = true\n")
    with GatewayProcess(home, command="up") as gateway:
        gateway.wait_for_node(HERE, seconds=30)
        yield gateway


def call(gateway: GatewayProcess, tool: str, **args: Any) -> Any:
    return gateway.invoke(f"{HERE}__{tool}", args)


def output(gateway: GatewayProcess, command: str) -> str:
    answer = call(gateway, "Bash", command=command)
    assert answer["ok"], answer
    return str(answer["result"]["output"])


def test_bash_of_the_node_beside_the_gateway_sees_the_sandbox_alone(up: GatewayProcess, tmp_path: Path) -> None:
    workspace = up.home / "agents/main"
    assert call(up, "Write", path="notes/a.txt", content="a\n")["ok"]
    assert output(up, "echo x > notes/a.txt; cat notes/a.txt; pwd") == f"x\n{workspace}\n"
    assert (workspace / "notes/a.txt").read_text() == "x\n"
    assert "No such file" in output(up, f"cat {up.home}/token")
    assert "No such file" in output(up, f"cat {up.home}/farhand.toml")
    output(up, f"mkdir -p {tmp_path}; touch {tmp_path}/planted")
    assert not (tmp_path / "planted").exists()
    assert output(up, "cat /proc/sys/kernel/hostname") == "sandbox\n"
    assert output(up, "cat /proc/net/dev | grep -vc lo:") == "2\n", "no interface but the loopback"
    outside = call(up, "Bash", command="pwd", workdir=str(tmp_path))
    assert outside["error"]["kind"] == "not_allowed", outside


def test_no_command_of_the_node_beside_the_gateway_steers_the_agent(up: GatewayProcess) -> None:
    """Not even one of the owner: a node does not know for whom it works."""
    workspace = up.home / "agents/main"
    assert call(up, "Write", path="notes/b.txt", content="b\n")["ok"]
    for command in (
        "for name in SOUL.md HEARTBEAT.md AGENTS.md; do echo evil > $name; done",
        "mkdir -p skills/x && echo evil > skills/x/SKILL.md",
        "cp notes/b.txt notes/SOUL.md; mv notes/SOUL.md SOUL.md",
        f"cd .. && mv main old; mkdir {workspace}/skills",
    ):
        for more in ({}, {"terminal": "80x24"}):
            call(up, "Bash", command=command, **more)
    wait_until(lambda: not any(job["running"] for job in up.get("/v1/jobs")["jobs"]), 30, "the end of the commands")
    assert not [name for name in ("SOUL.md", "HEARTBEAT.md", "AGENTS.md", "skills") if (workspace / name).exists()]


def test_background_commands_are_confined_and_can_be_ended(up: GatewayProcess) -> None:
    started = call(up, "Bash", command=f"cat {up.home}/token; cat", background=True)
    session = started["result"]["sessionId"]

    def poll() -> Any:
        return call(up, "Process", action="poll", sessionId=session)["result"]

    wait_until(lambda: "No such file" in poll()["tail"], 20, "the output")
    assert call(up, "Process", action="kill", sessionId=session)["ok"] is True
    wait_until(lambda: not poll()["running"], 20, "the end")


def test_the_file_tools_reach_what_the_sandbox_can_write(up: GatewayProcess, tmp_path: Path) -> None:
    """A file elsewhere, a start-up script for example, could make something run outside of the sandbox later."""
    (tmp_path / "file.txt").write_text("here\n")
    assert call(up, "Write", path=f"{tmp_path}/new.txt", content="x")["error"]["kind"] == "not_allowed"
    assert call(up, "Read", path=f"{tmp_path}/file.txt")["error"]["kind"] == "not_allowed"
    transfer = {"source": f"{HERE}:{tmp_path}/file.txt", "destination": "gsv:agents/main/got.txt"}
    assert up.invoke("gsv__Transfer", transfer)["error"]["kind"] == "not_allowed"
    assert call(up, "Write", path="inside.txt", content="x")["ok"] is True
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_sandbox_that_is_switched_on_holds_for_the_next_command(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    settings = state / "farhand.toml"
    settings.write_text("[sandbox]\nenabled = false\n")
    (tmp_path / "seen.txt").write_text("seen\n")
    with NodeProcess(shared_gateway, tmp_path, "switched", state=state) as node:
        look = {"command": f"cat {tmp_path}/seen.txt"}
        assert node.ok("Bash", look)["output"] == "seen\n"
        settings.write_text("[sandbox]\nenabled = true\n")
        wait_until(lambda: "No such file" in node.ok("Bash", look)["output"], 10, "the sandbox")
        settings.write_text('[sandbox]\nenabled = true\nuser = "no such person"\n')
        message = ""

        def refused() -> bool:
            nonlocal message
            answer = shared_gateway.invoke("switched__Bash", {"command": "touch ran"})
            message = "" if answer["ok"] else answer["error"]["message"]
            return not answer["ok"]

        wait_until(refused, 10, "the refusal")
        assert "no such person" in message and "did not run" in message


def test_without_bubblewrap_nothing_runs(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    state, programs = tmp_path / "state", tmp_path / "programs"
    state.mkdir(), programs.mkdir()
    (state / "farhand.toml").write_text('[sandbox]\nenabled = true\nlevel = "bubblewrap"\n')
    with NodeProcess(shared_gateway, tmp_path, "bare", state=state, env={"PATH": str(programs)}) as node:
        message = node.fails("Bash", {"command": "touch ran"}, "failed")
        assert "bwrap" in message and not (node.workspace / "ran").exists()
