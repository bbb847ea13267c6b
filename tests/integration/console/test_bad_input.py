"""What goes wrong around the console: huge and hostile output, many machines, wrong clocks, sleep, kills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import HOSTILE, Open
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import ModelServer, Request, calls, text

# Moves the clock of the page by `window.shift` milliseconds.
CLOCK = """(() => {
    const real = Date.now.bind(Date);
    window.shift = %d;
    const Shifted = class extends Date {
        constructor(...args) { if (args.length) super(...args); else super(real() + window.shift); }
        static now() { return real() + window.shift; }
    };
    window.Date = Shifted;
})()"""
DAY = 86_400_000


def answer(request: Request) -> Any:
    if request.messages[-1]["role"] == "tool":
        return text("The machine was lost and came back.")
    return calls(("hands__Bash", {"command": "echo begun; until [ -e go ]; do sleep 0.1; done; echo finished"}))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with ModelServer(answer=answer) as model:
        environment: dict[str, str | None] = dict(model.environment)
        with GatewayProcess(tmp_path_factory.mktemp("bad") / "home", env=environment) as started:
            yield started


@pytest.fixture(scope="module")
def node(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("node"), "hands") as started:
        yield started


def test_the_end_of_a_hundred_megabytes_is_shown(gateway: GatewayProcess, node: NodeProcess, visit: Open) -> None:
    escape = "printf '\\033[31mred\\033]0;title\\007\\033[2J \\033]8;;http://evil.example\\007link\\n'"
    command = f"head -c 100000000 /dev/zero | tr '\\0' 'x' | fold -w 99; {escape}; echo '{HOSTILE}'; echo the end"
    call = gateway.invoke("hands__Bash", {"command": command, "timeout": 300_000}, timeout_ms=300_000)
    one = visit()
    page = one.sign_in(gateway, f"calls/{call['request_id']}")
    output = page.get_by_label("Output")
    one.seen(output, re.compile(f"red link\\s+{re.escape(HOSTILE)}\\s+the end"))
    assert len(output.inner_text()) < 1_000_000
    assert page.locator("main img").count() == 0 and page.evaluate("window.hit") is None
    assert page.title() != "title"
    one.go("calls")
    one.seen(page.locator("#calls"), "Bash")


def test_ten_thousand_machines_are_rows_that_can_be_filtered(
    gateway: GatewayProcess, node: NodeProcess, visit: Open
) -> None:
    one = visit()
    page = one.page
    page.add_init_script(f"""
        const fetched = window.fetch;
        const machine = (n) => ({{node_id: `m-${{n}}`, name: {HOSTILE!r}, label: "",
            node_type: "linux", version: "1", tags: [], reported_tags: [], capabilities: [], refused_capabilities: [],
            tools: [], role: "", online: true, frozen: false,
            connected_at: 1, last_seen: 1, running: 0, runtime: {{}}}});
        const nodes = Array.from({{length: 10_000}}, (_, n) => machine(n));
        window.fetch = (path, options) => path === "v1/nodes"
            ? Promise.resolve(new Response(JSON.stringify({{nodes, primary: null, count: 10_000}})))
            : fetched(path, options);
    """)
    one.sign_in(gateway, "overview")
    one.seen(page.locator("main"), "10000 of 10000 online")
    assert page.locator("main article").count() <= 12
    one.go("machines")
    one.seen(page.get_by_role("region", name="Machines"), "m-0")
    assert page.locator("main li").count() < 100
    took = page.evaluate("""async () => {
        const before = document.querySelector("main li").textContent;
        const began = performance.now();
        document.querySelector("main .view").scrollTop = 200_000;
        while (document.querySelector("main li").textContent === before) await new Promise(requestAnimationFrame);
        return performance.now() - began;
    }""")
    assert took < 5_000
    page.get_by_label("Filter machines").fill("m-9999")
    one.seen(page.locator("main article"), "m-9999")
    assert page.evaluate("window.hit") is None
    one.refused.clear()
    one.complaints = [
        said for said in one.complaints if "404" not in said
    ]  # measurements of machines that are not there


@pytest.mark.parametrize("hours", [-49, 49])
def test_times_follow_the_clock_of_the_gateway(gateway: GatewayProcess, visit: Open, hours: int) -> None:
    gateway.invoke("clock.check")
    one = visit()
    one.page.add_init_script(CLOCK % (hours * 3_600_000))
    page = one.sign_in(gateway, "calls")
    one.seen(page.locator("#calls li").first, "clock.check")
    one.seen(page.locator("#calls li time").first, re.compile(r"just now|^\d+ (s|min) ago"))
    page.get_by_label("Since").select_option("hour")
    one.seen(page.locator("#calls"), "clock.check")


def test_a_tab_that_slept_for_a_day_continues(gateway: GatewayProcess, visit: Open) -> None:
    one = visit()
    one.page.add_init_script(CLOCK % 0)
    page = one.sign_in(gateway, "calls")
    page.get_by_label("Text").fill("after.sleep")
    one.context.set_offline(True)  # asleep: nothing arrives
    gateway.invoke("after.sleep")
    page.evaluate(f"() => {{ window.shift = {DAY}; window.dispatchEvent(new Event('focus')); }}")
    one.seen(page.locator("#banner"), "The gateway does not answer")
    one.context.set_offline(False)
    one.seen(page.locator("#line"), "Live")
    one.seen(page.locator("#calls"), "after.sleep")
    assert page.get_by_label("Text").input_value() == "after.sleep"
    one.complaints = [said for said in one.complaints if "ERR_" not in said]


@pytest.mark.parametrize("killed", ["machine", "gateway"])
def test_one_is_killed_while_everything_is_open(
    gateway: GatewayProcess, node: NodeProcess, visit: Open, killed: str
) -> None:
    with (node.workspace / "large").open("wb") as file:
        file.truncate(400_000_000)
    (node.workspace / "go").unlink(missing_ok=True)
    one = visit()
    terminal = one.sign_in(gateway, "terminal?node=hands")
    terminal.get_by_role("dialog").get_by_label(re.compile("^Command")).fill("PS1='ready> ' bash --norc")
    terminal.get_by_role("dialog").get_by_role("button", name="Open a terminal").click()
    one.seen(terminal.locator(".xterm-rows"), "ready>")
    chat, files = one.context.new_page(), one.context.new_page()
    chat.goto(f"{gateway.url}/#/chat/{killed}")
    chat.get_by_label("Message", exact=True).fill("run it")
    chat.get_by_role("button", name="Send").click()
    one.seen(chat.get_by_label("Live output"), "begun")
    files.goto(f"{gateway.url}/#/files/hands")
    destination = f"gsv:{killed}"
    copied = gateway.request(
        "POST", "/v1/transfers", {"source": "hands:large", "destination": destination, "background": True}
    )
    assert copied.status in (200, 201, 202), copied
    one.seen(files.locator(".transfer").filter(has_text=destination))
    if killed == "machine":
        node.kill()
        one.seen(terminal.get_by_role("status").filter(has_text="offline"))
        node.start()
    else:
        gateway.kill()
        one.seen(terminal.locator("#banner"), "The gateway does not answer")
        gateway.start()
        one.seen(terminal.locator("#line"), "Live")
    one.seen(terminal.get_by_role("status").filter(has_text="Connected"))
    terminal.locator(".xterm textarea").focus()
    terminal.keyboard.type("echo $((40 + 2))\n")
    one.seen(terminal.locator(".xterm-rows"), "42")
    (node.workspace / "go").write_text("")
    one.seen(chat.locator(".markdown").last, "The machine was lost and came back.")
    # The transfer ends in a state that is shown, whether it was resumed or not.
    one.seen(files.locator(".transfer").filter(has_text=destination).locator(".state"), re.compile("ok|error|unknown"))
    wait_until(lambda: gateway.get("/v1/transfers?limit=1")["transfers"][0]["state"] in ("ok", "error", "unknown"), 60)
    one.complaints.clear()


def test_names_and_contents_of_files_stay_text(gateway: GatewayProcess, node: NodeProcess, visit: Open) -> None:
    content = f"{HOSTILE}\n<script>window.hit = 2</script>\n\u202ereversed \x1b[31mred\n"
    for name in (HOSTILE, "page.html", "notes.md"):
        (node.workspace / name).write_text(content)
    one = visit()
    page = one.sign_in(gateway, "files/hands")
    for name in (HOSTILE, "page.html", "notes.md"):
        page.get_by_role("link", name=name, exact=True).click()
        one.seen(page.locator("pre.code"), HOSTILE)
        one.seen(page.locator("pre.code"), "<script>window.hit = 2</script>")
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hit") is None
