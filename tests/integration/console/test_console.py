"""The console in a real browser, against a real gateway with real nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand import console
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, PluginProcess, running

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 20_000
FILES = ("index.html", "console.js", "console.css", "console.svg")
HOSTILE = "<img src=x onerror=window.hit=1>"

LAB = f"""
import asyncio
from farhand.sdk import Cancelled, Failed, NodeClient, NodeInfo, ToolContext, ToolRegistry

registry = ToolRegistry()

@registry.tool("lab.wait")
async def wait(ctx: ToolContext, seconds: float, note: str = "") -> str:
    '''Wait, unless told to stop. {HOSTILE}'''
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


# -- what needs no browser ----------------------------------------------------------------------------------


def test_the_page_is_small_and_cannot_write_html() -> None:
    folder = Path(console.__file__).parent
    texts = [folder.joinpath(name).read_text() for name in FILES]
    assert sum(len(text.encode()) for text in texts) < 32 * 1024
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", 'onclick="'):
        assert not any(forbidden in text for text in texts), forbidden


def test_every_file_carries_the_content_policy(shared_gateway: GatewayProcess) -> None:
    for path in ("/", "/console.js", "/console.css", "/console.svg"):
        answer = shared_gateway.request("GET", path, token=None)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_spent_link_is_a_problem_for_programs_and_a_page_for_people(shared_gateway: GatewayProcess) -> None:
    plain = shared_gateway.request("GET", "/signin?code=wrong", token=None)
    assert (plain.status, plain.json()["error"]["code"]) == (401, "unauthorized")
    page = shared_gateway.request("GET", "/signin?code=wrong", token=None, headers={"Accept": "text/html,*/*"})
    assert (page.status, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "set-cookie" not in plain.headers and "set-cookie" not in page.headers


# -- in the browser -----------------------------------------------------------------------------------------


class Visit:
    """One person's browser, with all that it complained about and every origin it spoke to."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.origins: set[str] = set()
        self.page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("dialog", lambda dialog: (self._note(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.origins.add("/".join(request.url.split("/")[:3])))

    def _note(self, text: str) -> None:
        self.complaints.append(text)

    def sign_in(self, gateway: GatewayProcess) -> Any:
        """The page, signed in and live, with its lists."""
        self.page.goto(gateway.url + gateway.request("POST", "/v1/signin", {}).json()["path"])
        self.seen(self.page.locator("#signed-in"))
        self.seen(self.page.locator("#line"), "Live")
        return self.page

    def seen(self, element: Any, text: str | re.Pattern[str] = "") -> None:
        from playwright.sync_api import expect

        expect(element).to_be_visible(timeout=PATIENCE_MS)
        expect(element).to_contain_text(text, timeout=PATIENCE_MS)

    @contextlib.contextmanager
    def one_more_call(self) -> Iterator[None]:
        """Ends once the list of calls has grown by one."""
        from playwright.sync_api import expect

        rows = self.page.locator("#calls > li")
        before = rows.count()
        yield
        expect(rows).to_have_count(before + 1, timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("no browser: scripts/install-test-servers installs Debian's chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: it is in the extra `dev`")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens browsers; in the end, none may have complained or spoken to anybody but its gateway."""
    visits: list[Visit] = []

    def open_one(**options: Any) -> Visit:
        visits.append(Visit(browser, **options))
        return visits[-1]

    yield open_one
    for one in visits:
        one.context.close()
    assert [one.complaints for one in visits] == [[] for _ in visits]
    assert all(len(one.origins) == 1 for one in visits), [one.origins for one in visits]


def plugin(gateway: GatewayProcess, source: str | Path, folder: Path, **env: str) -> PluginProcess:
    address = {"SA_NODE_TOKEN": SHARED_TOKEN, "SA_GATEWAY_WS_URL": gateway.ws_url}
    return PluginProcess(source, folder, {**address, **env})


@pytest.fixture(scope="module")
def staffed(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with `hello` (the example) and `lab` (hostile in every word it says of itself)."""
    folder = tmp_path_factory.mktemp("plugins")
    hello = plugin(shared_gateway, ROOT / "examples" / "hello_node.py", folder, SA_NODE_ID="hello")
    with running(hello, plugin(shared_gateway, LAB, folder)):
        shared_gateway.wait_for_node("hello")
        shared_gateway.wait_for_node("lab")
        yield shared_gateway


def tool(page: Any, name: str) -> Any:
    return page.locator("#tools button").filter(has=page.get_by_text(name, exact=True))


def newest(page: Any) -> Any:
    return page.locator("#calls > li").first


def test_the_link_of_up_signs_in_once(visit: Callable[..., Visit], tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home", "--no-node", command="up") as gateway:
        assert gateway.process is not None and gateway.process.stdout is not None
        link = gateway.process.stdout.readline().split()[-1]
        first = visit()
        first.page.goto(link)
        first.seen(first.page.locator("#line"), "Live")
        assert first.page.url == f"{gateway.url}/"
        [cookie] = first.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")

        second = visit()
        answer = second.page.goto(link)
        assert answer is not None and answer.status == 401
        second.seen(second.page.locator("#signed-out"), "This sign-in link was already used or has expired.")
        second.seen(second.page.locator("#signed-out"), "farhand console")
        assert second.context.cookies() == [] and not second.page.locator("#signed-in").is_visible()
        assert {re.sub(r".*status of (\d+).*", r"\1", text) for text in second.complaints} == {"401"}
        second.complaints.clear()
        first.context.close()


def test_nodes_are_shown(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    card = page.locator("#nodes > li").filter(has=page.get_by_role("heading", name="hello", exact=True))
    for text in ("online", "reference · 0.1.0", "Tools: 3"):
        one.seen(card, text)
    one.seen(card.locator("time"), re.compile("just now|ago"))
    card.locator("summary").click()
    one.seen(card, "node.echo, node.fs.read_text, node.ping")


def test_hostile_words_stay_words(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    one.seen(page.locator("#nodes"), f"{HOSTILE} · {HOSTILE} · {HOSTILE}")
    tool(page, "lab.wait").click()
    one.seen(page.locator("#tool-text"), HOSTILE)
    page.fill("#args", f'{{"seconds": 0, "note": "{HOSTILE}"}}')
    with one.one_more_call():
        page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome pre"), HOSTILE)
    newest(page).locator("summary").click()
    one.seen(newest(page).locator(".body"), HOSTILE)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None


def test_a_tool_is_called_from_the_form(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    tool(page, "node.echo").click()
    page.fill("#args", '{"text": "good morning", "long": 1234567890123456789}')
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome .state"), "ok")
    one.seen(page.locator("#outcome pre"), '"text": "good morning"')
    one.seen(page.locator("#outcome pre"), "1234567890123456789")
    one.seen(page.locator("#outcome small"), re.compile(r"^[\d.]+ m?s$"))


def test_a_failure_shows_its_kind(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    tool(page, "lab.fail").click()
    page.fill("#args", '{"why": "the disk is full"}')
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome"), re.compile("error.*failed the disk is full"))
    page.fill("#args", '{"why": 5}')
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome"), "invalid_args")


def test_the_editor_starts_from_the_schema_and_refuses_what_is_no_json(
    staffed: GatewayProcess, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.sign_in(staffed)
    tool(page, "lab.wait").click()
    assert page.input_value("#args") == '{\n  "seconds": 0\n}'
    one.seen(page.locator("#parameters"), re.compile(r"seconds\s*number\s*note\?\s*string"))
    before = len(staffed.get("/v1/calls")["calls"])
    page.fill("#args", "{seconds: 1}")
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#problem"), "Invalid JSON")
    assert page.locator("#args").get_attribute("aria-invalid") == "true"
    assert len(staffed.get("/v1/calls")["calls"]) == before


def test_all_of_it_works_from_the_keyboard(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    page.focus("#search")
    page.keyboard.type("ECHO")
    one.seen(page.locator("#tools-count"), re.compile("^1 of "))
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("[1, 2]")
    with one.one_more_call():
        page.keyboard.press("Control+Enter")
    one.seen(page.locator("#outcome"), re.compile(r"ok.*1,\s*2", re.DOTALL))
    newest(page).locator("summary").focus()
    page.keyboard.press("Enter")
    one.seen(newest(page).locator(".body"), "Arguments")


def test_a_tool_nobody_lists_can_be_called_by_name(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    page.fill("#search", "node.unlisted")
    page.get_by_role("button", name="Call node.unlisted by name").click()
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome"), re.compile("error.*not_found"))


def test_a_call_from_elsewhere_appears_by_itself(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    page.evaluate("window.before = true")
    with one.one_more_call():
        call = staffed.invoke("node.echo", {"from": "elsewhere"})
    newest(page).locator("summary").click()
    one.seen(newest(page).locator(".body"), call["request_id"])
    one.seen(newest(page).locator(".body"), '"from": "elsewhere"')
    assert page.evaluate("window.before") is True


def test_a_running_call_can_be_cancelled(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    with one.one_more_call():
        call = staffed.invoke("lab.wait", {"seconds": 60}, background=True)
    one.seen(newest(page), "running")
    newest(page).get_by_role("button", name="Cancel").click()
    one.seen(newest(page).locator(".state"), "cancelled")
    assert newest(page).get_by_role("button", name="Cancel").count() == 0
    assert staffed.get(f"/v1/calls/{call['request_id']}")["state"] == "cancelled"


def test_a_call_of_the_form_can_be_cancelled(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.sign_in(staffed)
    tool(page, "lab.wait").click()
    page.fill("#args", '{"seconds": 60}')
    page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome .state"), "running")
    page.locator("#outcome").get_by_role("button", name="Cancel").click()
    one.seen(page.locator("#outcome"), re.compile("cancelled.*stopped early"))


def test_a_phone_needs_no_sideways_scrolling(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    one = visit(viewport={"width": 360, "height": 740}, color_scheme="dark")
    page = one.sign_in(staffed)
    tool(page, "node.echo").click()
    page.fill("#args", f'"{"w" * 300}"')
    with one.one_more_call():
        page.get_by_role("button", name="Call", exact=True).click()
    one.seen(page.locator("#outcome pre"), "www")
    newest(page).locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_node_that_leaves_is_shown_offline(
    gateway: GatewayProcess, visit: Callable[..., Visit], tmp_path: Path
) -> None:
    one = visit()
    with running(plugin(gateway, ROOT / "examples" / "hello_node.py", tmp_path, SA_NODE_ID="hello")):
        page = one.sign_in(gateway)
        one.seen(page.locator("#nodes"), "online")
    one.seen(page.locator("#nodes"), "offline")
    one.seen(page.locator("#nodes-count"), "0 of 1 online")
    one.seen(page.locator(".picker"), "No matching tools.")


def test_the_page_outlives_its_gateway(visit: Callable[..., Visit], tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", "--open")
    one = visit()
    with gateway:
        page = one.page
        page.goto(gateway.url)
        one.seen(page.locator("#signed-in"))
    one.seen(page.get_by_role("alert").first, "The gateway does not answer")
    with gateway:
        one.seen(page.locator("#line"), "Live")
        assert not page.locator("#banner").is_visible()
        gateway.invoke("nobody.there")
        one.seen(newest(page), "nobody.there")
        one.context.close()
    assert all("ERR_" in text for text in one.complaints), one.complaints
    one.complaints.clear()


def test_a_session_survives_a_restart_of_the_gateway_and_a_reload(
    gateway: GatewayProcess, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.sign_in(gateway)
    assert "#" not in page.url
    gateway.stop()
    gateway.start()
    one.seen(page.locator("#line"), "Live")
    page.reload()
    one.seen(page.locator("#line"), "Live")
    one.complaints.clear()


def test_a_new_tab_is_signed_in_by_one_that_is_open_and_not_by_the_cookie(
    staffed: GatewayProcess, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.sign_in(staffed)
    other = one.context.new_page()
    other.goto(staffed.url)
    one.seen(other.locator("#line"), "Live")
    other.close()
    page.goto("about:blank")  # no page of the console is left to ask
    alone = one.context.new_page()
    alone.goto(staffed.url)
    one.seen(alone.locator("#signed-out"), "farhand console")
    one.origins.discard("about:blank")


def test_signing_out_ends_the_session(staffed: GatewayProcess, visit: Callable[..., Visit]) -> None:
    before = {session["id"] for session in staffed.get("/v1/console/sessions")["sessions"]}
    one = visit()
    page = one.sign_in(staffed)
    [mine] = {session["id"] for session in staffed.get("/v1/console/sessions")["sessions"]} - before
    page.get_by_role("button", name="Sign out").click()
    one.seen(page.locator("#signed-out"), "Run farhand console on the gateway's machine to get a sign-in link.")
    assert not page.locator("#signed-in").is_visible()
    assert mine not in {session["id"] for session in staffed.get("/v1/console/sessions")["sessions"]}
    one.complaints.clear()


def test_a_session_that_is_ended_elsewhere_says_how_to_sign_in(
    gateway: GatewayProcess, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.sign_in(gateway)
    assert gateway.request("DELETE", "/v1/console/sessions").json() == {"ended": 1}
    one.seen(page.locator("#signed-out"), "Run farhand console")
    one.complaints.clear()
    one.sign_in(gateway)
