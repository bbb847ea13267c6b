"""Calls that wait for approval, in a real browser: what would run, and the buttons that decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.calls.test_approvals import ask, end_of, write_policy
from tests.support.browser import HOSTILE, Open
from tests.support.harness import GatewayProcess


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("asking") / "home"
    rule = '\n[[policy.rules]]\nname = "look first"\nreason = "changes"\ndecision = "ask"\ntool = ["write", "exec"]\n'
    write_policy(home, rule)
    with GatewayProcess(home) as started:
        yield started


def row(page: Any, approval: Any) -> Any:
    return page.locator("#approvals > li").filter(has_text=approval["call_id"])


def test_a_diff_is_shown_and_approved(gateway: GatewayProcess, visit: Open) -> None:
    file = gateway.home / "agents" / "main" / "page.txt"
    file.write_text(f"one\n{HOSTILE}\n")
    one = visit()
    page = one.sign_in(gateway, "approvals")
    one.seen(page.locator("main"), "Nothing waits for you")
    approval = ask(gateway, "write", {"path": "page.txt", "content": "one\ntwo\n"})
    shown = row(page, approval)
    one.seen(shown, "look first: changes")
    one.seen(shown.locator(".removed"), f"-{HOSTILE}")
    one.seen(shown.locator(".added"), "+two")
    assert file.read_text() != "one\ntwo\n"
    shown.get_by_role("button", name="Approve").click()
    one.gone(shown)
    assert end_of(gateway, approval)["state"] == "ok"
    assert file.read_text() == "one\ntwo\n"
    assert gateway.get(f"/v1/approvals/{approval['id']}")["decided_by"] == "owner"
    assert page.evaluate("window.hit") is None
    one.seen(page.locator("main"), "approved")


def test_a_command_is_shown_and_denied_with_a_reason(gateway: GatewayProcess, visit: Open) -> None:
    approval = ask(gateway, "exec", {"command": f"echo '{HOSTILE}' \u202e; touch nothing"})
    one = visit()
    page = one.sign_in(gateway, "approvals")
    shown = row(page, approval)
    one.seen(shown.locator("pre").first, f"echo '{HOSTILE}' \\u{{202e}}; touch nothing")
    shown.get_by_role("button", name="Deny").click()
    shown.get_by_label("Reason for denying").fill("not today")
    shown.get_by_role("button", name="Deny").click()
    one.gone(shown)
    record = end_of(gateway, approval)
    assert (record["state"], record["error"]["kind"]) == ("denied", "not_allowed")
    assert "not today" in record["error"]["message"]
    assert page.evaluate("window.hit") is None


def test_always_allows_exactly_this(gateway: GatewayProcess, visit: Open) -> None:
    approval = ask(gateway, "exec", {"command": "echo every day"})
    one = visit()
    page = one.sign_in(gateway, "approvals")
    shown = row(page, approval)
    shown.get_by_role("button", name="Always allow exactly this").click()
    one.gone(shown)
    assert end_of(gateway, approval)["state"] == "ok"
    assert gateway.invoke("exec", {"command": "echo every day"})["ok"] is True
    other = ask(gateway, "exec", {"command": "echo every night"})
    one.seen(row(page, other), "echo every night")
    gateway.request("DELETE", f"/v1/calls/{other['call_id']}")


def test_a_decision_made_elsewhere_takes_the_row_away(gateway: GatewayProcess, visit: Open) -> None:
    first, second = (ask(gateway, "exec", {"command": f"echo {number}"}) for number in (1, 2))
    one = visit()
    page = one.sign_in(gateway, "approvals")
    one.seen(row(page, first), "echo 1")
    one.seen(row(page, second), "echo 2")
    assert first["call_id"] in page.locator("#approvals > li").first.inner_text()  # oldest first
    gateway.request("POST", f"/v1/approvals/{first['id']}", {"decision": "deny"})
    one.gone(row(page, first))
    one.seen(row(page, second), "echo 2")
    gateway.request("DELETE", f"/v1/calls/{second['call_id']}")
    one.gone(row(page, second))
