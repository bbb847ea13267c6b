"""Terminals in a real browser: reload, two viewers, a restarted gateway, hostile output."""

from __future__ import annotations

import re
from typing import Any

from tests.support.browser import HOSTILE, Open, Visit
from tests.support.harness import GatewayProcess, NodeProcess


def shown(page: Any, text: str | re.Pattern[str], one: Visit) -> None:
    one.seen(page.locator(".xterm-rows"), text)


def opened(one: Visit, page: Any, command: str) -> None:
    one.button("Open a terminal").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Machine").select_option("hands")
    dialog.get_by_label(re.compile("^Command")).fill(command)
    dialog.get_by_role("button", name="Open a terminal").click()
    one.seen(page.locator(".xterm"))
    one.seen(page.get_by_role("status").filter(has_text="Connected"))


def test_a_terminal_survives_a_reload_and_has_two_viewers(
    shared_gateway: GatewayProcess, hands: NodeProcess, visit: Open
) -> None:
    one, other = visit(), visit()
    page = one.sign_in(shared_gateway, "terminal")
    opened(one, page, f"echo '{HOSTILE}'; PS1='ready> ' bash --norc")
    shown(page, re.compile(r"onerror.*ready>", re.DOTALL), one)
    # Its colours and sizes apply, although the content policy allows no inline styles.
    style = page.locator(".xterm-rows").evaluate(
        "(rows) => getComputedStyle(rows).whiteSpace + getComputedStyle(rows).fontFamily"
    )
    assert "pre" in style and "mono" in style
    page.locator(".xterm textarea").focus()
    page.keyboard.type("echo $((20 + 22))\n")
    shown(page, "42", one)
    page.reload()
    shown(page, "42", one)
    watching = other.sign_in(shared_gateway, page.url.split("#/")[1])
    shown(watching, "42", other)
    watching.locator(".xterm textarea").focus()
    watching.keyboard.type("echo $((30 + 25)); exit\n")
    for visitor, seen in ((one, page), (other, watching)):
        shown(seen, "55", visitor)
        visitor.seen(seen.get_by_role("status").filter(has_text="The command has ended"))
    assert page.evaluate("window.hit") is None


def test_a_terminal_survives_a_restart_of_the_gateway(gateway: GatewayProcess, visit: Open, tmp_path: Any) -> None:
    one = visit()
    with NodeProcess(gateway, tmp_path, "hands"):
        page = one.sign_in(gateway, "terminal")
        opened(one, page, "PS1='ready> ' bash --norc")
        shown(page, "ready>", one)
        gateway.stop()
        one.seen(page.get_by_role("status").filter(has_text="reconnecting"))
        gateway.start()
        gateway.wait_for_node("hands")
        one.seen(page.get_by_role("status").filter(has_text="Connected"))
        page.locator(".xterm textarea").focus()
        page.keyboard.type("echo $((40 + 4))\n")
        shown(page, "44", one)
        one.complaints.clear()
        one.context.close()
