"""`GET /v1/nodes/{id}/metrics`: what nodes report of themselves, and what a hostile one may report."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, hello_frame, wait_until


def samples(gateway: GatewayProcess, node_id: str, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.request("GET", f"/v1/nodes/{node_id}/metrics{query}").json()["samples"]
    return found


def test_a_node_reports_how_busy_it_is(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    wait_until(lambda: len(samples(shared_gateway, "hands")) >= 2)
    first, second = samples(shared_gateway, "hands")[:2]
    assert set(first) == {"at", "cpu", "memory", "memory_total", "disk", "disk_total", "load"}
    assert 0 <= first["cpu"] <= 100 and 0 < first["memory"] < first["memory_total"]
    assert 0 < first["disk"] <= first["disk_total"] and first["load"] >= 0
    assert second["at"] - first["at"] >= 9_000
    assert samples(shared_gateway, "hands", f"?since={second['at']}")[0] == second


def test_who_and_since_are_checked(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    assert shared_gateway.request("GET", "/v1/nodes/nobody/metrics").status == 404
    for since in ("x", "-1", "9" * 30):
        assert shared_gateway.request("GET", f"/v1/nodes/hands/metrics?since={since}").status == 400


def test_a_hostile_node_adds_no_sample(shared_gateway: GatewayProcess) -> None:
    async def lie() -> None:
        async with PlainNode.connect(shared_gateway, "liar", hello=False) as node:
            await node.send(hello_frame("liar", ["test"], farhand={"features": ["query.metrics"]}))
            while (query := await node.receive())["type"] != "node_query":
                pass
            assert query["kind"] == "metrics"
            result = {"cpu": 1e308, "memory": 1, "memory_total": 2, "disk": 1, "disk_total": 2, "load": 0}
            await node.send({"type": "node_answer", "query_id": query["query_id"], "result": result})
            await node.send({"type": "ping", "timestamp": 1})
            while (await node.receive())["type"] != "pong":
                pass
            assert samples(shared_gateway, "liar") == []

    asyncio.run(lie())
