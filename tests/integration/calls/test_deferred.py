"""Calls that wait for an offline node: they start once, in time, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess, Plugin, Proxy, wait_until

LATER = "in 1 hour"


@pytest.fixture
def plug(gateway: GatewayProcess, tmp_path: Path) -> Iterator[Plugin]:
    """A plug-in node that has joined and left."""
    plugin = Plugin(gateway, tmp_path, "plug")
    with plugin:
        pass
    gateway.wait_for_node("plug", online=False)
    yield plugin
    if not plugin.ended:
        plugin.stop()


def defer(gateway: GatewayProcess, tool: str, args: Any = None, before: Any = LATER, **more: Any) -> str:
    answer = gateway.invoke(tool, args or {}, when_online=True, before=before, **more)
    assert answer["ok"] is True and answer["state"] == "waiting", answer
    return str(answer["request_id"])


def end_of(gateway: GatewayProcess, call_id: str) -> Any:
    def over() -> Any:
        found = gateway.get(f"/v1/calls/{call_id}")
        return found if found["state"] not in ("waiting", "running") else None

    return wait_until(over, 40, "the end of the call")


def test_a_call_waits_for_its_node_and_runs(plug: Plugin) -> None:
    gateway = plug.gateway
    call_id = defer(gateway, "plug.effect", {"text": "hi"})
    record = gateway.get(f"/v1/calls/{call_id}")
    assert record["state"] == "waiting" and record["waits_for"] == "node"
    assert [one["id"] for one in gateway.get("/v1/calls?state=waiting")["calls"]] == [call_id]
    plug.start()
    assert end_of(gateway, call_id)["state"] == "ok"
    assert plug.started() == [call_id]


def test_without_asking_for_it_nothing_waits(plug: Plugin) -> None:
    answer = plug.gateway.invoke("plug.effect", {"text": "hi"})
    assert answer["ok"] is False and answer["state"] == "error"


def test_a_connected_node_is_called_at_once(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "hands"):
        args = {"command": "echo now"}
        answer = gateway.invoke("hands__Bash", args, when_online=True, before=LATER)
        assert answer["state"] == "ok" and "now" in answer["result"]["output"]


def test_it_runs_once_although_the_node_returns_twice(gateway: GatewayProcess, tmp_path: Path) -> None:
    """The link breaks again and again from the moment the node is back."""
    with Proxy(gateway.port) as proxy, Plugin(gateway, tmp_path, "plug", url=proxy.url) as plug:
        proxy.cut(refuse=True)
        gateway.wait_for_node("plug", online=False)
        calls = [defer(gateway, "plug.effect", {"text": str(number)}) for number in range(10)]
        for _ in range(3):
            proxy.admit()
            gateway.wait_for_node("plug")
            proxy.cut(refuse=True)
            gateway.wait_for_node("plug", online=False)
        proxy.admit()
        for call_id in calls:
            assert end_of(gateway, call_id)["state"] == "ok"
        assert sorted(plug.started(10)) == sorted(calls)


def test_it_runs_once_although_the_gateway_is_killed(plug: Plugin) -> None:
    gateway = plug.gateway
    calls = [defer(gateway, "plug.effect", {"text": str(number)}) for number in range(10)]
    gateway.kill()
    gateway.start()
    assert gateway.get("/v1/calls?state=waiting")["count"] == 10
    plug.start()
    gateway.wait_for_node("plug")
    gateway.kill()  # perhaps in the middle of sending them
    gateway.start()
    gateway.wait_for_node("plug")
    ends = [end_of(gateway, call_id)["state"] for call_id in calls]
    started = plug.started()
    assert len(started) == len(set(started)) and set(started) <= set(calls)
    assert ends == ["ok"] * 10 and len(started) == 10


def test_a_waiting_call_ends_at_its_deadline_without_having_run(plug: Plugin) -> None:
    gateway = plug.gateway
    call_id = defer(gateway, "plug.effect", {"text": "hi"}, before=int((time.time() + 0.7) * 1000))
    record = end_of(gateway, call_id)
    assert record["state"] == "timeout" and record["error"]["kind"] == "timeout"
    assert "was not back before" in record["error"]["message"] and "did not run" in record["error"]["message"]
    plug.start()
    gateway.wait_for_node("plug")
    assert gateway.invoke("plug.echo", {"text": "x"})["ok"] is True
    assert plug.started() == []


def test_one_command_takes_it_back(plug: Plugin) -> None:
    gateway = plug.gateway
    farhand = Command(gateway.home)
    made = farhand("call", "--when-online", "--before", "in 30 minutes", "plug.effect", "text=hi")
    call_id = made.out.strip()
    assert made.status == 0 and "waiting" in made.err
    shown = farhand("calls", "--waiting")
    assert call_id in shown.out and "waiting: node until" in shown.out
    assert farhand("calls", "cancel", call_id).status == 0
    second = farhand("calls", "cancel", call_id)
    assert second.status == 1 and "already ended: cancelled" in second.err
    third = gateway.request("DELETE", f"/v1/calls/{call_id}")
    assert (third.status, third.json()["state"], third.json()["already_over"]) == (200, "cancelled", True)
    assert farhand("calls", "--waiting", "--json").json()["calls"] == []
    plug.start()
    gateway.wait_for_node("plug")
    assert gateway.get(f"/v1/calls/{call_id}")["state"] == "cancelled"
    assert plug.started() == []


def test_the_same_key_is_the_same_call(plug: Plugin) -> None:
    gateway = plug.gateway
    headers = {"Idempotency-Key": "once"}
    first, second = (defer(gateway, "plug.effect", {"text": "hi"}, headers=headers) for _ in range(2))
    assert first == second
    plug.start()
    assert end_of(gateway, first)["state"] == "ok"
    assert plug.started() == [first]


def test_bad_words_are_refused_and_nothing_waits(plug: Plugin) -> None:
    gateway = plug.gateway
    for before in ("yesterday-ish", "2001-01-01", "in 90 days", -1, "25:00"):
        body = {"tool": "plug.effect", "args": {}, "when_online": True, "before": before}
        answer = gateway.request("POST", "/v1/tools/invoke", body)
        assert answer.status == 400, (before, answer)
    lonely = gateway.request("POST", "/v1/tools/invoke", {"tool": "plug.effect", "before": "18:00"})
    assert lonely.status == 400
    for tool in ("nowhere__Bash", "nothing.at.all", "plug__Nothing"):
        answer = gateway.invoke(tool, {}, when_online=True)
        assert answer["ok"] is False and answer["error"]["kind"] == "not_found", answer
    assert gateway.get("/v1/calls?state=waiting")["count"] == 0


def test_arguments_and_rights_are_checked_before_it_waits(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "hands"):
        pass
    gateway.wait_for_node("hands", online=False)
    answer = gateway.invoke("hands__Bash", {"command": 5}, when_online=True)
    assert answer["error"]["kind"] == "invalid_args" and "command" in answer["error"]["message"]
    reader = Command(gateway.home)("token", "create", "--scope", "tools.read", "--json").json()["token"]
    body = {"tool": "hands__Bash", "args": {"command": "true"}, "when_online": True}
    refused = gateway.request("POST", "/v1/tools/invoke", body, token=reader).json()
    assert refused["state"] == "denied" and refused["error"]["kind"] == "not_allowed"


def test_a_time_of_day_is_the_next_one(plug: Plugin) -> None:
    call_id = defer(plug.gateway, "plug.effect", {}, before="18:00")
    left = plug.gateway.get(f"/v1/calls/{call_id}")["deadline_at"] / 1000 - time.time()
    assert 0 < left <= 86_400 + 3600


def test_the_policy_is_asked_again_when_it_starts(plug: Plugin) -> None:
    gateway = plug.gateway
    denied = defer(gateway, "plug.effect", {"text": "deny"})
    approved = defer(gateway, "plug.effect", {"text": "ask"})
    (gateway.home / "farhand.toml").write_text(
        '[[policy.rules]]\nname = "no"\ndecision = "deny"\nargs = { text = "deny" }\n'
        '[[policy.rules]]\nname = "first"\ndecision = "ask"\nargs = { text = "ask" }\n'
    )
    gateway.invoke("plug.echo", {})  # makes the gateway read the settings
    plug.start()
    record = end_of(gateway, denied)
    assert record["state"] == "denied" and "(no)" in record["error"]["message"]
    (approval,) = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 20)
    assert approval["call_id"] == approved and plug.started() == []
    assert gateway.get(f"/v1/calls/{approved}")["waits_for"] == "approval"
    body = {"decision": "approve", "hash": approval["hash"]}
    assert gateway.request("POST", f"/v1/approvals/{approval['id']}", body).status == 200
    assert end_of(gateway, approved)["state"] == "ok"
    assert plug.started() == [approved]


def test_a_revoked_tokens_call_does_not_start(plug: Plugin) -> None:
    gateway = plug.gateway
    created = Command(gateway.home)("token", "create", "--json").json()
    body = {"tool": "plug.effect", "args": {"text": "hi"}, "when_online": True}
    call_id = gateway.request("POST", "/v1/tools/invoke", body, token=created["token"]).json()["request_id"]
    assert Command(gateway.home)("token", "revoke", created["id"]).status == 0
    plug.start()
    record = end_of(gateway, call_id)
    assert record["state"] == "denied" and "was revoked" in record["error"]["message"]
    assert plug.started() == []


def test_a_freeze_holds_what_waits_until_it_is_lifted(plug: Plugin) -> None:
    gateway = plug.gateway
    call_id = defer(gateway, "plug.effect", {"text": "hi"})
    assert gateway.request("POST", "/v1/freeze", {}).status == 200
    plug.start()
    gateway.wait_for_node("plug")
    assert gateway.get(f"/v1/calls/{call_id}")["state"] == "waiting"
    assert gateway.request("POST", "/v1/thaw", {}).status == 200
    assert end_of(gateway, call_id)["state"] == "ok"
    assert plug.started() == [call_id]
