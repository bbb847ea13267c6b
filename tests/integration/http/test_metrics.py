"""`/metrics` of a real gateway, read by Prometheus' own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, wait_until


def scraped(gateway: GatewayProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = gateway.request("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    found = [((s.name, frozenset(s.labels.items())), s.value) for family in families for s in family.samples]
    assert len(dict(found)) == len(found), "a sample is there twice"
    return dict(found)


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_calls_nodes_and_times_are_counted(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        node.ok("Write", {"path": "a", "content": "x"})
        node.ok("Read", {"path": "a"})
        node.fails("Read", {"path": "missing"}, "not_found")
        gateway.invoke("no.such.tool", {})
        gateway.invoke("gsv__ReadFile", {})
        call = node.begin("Bash", {"command": "sleep 60"})
        samples = scraped(gateway)
        assert value(samples, "farhand_calls_total", family="node", state="ok") == 2
        assert value(samples, "farhand_calls_total", family="node", state="error") == 1
        assert value(samples, "farhand_calls_total", family="unknown", state="error") == 1
        assert value(samples, "farhand_calls_total", family="native", state="ok") == 1
        assert value(samples, "farhand_call_duration_seconds_count", family="node", state="ok") == 2
        buckets = [
            (float(dict(labels)["le"]), count)
            for (name, labels), count in samples.items()
            if name == "farhand_call_duration_seconds_bucket" and {("family", "node"), ("state", "ok")} <= labels
        ]
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts) and counts[-1] == 2
        assert value(samples, "farhand_calls_open") == 1
        assert value(samples, "farhand_node_calls_open", node="hands") == 1
        assert value(samples, "farhand_nodes", state="online") == 1
        assert value(samples, "farhand_store_commits_total") > 0
        assert value(samples, "farhand_store_sync_seconds_count") > 0
        assert value(samples, "farhand_store_healthy") == 1
        assert value(samples, "farhand_frozen") == 0
        assert value(samples, "process_resident_memory_bytes") > 10_000_000
        assert value(samples, "process_open_fds") > 5
        gateway.request("DELETE", f"/v1/calls/{call}")
        node.stop()
        wait_until(lambda: value(scraped(gateway), "farhand_nodes", state="offline") == 1)
        samples = scraped(gateway)
        assert value(samples, "farhand_calls_total", family="node", state="cancelled") == 1
        assert value(samples, "farhand_calls_open") == 0


def test_rows_of_the_store_are_counted(shared_gateway: GatewayProcess) -> None:
    job = {"action": "add", "name": "j", "schedule": {"kind": "every", "everyMs": 3_600_000}, "message": "x"}
    shared_gateway.invoke("cron", job)
    samples = scraped(shared_gateway)
    names = {name for name, _ in samples}
    assert "farhand_sessions" in names and "farhand_store_waiting" in names
    assert value(samples, "farhand_info", version=shared_gateway.get("/version")["version"]) == 1


def test_a_hostile_name_cannot_forge_a_line(shared_gateway: GatewayProcess) -> None:
    import asyncio

    async def act() -> None:
        async with PlainNode.connect(shared_gateway, "evil", ["evil.tool"]):
            await asyncio.to_thread(scraped, shared_gateway)
            await shared_gateway.ainvoke('x"} 7\nfarhand_calls_open 99', {})
            samples = await asyncio.to_thread(scraped, shared_gateway)
            assert value(samples, "farhand_calls_open") == 0

    asyncio.run(act())


def test_only_who_may_read_may_ask(shared_gateway: GatewayProcess) -> None:
    assert shared_gateway.request("GET", "/metrics", token=None).status == 401
    token = shared_gateway.request("POST", "/v1/tokens", {"label": "x", "scopes": ["chat"]}).json()["token"]
    assert shared_gateway.request("GET", "/metrics", token=token).status == 403
    token = shared_gateway.request("POST", "/v1/tokens", {"label": "x", "scopes": ["read"]}).json()["token"]
    assert shared_gateway.request("GET", "/metrics", token=token).status == 200
