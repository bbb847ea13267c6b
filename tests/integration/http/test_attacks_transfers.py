"""Attacks through the HTTP routes of transfers: round the policy, and by holding the transfers of a node up."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.integration.calls.test_approvals import write_policy
from tests.integration.calls.test_principal import revoke, token
from tests.support.harness import GatewayProcess, NodeProcess

RULES = """
[[policy.rules]]
name = "no etc"
decision = "deny"
args = { path = "/etc/*" }

[[policy.rules]]
name = "private files are asked about"
decision = "ask"
args = { path = "private/*" }
"""
CONTENT = "/v1/transfers/content"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("transfers") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def hands(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        (node.workspace / "private").mkdir()
        (node.workspace / "private" / "note").write_text("x")
        (node.workspace / "big.bin").write_bytes(bytes(5_000_000))
        (node.workspace / "small").write_text("x")
        yield node


def statuses(gateway: GatewayProcess, path: str, inside: Path) -> dict[str, int]:
    """The answers of every route that reads or writes a path of the node."""
    end, folder = quote(f"hands:{path}"), quote(f"hands:{inside.parent}/")
    bodies = [
        {"source": f"hands:{path}", "destination": "gsv:taken"},
        {"source": "hands:small", "destination": f"hands:{path}"},
    ]
    return {
        "begin from": gateway.request("POST", "/v1/transfers", bodies[0]).status,
        "begin to": gateway.request("POST", "/v1/transfers", bodies[1]).status,
        "download": gateway.request("GET", f"{CONTENT}?source={end}").status,
        "head": gateway.request("HEAD", f"{CONTENT}?source={end}").status,
        "manifest": gateway.request("GET", f"/v1/transfers/manifest?source={end}").status,
        "upload": gateway.request("PUT", f"{CONTENT}?destination={end}", b"x").status,
        "upload into": gateway.request("PUT", f"{CONTENT}?destination={folder}&name={inside.name}", b"x").status,
    }


def test_the_policy_holds_for_every_route_of_transfers(gateway: GatewayProcess, hands: NodeProcess) -> None:
    found = statuses(gateway, "/etc/farhand-transfers", Path("/etc/farhand-transfers"))
    assert set(found.values()) == {403}, found
    assert not Path("/etc/farhand-transfers").exists()
    found = statuses(gateway, "private/note", hands.workspace / "private" / "note")
    assert set(found.values()) == {403}, found
    assert (hands.workspace / "private" / "note").read_text() == "x"
    asked = gateway.request("GET", f"{CONTENT}?source={quote('hands:private/note')}").json()["error"]
    assert "asks the owner" in asked["message"] and "gsv__Transfer" in asked["message"], asked
    allowed = gateway.request("GET", f"{CONTENT}?source={quote('hands:small')}")
    assert (allowed.status, allowed.body) == (200, b"x")


def test_downloads_that_are_not_read_do_not_hold_up_a_node(gateway: GatewayProcess, hands: NodeProcess) -> None:
    name, reader = token(gateway, "tools.read")
    path = f"{CONTENT}?source={quote('hands:big.bin')}"
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            head = gateway.request("HEAD", path, token=reader, timeout=20)
            assert (head.status, head.headers["content-length"], head.body) == (200, "5000000", b"")
        for _ in range(5):  # these are never read
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
            stack.callback(connection.close)
            connection.request("GET", path, headers={"Authorization": f"Bearer {reader}"})
        moved = gateway.request(
            "POST", "/v1/transfers", {"source": "hands:small", "destination": "gsv:small"}, timeout=20
        )
        assert moved.status == 200, moved
        revoke(gateway, name)
    running = [one for one in gateway.get("/v1/transfers")["transfers"] if one["state"] == "running"]
    assert len(running) <= 3, running


def test_cancelling_shows_records_of_others_only_to_readers(gateway: GatewayProcess, hands: NodeProcess) -> None:
    _, writer = token(gateway, "tools.exec")
    body = {"tool": "exec", "args": {"command": "echo words-of-the-owner"}}
    ran = gateway.request("POST", "/v1/tools/invoke", body).json()
    moved = gateway.request("POST", "/v1/transfers", {"source": "hands:small", "destination": "gsv:secret-name"}).json()
    for path, words in ((f"/v1/calls/{ran['request_id']}", b"words-of"), (f"/v1/transfers/{moved['id']}", b"secret-n")):
        shown = gateway.request("DELETE", path, token=writer)
        assert shown.status == 200 and words not in shown.body, shown
        assert words in gateway.request("DELETE", path).body
    own = gateway.request("POST", "/v1/tools/invoke", body, token=writer).json()
    assert b"words-of" in gateway.request("DELETE", f"/v1/calls/{own['request_id']}", token=writer).body
