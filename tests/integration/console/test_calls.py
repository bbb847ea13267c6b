"""Tools and calls in a real browser: generated forms, live output, cancel, undo, hostile words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import HOSTILE, Open
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, NodeProcess, PluginProcess, running

LAB = f"""
import asyncio
from farhand.sdk import Cancelled, Failed, NodeClient, NodeInfo, ToolContext, ToolRegistry

registry = ToolRegistry()

@registry.tool("lab.wait")
async def wait(ctx: ToolContext, seconds: float, note: str = "") -> str:
    '''Wait until cancelled. {HOSTILE}'''
    try:
        await asyncio.wait_for(ctx.cancel.cancelled(), seconds)
    except TimeoutError:
        return note
    raise Cancelled("stopped early")

@registry.tool("lab.fail")
async def fail(ctx: ToolContext, why: str) -> None:
    '''Fail.'''
    raise Failed(why)

info = NodeInfo(id="lab", name={HOSTILE!r}, node_type={HOSTILE!r}, version={HOSTILE!r}, tags=[{HOSTILE!r}])
asyncio.run(NodeClient(node_info=info).run(registry))
"""


@pytest.fixture(scope="module")
def staffed(
    shared_gateway: GatewayProcess, hands: NodeProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway with `hands`, `hello` (the example) and `lab` (hostile in every word it says of itself)."""
    folder = tmp_path_factory.mktemp("plugins")
    address = {"SA_NODE_TOKEN": SHARED_TOKEN, "SA_GATEWAY_WS_URL": shared_gateway.ws_url}
    hello = PluginProcess(ROOT / "examples" / "hello_node.py", folder, {**address, "SA_NODE_ID": "hello"})
    with running(hello, PluginProcess(LAB, folder, address)):
        for name in ("hello", "lab"):
            shared_gateway.wait_for_node(name)
        yield shared_gateway


def call_with(one: Any, text: str) -> None:
    """Send these arguments as JSON."""
    one.button("JSON").or_(one.page.get_by_label("Arguments JSON")).first.wait_for()
    if one.button("JSON").is_visible():
        one.button("JSON").click()
    one.page.get_by_label("Arguments JSON").fill(text)
    one.button("Call").click()


def test_hostile_words_stay_words(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed)
    one.seen(page.locator("article").filter(has_text="lab"), f"{HOSTILE} · {HOSTILE} · {HOSTILE}")
    one.go("machines/lab/tools/lab.wait")
    one.seen(page.locator("form"), HOSTILE)
    call_with(one, f'{{"seconds": 0, "note": "{HOSTILE}"}}')
    one.seen(page.locator("#outcome pre"), HOSTILE)
    call = staffed.invoke(
        "hands__Bash", {"command": f"echo '{HOSTILE}'; printf '\\033[31mred\\033]0;title\\007 \\033[2J'"}
    )
    one.go(f"calls/{call['request_id']}")
    one.seen(page.get_by_label("Output"), f"{HOSTILE}\nred ")
    one.go("machines/lab/about")
    one.seen(page.locator("main"), HOSTILE)
    one.go("calls/<script>")
    one.seen(page.get_by_role("alert"), "there is no call")
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None
    one.complaints.clear()  # the call that does not exist


def test_a_tool_is_called_from_its_form(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed, "machines/hands/tools/hands__Bash")
    page.get_by_label("command", exact=True).fill("echo good morning; exit 3")
    page.keyboard.press("Control+Enter")
    one.seen(page.locator("#outcome .state"), "ok")
    one.seen(page.locator("#outcome").get_by_label("Output"), "good morning")
    one.seen(page.locator("#outcome").get_by_label("Result", exact=True), '"exitCode": 3')
    one.go("machines/lab/tools/lab.wait")
    one.seen(page.get_by_label("seconds", exact=True))
    assert page.get_by_label("seconds", exact=True).get_attribute("type") == "number"
    page.get_by_label("seconds", exact=True).fill("0")
    one.button("Call").click()
    one.seen(page.locator("#outcome .state"), "ok")


def test_long_numbers_and_failures_are_shown_as_they_are(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed, "machines/hello/tools/node.echo")
    call_with(one, '{"text": "x", "long": 1234567890123456789}')
    one.seen(page.locator("#outcome pre"), "1234567890123456789")
    one.go("machines/lab/tools/lab.fail")
    one.seen(page.locator("h3").filter(has_text="lab.fail"))
    call_with(one, '{"why": "the disk is full"}')
    one.seen(page.locator("#outcome"), re.compile("error.*failed the disk is full", re.DOTALL))
    call_with(one, '{"why": 5}')
    one.seen(page.locator("#outcome"), "invalid_args")
    page.get_by_label("Arguments JSON").fill("{why: 1}")
    one.button("Call").click()
    one.seen(page.get_by_role("alert"), "Invalid JSON")


def test_an_unlisted_tool_can_be_called_by_name(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed, "machines/hello/tools")
    page.get_by_label("Find a tool").fill("node.unlisted")
    page.get_by_role("link", name="Call node.unlisted by name").click()
    one.button("Call").click()
    one.seen(page.locator("#outcome"), re.compile("error.*not_found", re.DOTALL))


def test_a_call_from_elsewhere_appears_and_its_output_is_live(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed, "calls")
    page.evaluate("window.before = true")
    command = "echo begun; until [ -e go ]; do sleep 0.05; done; echo finished"
    call = staffed.invoke("hands__Bash", {"command": command}, background=True)
    row = page.locator(f"#calls a[href$='{call['request_id']}']")
    one.seen(row, "until [ -e go ]")
    one.seen(row, "running")
    row.click()
    one.seen(page.get_by_label("Output"), "begun")
    one.seen(page.locator("dl.facts"), "allow: rule default")
    staffed.invoke("hands__Write", {"path": "go", "content": ""})
    one.seen(page.get_by_label("Output"), "begun\nfinished")
    one.seen(page.locator("dl.facts"), "exit code 0")
    one.seen(row, "ok")
    assert page.evaluate("window.before") is True


def test_a_running_call_can_be_cancelled_and_repeated(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    call = staffed.invoke("lab.wait", {"seconds": 60}, background=True)
    page = one.sign_in(staffed, f"calls/{call['request_id']}")
    one.button("Cancel call").click()
    one.seen(page.locator("article .note"), "stopped early")
    assert staffed.get(f"/v1/calls/{call['request_id']}")["state"] == "cancelled"
    one.button("Run again").click()
    one.seen(page.locator("article .head"), "running")
    assert call["request_id"] not in page.url
    one.button("Cancel call").click()
    one.seen(page.locator("article .head"), "cancelled")


def test_a_change_is_undone_after_a_preview(staffed: GatewayProcess, hands: NodeProcess, visit: Open) -> None:
    file = hands.workspace / "undo-me.txt"
    file.write_text("old\n")
    call = staffed.invoke("hands__Write", {"path": "undo-me.txt", "content": "new\n"})
    one = visit()
    page = one.sign_in(staffed, f"calls/{call['request_id']}")
    one.button("Undo").click()
    one.seen(page.get_by_role("dialog").locator(".diff"), re.compile(r"-new\s+\+old"))
    assert file.read_text() == "new\n"
    one.button("Restore these files").click()
    one.seen(page.get_by_role("status").filter(has_text="restored"))
    assert file.read_text() == "old\n"


def test_calls_are_filtered(staffed: GatewayProcess, visit: Open) -> None:
    staffed.invoke("lab.fail", {"why": "needle in a haystack"})
    one = visit()
    page = one.sign_in(staffed, "calls")
    page.get_by_label("State").select_option("error")
    one.gone(page.locator("#calls .state.ok"))
    page.get_by_label("Text").fill("needle haystack")
    one.seen(page.locator("#calls"), "needle in a haystack")
    one.seen(page.get_by_role("status").filter(has_text="calls"), "1")
    page.get_by_label("Text").fill("nothing like it")
    one.seen(page.locator("#calls"), "No call matches the filters")
    assert "state=error" in page.url


def test_everything_is_reached_from_the_keyboard(staffed: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(staffed)
    page.keyboard.press("Control+k")
    page.keyboard.type("tool node.echo")
    one.seen(page.get_by_role("option").first, "node.echo")
    page.keyboard.press("Enter")
    one.seen(page.locator("h3").filter(has_text="node.echo"))
    page.keyboard.press("Control+k")
    page.keyboard.type("approvals")
    page.keyboard.press("Enter")
    one.seen(page.locator("header h1"), "Approvals")
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    one.gone(page.get_by_role("dialog"))


def test_a_job_gets_input_and_is_killed(staffed: GatewayProcess, visit: Open) -> None:
    staffed.invoke("hands__Bash", {"command": "read line; echo got $line; sleep 600", "background": True})
    one = visit()
    page = one.sign_in(staffed, "machines/hands/jobs")
    page.get_by_role("button", name=re.compile("read line")).click()
    page.get_by_label("Input").fill("a word")
    one.button("Send").click()
    one.seen(page.get_by_label("Output"), "got a word")
    one.button("Kill").click()
    one.seen(page.get_by_role("button", name=re.compile("read line")), re.compile("signal|exit"))


def test_everything_freezes_and_thaws(gateway: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(gateway)
    one.button("Freeze").click()
    page.get_by_label("Reason").fill("a drill")
    one.button("Freeze everything").click()
    one.seen(page.get_by_role("dialog"), "a drill")
    assert gateway.get("/v1/freeze")["frozen"] is True
    one.button("Lift the freeze").click()
    one.gone(page.get_by_role("dialog"))
    assert gateway.get("/v1/freeze")["frozen"] is False
