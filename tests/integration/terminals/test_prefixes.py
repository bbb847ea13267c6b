"""Ids that are typed only in part, and the status of failed commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.terminals.test_run import Runner
from tests.support.harness import GatewayProcess, NodeProcess


@pytest.fixture
def farhand(shared_gateway: GatewayProcess, hands: NodeProcess) -> Iterator[Runner]:
    yield Runner(shared_gateway)


def test_any_unique_beginning_of_an_id_is_enough(farhand: Runner) -> None:
    gateway = farhand.gateway
    first = gateway.invoke("hands__Bash", {"command": "echo first"})["request_id"]
    second = gateway.invoke("hands__Bash", {"command": "echo second"})["request_id"]
    same = len([a for a, b in zip(first, second, strict=True) if a == b and first.startswith(second[:9])])
    assert same  # ids begin with the time, so these two begin alike
    assert gateway.get(f"/v1/calls/{second[:-2]}")["id"] == second
    assert gateway.request("GET", f"/v1/calls/{second[:-2]}/output?wait=0").body == b"second\n"
    answer = gateway.request("GET", f"/v1/calls/{first[:6]}")
    assert answer.status == 409 and first in answer.json()["error"]["message"], answer
    assert gateway.request("GET", f"/v1/calls/{'f' * 12}").status == 404
    for odd in ("%25%25%25%25", "....", "____", first[:3]):
        assert gateway.request("GET", f"/v1/calls/{odd}").status == 404, odd
    made = gateway.request("POST", "/v1/tokens", {"scopes": ["read"]}).json()
    assert farhand("token", "revoke", made["id"][:6]).returncode == 0
    assert gateway.request("GET", "/v1/nodes", token=made["token"]).status == 401


@pytest.mark.parametrize(
    ("command", "status"), [("true", 0), ("exit 3", 1), ("kill -9 $$", 1), ("sleep 1000", 1), ("no-such-program", 1)]
)
def test_call_fails_with_its_command(farhand: Runner, command: str, status: int) -> None:
    words = ["call", "hands__Bash", f"command={command}", "timeout=800"] if "sleep" in command else []
    assert farhand(*(words or ["call", "hands__Bash", f"command={command}"])).returncode == status


def test_a_followed_call_fails_with_its_command(farhand: Runner) -> None:
    done = farhand("call", "--follow", "hands__Bash", "command=echo out; exit 3")
    assert done.returncode == 1 and done.stdout == b"out\n"
    assert farhand("call", "hands__Bash", "command=exit 3", "background=true").returncode == 0
    assert farhand("call", "exec", "command=exit 3").returncode == 1
