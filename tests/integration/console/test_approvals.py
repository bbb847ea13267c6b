"""Calls that wait for approval, in a real browser: what would run, and the buttons that decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.calls.test_approvals import ask, end_of, write_policy
from tests.integration.console.test_console import PATIENCE_MS, Visit, browser, visit  # noqa: F401
from tests.support.harness import GatewayProcess

HOSTILE = "<img src=x onerror=window.hit=1>"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("asking") / "home"
    rule = '\n[[policy.rules]]\nname = "look first"\nreason = "changes"\ndecision = "ask"\ntool = ["write", "exec"]\n'
    write_policy(home, rule)
    with GatewayProcess(home) as started:
        yield started


def row(page: Any, approval: Any) -> Any:
    return page.locator("#approvals > li").filter(has_text=approval["id"])


def gone(element: Any) -> None:
    from playwright.sync_api import expect

    expect(element).to_have_count(0, timeout=PATIENCE_MS)


def test_a_diff_is_shown_and_approved(gateway: GatewayProcess, visit: Callable[..., Visit]) -> None:  # noqa: F811
    file = gateway.home / "agents" / "main" / "page.txt"
    file.write_text(f"one\n{HOSTILE}\n")
    one = visit()
    page = one.sign_in(gateway)
    assert not page.locator("#approvals-section").is_visible()
    approval = ask(gateway, "write", {"path": "page.txt", "content": "one\ntwo\n"})
    shown = row(page, approval)
    one.seen(shown, "look first: changes")
    one.seen(shown.locator("pre"), f"-{HOSTILE}\n+two\n")
    assert file.read_text() != "one\ntwo\n"
    shown.get_by_role("button", name="Approve").click()
    gone(shown)
    assert end_of(gateway, approval)["state"] == "ok"
    assert file.read_text() == "one\ntwo\n"
    assert gateway.get(f"/v1/approvals/{approval['id']}")["decided_by"] == "owner"
    assert page.evaluate("window.hit") is None
    one.seen(page.locator("#calls > li").first, "write")


def test_a_command_is_shown_and_denied(gateway: GatewayProcess, visit: Callable[..., Visit]) -> None:  # noqa: F811
    approval = ask(gateway, "exec", {"command": f"echo '{HOSTILE}' \u202e; touch nothing"})
    one = visit()
    page = one.sign_in(gateway)
    shown = row(page, approval)
    one.seen(shown.locator("pre"), f"echo '{HOSTILE}' \\u{{202e}}; touch nothing")
    shown.get_by_role("button", name="Deny").click()
    gone(shown)
    record = end_of(gateway, approval)
    assert (record["state"], record["error"]["kind"]) == ("denied", "not_allowed")
    assert not page.locator("#approvals-section").is_visible()
    assert page.evaluate("window.hit") is None


def test_a_decision_made_elsewhere_takes_the_row_away(
    gateway: GatewayProcess,
    visit: Callable[..., Visit],  # noqa: F811
) -> None:
    first, second = (ask(gateway, "exec", {"command": f"echo {number}"}) for number in (1, 2))
    one = visit()
    page = one.sign_in(gateway)
    one.seen(row(page, first), "echo 1")
    one.seen(row(page, second), "echo 2")
    assert page.locator("#approvals > li").first.inner_text().count(first["id"]) == 1  # oldest first
    gateway.request("POST", f"/v1/approvals/{first['id']}", {"decision": "deny"})
    gone(row(page, first))
    one.seen(row(page, second), "echo 2")
    gateway.request("DELETE", f"/v1/calls/{second['call_id']}")
    gone(row(page, second))
