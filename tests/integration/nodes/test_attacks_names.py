"""Attempts of a node to be taken for another by its name, and of callers to reach a closed node by another spelling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import websockets

from tests.integration.calls.test_approvals import write_policy
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, hello_frame

RULES = """
[[policy.rules]]
name = "closed"
decision = "deny"
node = "hands"
"""


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    home = tmp_path_factory.mktemp("names") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        (node.workspace / "x").write_text("secret")
        yield node


async def hello(gateway: GatewayProcess, node_id: str) -> str:
    """Join with the shared token; return the type of the answer, or why the gateway closed the connection."""
    url = f"{gateway.ws_url}?token={SHARED_TOKEN}&node_id={quote(node_id)}"
    async with websockets.connect(url, ping_interval=None, close_timeout=2) as socket:
        await socket.send(json.dumps(hello_frame(node_id, ["test"])))
        try:
            return str(json.loads(await socket.recv())["type"])
        except websockets.ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.reason


@pytest.mark.parametrize(
    "node_id",
    [
        "gsv",
        "GSV",
        "gsv:x",
        "hands:x",
        "hands:x:y",
        "Hands",
        "h\u0430nds",
        "hands ",
        "hands\u200b",
        "\u202ehands",
        "hands__x",
        "../hands",
        "a/b",
        "\n",
        "nul\0",
        "x" * 500,
    ],
)
def test_no_node_is_taken_for_another_or_for_the_gateway(hands: NodeProcess, node_id: str) -> None:
    answered = asyncio.run(hello(hands.gateway, node_id))
    assert answered != "gateway_welcome"
    assert [node["node_id"] for node in hands.gateway.get("/v1/nodes")["nodes"]] == ["hands"]


def test_an_id_with_a_colon_of_its_own_is_accepted(tmp_path_factory: pytest.TempPathFactory) -> None:
    with GatewayProcess(tmp_path_factory.mktemp("colon") / "home") as gateway:
        assert asyncio.run(hello(gateway, "lab:1")) == "gateway_welcome"


@pytest.mark.parametrize(
    "tool",
    [
        "hands__Read",
        "hands__read",
        "HANDS__Read",
        " hands__Read",
        "hands__Read ",
        "hands__Read\u200b",
        "hands__\uff32ead",
        "hands____Read",
        "hands__filesystem.read",
        "filesystem.read",
        "Read",
        "hands.Read",
        "gsv__hands__Read",
    ],
)
def test_a_closed_node_cannot_be_reached_by_another_name(hands: NodeProcess, tool: str) -> None:
    called = hands.gateway.invoke(tool, {"path": "x"})
    assert called["ok"] is False and "secret" not in str(called), called


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/nodes/hands/logs", None),
        ("POST", "/v1/nodes/hands/probe", {"bins": ["ls"]}),
        ("GET", "/v1/transfers/content?source=hands:x", None),
        ("GET", "/v1/transfers/manifest?source=hands:.", None),
        ("POST", "/v1/transfers", {"source": "hands:x", "destination": "gsv:y"}),
        ("POST", "/v1/transfers", {"source": "HANDS:x", "destination": "gsv:y"}),
        ("POST", "/v1/tools/fanout", {"tool": "Read", "args": {"path": "x"}, "nodes": ["hands"]}),
    ],
)
def test_a_closed_node_cannot_be_reached_in_another_way(hands: NodeProcess, method: str, path: str, body: Any) -> None:
    answered = hands.gateway.request(method, path, body)
    assert b"secret" not in answered.body
    if answered.status == 200:
        assert b'"denied"' in answered.body, answered
    else:
        assert answered.status in (403, 404), answered
