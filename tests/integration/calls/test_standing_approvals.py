"""The answer "always": later calls that are exactly the same need no approval, and no other call profits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, ask, end_of, made, write_policy
from tests.integration.cli.conftest import Command
from tests.support.harness import GatewayProcess, NodeProcess

RULES = """
[[policy.rules]]
name = "never"
decision = "deny"
args = { command = "echo never*" }

[[policy.rules]]
name = "commands"
decision = "ask"
tool = ["Bash", "exec", "gsv__WriteFile"]
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("always") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def nodes(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        NodeProcess(gateway, tmp_path_factory.mktemp("one"), "one"),
        NodeProcess(gateway, tmp_path_factory.mktemp("two"), "two"),
    ):
        yield


def standing(gateway: GatewayProcess) -> Any:
    return gateway.get("/v1/policy/always")["approvals"]


def approve_always(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> Any:
    approval = ask(gateway, tool, args, **more)
    decided = answer(gateway, approval, always=True)
    assert decided.status == 200, decided
    assert end_of(gateway, approval)["state"] == "ok"
    return next(one for one in standing(gateway) if one["approval_id"] == approval["id"])


def state_of(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> str:
    started = gateway.invoke(tool, args, background=True, **more)
    return str(started.get("state") or started["error"]["kind"])


def test_the_same_call_runs_without_an_approval_and_others_are_asked_about(gateway: GatewayProcess) -> None:
    rule = approve_always(gateway, "one__Bash", {"command": "echo a", "timeout": 9000})
    assert (rule["tool"], rule["node_id"], rule["credential"]) == ("one__bash", "one", "owner")
    assert gateway.invoke("one__Bash", {"timeout": 9000, "command": "echo a"})["result"]["output"] == "a\n"
    assert gateway.invoke("one__bash", {"command": "echo \u0061", "timeout": 9000})["ok"] is True
    for tool, args in (
        ("two__Bash", {"command": "echo a", "timeout": 9000}),
        ("one__Bash", {"command": "echo a"}),
        ("one__Bash", {"command": "echo a ", "timeout": 9000}),
        ("one__Bash", {"command": "echo a", "timeout": 9001}),
        ("exec", {"command": "echo a", "timeout": 9000}),
    ):
        assert state_of(gateway, tool, args) in ("waiting", "invalid_args"), (tool, args)
    explained = Command(gateway.home)(
        "policy", "explain", "one__Bash", "command=echo a", "timeout=9000", "--json"
    ).json()
    assert (explained["decision"], explained["rule"]) == ("allow", f"always:{rule['id']}")


def test_it_holds_for_its_caller_only(gateway: GatewayProcess) -> None:
    approve_always(gateway, "one__Bash", {"command": "echo caller"})
    token = made(gateway, "tools.exec", "read")
    body = {"tool": "one__Bash", "args": {"command": "echo caller"}, "background": True}
    assert gateway.request("POST", "/v1/tools/invoke", body, token=token).json()["state"] == "waiting"


def test_it_holds_for_the_workspace_of_its_agent_only(gateway: GatewayProcess) -> None:
    """The arguments do not say whose file `of-one.txt` is."""
    content = {"path": "of-one.txt", "content": "a"}
    assert approve_always(gateway, "gsv__WriteFile", content)["agent_id"] == "main"
    assert gateway.invoke("gsv__WriteFile", content, agent_id="main")["ok"] is True
    for named in ({"agent_id": "other"}, {"session_key": "agent:other:main"}):
        assert state_of(gateway, "gsv__WriteFile", content, **named) == "waiting", named
    approve_always(gateway, "gsv__WriteFile", content, agent_id="other")
    assert gateway.invoke("gsv__WriteFile", content, agent_id="other")["ok"] is True


def test_removing_it_asks_again_and_a_restart_keeps_it(gateway: GatewayProcess, tmp_path: Path) -> None:
    write_policy(tmp_path / "home", RULES)
    with GatewayProcess(tmp_path / "home") as other:
        content = {"path": "a.txt", "content": "a"}
        rule = approve_always(other, "gsv__WriteFile", content)
        other.stop()
        other.start()
        assert gateway_ok(other, content)
        command = Command(other.home)
        shown = command("policy")
        assert rule["id"] in shown.out and "gsv__writefile" in shown.out
        assert command("policy", "forget", rule["id"]).status == 0
        assert command("policy", "forget", rule["id"]).status == 1
        assert state_of(other, "gsv__WriteFile", content) == "waiting"
        other.stop()
        other.start()
        assert standing(other) == []
        kinds = [one["kind"] for one in command("events", "--json").json()["events"]]
        assert kinds.count("policy.always_added") == kinds.count("policy.always_removed") == 1


def gateway_ok(gateway: GatewayProcess, content: Any) -> bool:
    return bool(gateway.invoke("gsv__WriteFile", content)["ok"])


def test_a_deny_rule_wins(gateway: GatewayProcess) -> None:
    args = {"command": "echo nearly"}
    approve_always(gateway, "one__Bash", args)
    settings = gateway.home / "farhand.toml"
    before = settings.read_text()
    try:
        settings.write_text(before.replace("echo never*", "echo ne*"))
        denied = gateway.invoke("one__Bash", args)
        assert denied["error"]["kind"] == "not_allowed" and "(never)" in denied["error"]["message"]
    finally:
        settings.write_text(before)


def test_a_token_that_may_approve_cannot_change_the_policy(gateway: GatewayProcess) -> None:
    approval = ask(gateway, "one__Bash", {"command": "echo once"})
    token = made(gateway, "approve", "read")
    refused = answer(gateway, approval, always=True, token=token)
    assert refused.status == 403 and "'admin'" in refused.json()["error"]["message"]
    assert answer(gateway, approval, token=token).status == 200
    assert all(one["approval_id"] != approval["id"] for one in standing(gateway))
    assert gateway.request("DELETE", f"/v1/policy/always/{'0' * 8}", token=token).status == 403


def test_it_ends_with_the_token_that_made_it(gateway: GatewayProcess) -> None:
    args = {"command": "echo made by a token"}
    command = Command(gateway.home)
    created = command("token", "create", "--scope", "admin", "--json").json()
    approval = ask(gateway, "one__Bash", args)
    assert answer(gateway, approval, always=True, token=created["token"]).status == 200
    assert end_of(gateway, approval)["state"] == "ok"
    assert gateway.invoke("one__Bash", args)["ok"] is True
    assert command("token", "revoke", created["id"]).status == 0
    assert state_of(gateway, "one__Bash", args) == "waiting"


def test_a_call_that_cannot_be_approved_permanently_says_so_and_keeps_waiting(gateway: GatewayProcess) -> None:
    approval = ask(gateway, "gsv__WriteFile", {"path": "large.txt", "content": "x" * 70_000})
    refused = answer(gateway, approval, always=True)
    assert refused.status == 409 and "without `always`" in refused.json()["error"]["message"]
    assert answer(gateway, approval, "deny", always=True).status == 400
    assert answer(gateway, approval, "deny").status == 200
