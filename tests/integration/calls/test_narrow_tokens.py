"""Tokens limited to some tools, nodes or a period: no route bypasses the limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.api.server.router import PUBLIC
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, wait_until


@pytest.fixture(scope="module")
def hands(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(shared_gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        (node.workspace / "note.txt").write_text("hi\n")
        yield node


def made(gateway: GatewayProcess, *options: str) -> str:
    return str(Command(gateway.home)("token", "create", *options, "--json").json()["token"])


def call(gateway: GatewayProcess, token: str, tool: str, args: Any = None) -> Any:
    answer = gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args or {}}, token=token)
    return answer.json() if answer.status == 200 else answer.status


READ = {"path": "note.txt"}
TOUCH = {"command": "touch touched"}


def test_a_token_for_one_tool_reaches_that_tool_alone(hands: NodeProcess) -> None:
    token = made(hands.gateway, "--tool", "hands__Read")
    assert call(hands.gateway, token, "hands__Read", READ)["ok"] is True
    for tool, args in (("hands__Bash", TOUCH), ("gsv__ReadFile", READ), ("read", READ), ("exec", TOUCH)):
        answer = call(hands.gateway, token, tool, args)
        assert answer["ok"] is False and answer["error"]["kind"] == "not_allowed", (tool, answer)
    assert not (hands.workspace / "touched").exists()


def test_a_token_for_one_node_reaches_that_node_alone(hands: NodeProcess, tmp_path: Path) -> None:
    token = made(hands.gateway, "--node-only", "hands")
    assert call(hands.gateway, token, "hands__Bash", {"command": "true"})["ok"] is True
    for tool in ("gsv__ReadFile", "read"):
        assert call(hands.gateway, token, tool, READ)["error"]["kind"] == "not_allowed"
    with NodeProcess(hands.gateway, tmp_path, "feet"):
        assert call(hands.gateway, token, "feet__Bash", TOUCH)["error"]["kind"] == "not_allowed"


# Whatever comes through these passes the gate as the token's own call.
GATED = ("/v1/tools/invoke", "/v1/tools/fanout", "/agent/process", "/mcp", "/v1/calls/{call_id}/undo")
# Lists only what the token may call.
GATED += ("/v1/tools", "/v1/terminals")
# Shows the token its own budget; setting one needs `admin`.
GATED += ("/v1/budgets",)
OF_A_CALL = ("/v1/calls/{call_id}/", "/v1/trials/", "/v1/terminals/")


def test_no_route_bypasses_it(hands: NodeProcess) -> None:
    """Of every route but those that pass the gate, or only read with a scope the token lacks."""
    gateway, token = hands.gateway, made(hands.gateway, "--tool", "hands__Read")
    paths = gateway.get("/v1/openapi.json")["paths"]
    tried = 0
    for path, methods in paths.items():
        if path in (*PUBLIC, *GATED):
            continue
        for method in methods:
            body = None if method in ("get", "delete") else {}
            status = gateway.request(method.upper(), path.replace("{", "").replace("}", ""), body, token=token).status
            # What belongs to a call is for its own caller; any other call is as if it did not exist.
            refused = (403, 404) if path.startswith(OF_A_CALL) else (403,)
            assert status in refused, (method, path, status)
            tried += 1
    chat = gateway.request("POST", "/agent/process", {"session_id": "s", "user_id": "u", "input": []}, token=token)
    assert chat.status in (400, 403), chat
    print(f"other doors: {tried} tried, {tried} shut")
    assert tried > 30


@pytest.mark.parametrize("scope", ["chat", "pair", "admin", "approve"])
def test_a_narrowed_token_has_no_right_that_gets_round_it(hands: NodeProcess, scope: str) -> None:
    body = {"scopes": [scope], "tools": ["hands__Read"]}
    assert hands.gateway.request("POST", "/v1/tokens", body).status == 400


def test_a_token_ends_by_itself(hands: NodeProcess) -> None:
    body = {"scopes": ["tools.read"], "expires_seconds": 1.5}
    token = hands.gateway.request("POST", "/v1/tokens", body).json()
    until = token["expires_at"] / 1000
    assert call(hands.gateway, token["token"], "hands__Read", READ)["ok"] is True
    wait_until(lambda: time.time() > until, 5, "the end of the token")
    assert call(hands.gateway, token["token"], "hands__Read", READ) == 401
    node = hands.gateway.request("POST", "/v1/tokens", {"node_id": "brief", "expires_seconds": 0.01}).json()
    wait_until(lambda: time.time() > node["expires_at"] / 1000, 5, "the end of the node's token")
    assert hands.gateway.upgrade(f"token={node['token']}&node_id=brief").status == 401
    shown = Command(hands.gateway.home)("token", "list").out
    assert "expired" in shown


@pytest.mark.parametrize(
    "options", [["--expires", "soon"], ["--expires", "0h"], ["--tool", "a b"], ["--node-only", "gsv"]]
)
def test_invalid_options_are_refused(hands: NodeProcess, options: list[str]) -> None:
    done = Command(hands.gateway.home)("token", "create", *options, "--json")
    assert done.status in (1, 2) and "error" in done.json()


def test_the_beginning_of_an_id_leads_to_no_other_call(hands: NodeProcess) -> None:
    gateway = hands.gateway
    ids = [gateway.invoke("hands__Bash", {"command": "true"})["request_id"] for _ in range(2)]
    start = ids[0][:6]
    assert start == ids[1][:6]
    assert gateway.request("GET", f"/v1/calls/{start}").status == 409, "for the owner, several calls begin so"
    for options in (["--node-only", "hands"], ["--tool", "hands__*"], ["--scope", "tools.exec"]):
        token = made(gateway, *options)
        for method, path in (
            ("POST", f"/v1/calls/{start}/undo"),
            ("POST", f"/v1/calls/{start}/input"),
            ("DELETE", f"/v1/terminals/{start}"),
            ("POST", f"/v1/trials/{start}/keep"),
        ):
            answer = gateway.request(method, path, {} if method == "POST" else None, token=token)
            assert answer.status in (403, 404), (options, path, answer)
            assert ids[0] not in answer.body.decode() and ids[1] not in answer.body.decode()
