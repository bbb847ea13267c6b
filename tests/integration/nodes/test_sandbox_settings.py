"""`[sandbox]` gives `exec` and the node of `farhand up` what `farhand node --root` has: level, network and limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.node.names import default_node_id
from tests.integration.cli.conftest import Command
from tests.integration.nodes.test_lent_folder_shell import FETCH, LEVELS, server
from tests.support.harness import GatewayProcess, wait_until

__all__ = ["server"]  # a fixture
NODE = default_node_id()
MIB = 1024**2


class House:
    def __init__(self, gateway: GatewayProcess, level: str) -> None:
        self.gateway, self.level = gateway, level
        self.settings = gateway.home / "farhand.toml"
        self.workspace = gateway.home / "agents" / "main"

    def set(self, *lines: str) -> None:
        self.settings.write_text("\n".join(["[sandbox]", "enabled = true", f'level = "{self.level}"', *lines, ""]))

    def run(self, way: str, command: str) -> str:
        """Return the output of a command, or the error of the call."""
        answer = self.gateway.invoke("exec" if way == "exec" else f"{NODE}__Bash", {"command": command})
        if not answer["ok"]:
            return str(answer["error"]["message"])
        return str(answer["result"]["output"] if way == "node" else answer["result"]["content"])


@pytest.fixture(scope="module", params=LEVELS)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("house") / "home"
    (home / "agents" / "main" / "work").mkdir(parents=True)
    home.chmod(0o700)
    settings = f'[sandbox]\nenabled = true\nlevel = "{request.param}"\nmemory = "1G"\ndisk = "8M"\n'
    (home / "farhand.toml").write_text(settings)
    with GatewayProcess(home, command="up") as gateway:
        gateway.wait_for_node(NODE, seconds=60)
        yield House(gateway, request.param)


WAYS = pytest.mark.parametrize("way", ["exec", "node"])


def test_what_holds_is_shown(house: House) -> None:
    limits = next(node for node in house.gateway.get("/v1/nodes")["nodes"] if node["node_id"] == NODE)["runtime"][
        "limits"
    ]
    assert limits["sandbox"] == house.level and limits["network"] == "none"
    assert limits["memory"] == "1G" and limits["disk"] == "8M" and limits["limits"] in ("cgroup", "rlimits")
    doctor = Command(house.gateway.home)("doctor").out
    assert f"works: {house.level}, network none, memory 1G, disk 8M" in " ".join(doctor.split()), doctor


@WAYS
def test_only_the_workspace_is_seen_and_steering_files_stay(house: House, way: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret\n")
    (house.workspace / "SOUL.md").write_text("Be kind.\n")
    (house.workspace / "SOUL.md").chmod(0o644)
    for command in (
        f"cat {tmp_path}/secret {house.gateway.home}/token {house.settings}",
        f"touch {tmp_path}/new; chmod 777 {tmp_path} /usr /etc/passwd",
    ):
        assert "the secret" not in house.run(way, command)
    assert not (tmp_path / "new").exists()
    assert "made" in house.run(way, "echo made > work/file; cat work/file")
    if way == "node":  # the owner's `exec` may steer
        for command in ("echo evil > SOUL.md", "chmod 0 SOUL.md", "rm SOUL.md", "touch HEARTBEAT.md; mkdir skills"):
            house.run(way, command)
        assert (house.workspace / "SOUL.md").read_text() == "Be kind.\n"
        assert (house.workspace / "SOUL.md").stat().st_mode & 0o777 == 0o644
        assert not (house.workspace / "HEARTBEAT.md").exists() and not (house.workspace / "skills").exists()


@WAYS
def test_limits_hold(house: House, way: str) -> None:
    bomb = house.run(way, "/usr/bin/python3 -c 'x = bytearray(3 * 1024**3)' 2>&1")
    assert "MemoryError" in bomb or "Killed" in bomb, bomb
    fill = "cd work; for i in $(seq 20); do head -c 1048576 /dev/zero > f$i; done; sleep 60"
    assert "its limit (disk) is 8388608" in house.run(way, fill)
    house.run(way, "rm -f work/f*")


@WAYS
def test_network_rules_hold_and_change_without_a_restart(house: House, way: str, server: int) -> None:
    (house.workspace / "work" / "fetch.py").write_text(FETCH)
    fetch = f"env -u no_proxy -u NO_PROXY /usr/bin/python3 work/fetch.py http://localhost:{server}/x 2>&1"

    def answer(wanted: str) -> Any:
        return wait_until(lambda: wanted in house.run(way, fetch), 60, wanted)

    house.set('network = "allow:localhost"')
    answer(f"hello /x localhost:{server}")
    house.set('network = "allow:example.com"')
    answer("403")
    house.set('network = "local"')
    answer(f"hello /x localhost:{server}")
    house.set()
    answer("Connection refused")


@WAYS
def test_a_missing_mount_is_refused_with_the_reason(house: House, way: str) -> None:
    house.set('mounts = [{ host = "/no/such/folder" }]')
    wait_until(lambda: "'/no/such/folder' does not exist" in house.run(way, "touch work/ran"), 60, "the refusal")
    assert not (house.workspace / "work" / "ran").exists()
    house.set()
    wait_until(lambda: "fine" in house.run(way, "echo fine"), 60, "the sandbox")
