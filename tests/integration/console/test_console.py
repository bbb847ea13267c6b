"""The console in a real browser: its files, signing in, sessions, and a gateway that goes away."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from farhand.api.routes import console as routes
from tests.support.browser import BUILT, Open
from tests.support.harness import ROOT, SHARED_TOKEN, GatewayProcess, PluginProcess, running

FIRST_LOAD_BYTES = 150 * 1024
SOURCES = ROOT / "console" / "src"

# -- what needs no browser ----------------------------------------------------------------------------------


def test_markup_of_other_people_is_only_inserted_after_cleaning() -> None:
    inserted = [file.name for file in SOURCES.rglob("*.svelte") if "{@html" in file.read_text()]
    assert inserted in ([], ["Markdown.svelte"])
    for file in SOURCES.rglob("*"):
        if file.suffix in (".svelte", ".ts"):
            text = file.read_text()
            for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert forbidden not in text, f"{forbidden} in {file.name}"


def test_every_text_is_in_one_file() -> None:
    """What people read comes from `lib/texts.ts`; names of keys, formats and commands are not translated."""
    same_everywhere = {"Ctrl K", "Ctrl", "JSON", "farhand mcp install", "laptop__Bash", "https://…/mcp"}
    found = set()
    for file in SOURCES.rglob("*.svelte"):
        template = re.sub(r"<(script|style)\b.*?</\1>|<!--.*?-->", "", file.read_text(), flags=re.DOTALL)
        while (shorter := re.sub(r"\{[^{}]*\}", "", template)) != template:
            template = shorter
        texts = re.findall(r">([^<>]+)<", template)
        texts += re.findall(r'\b(?:placeholder|title|aria-label|alt)="([^"]+)"', template)
        texts = [re.sub(r"&\w+;", "", text).strip() for text in texts]
        found |= {text for text in texts if re.search(r"[A-Za-z]{2}", text)}
    assert found <= same_everywhere


def test_the_lock_has_hashes_and_no_addresses() -> None:
    lock = (ROOT / "console" / "package-lock.json").read_text()
    assert "resolved" not in lock and lock.count('"integrity"') > 20


@pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="the console was not built")
def test_the_first_load_is_small() -> None:
    index = (BUILT / "index.html").read_text()
    names = set(re.findall(r"assets/([\w.-]+)", index))
    # The first screen is loaded as well.
    names |= {file.name for file in (BUILT / "assets").iterdir() if file.name.startswith("Overview-")}
    # What these import statically is loaded with them; `import(…)` is not.
    waiting = [name for name in names if name.endswith(".js")]
    while waiting:
        text = (BUILT / "assets" / waiting.pop()).read_text()
        found = set(re.findall(r"""(?:from|import)\s*["']\./([\w.-]+\.js)["']""", text)) - names
        names |= found
        waiting += found
    size = sum(len(gzip.compress((BUILT / "assets" / name).read_bytes())) for name in names)
    assert 10_000 < size + len(index) < FIRST_LOAD_BYTES
    assert not any("Terminal" in name or "uPlot" in name for name in names)


@pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="the console was not built")
def test_every_file_carries_the_content_policy(shared_gateway: GatewayProcess) -> None:
    scripts = [f"/assets/{file.name}" for file in (BUILT / "assets").iterdir()]
    for path in ("/", "/console.svg", "/manifest.webmanifest", "/icon-192.png", "/docs", "/docs.js", *scripts[:3]):
        answer = shared_gateway.request("GET", path, token=None)
        assert answer.status == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "immutable" in shared_gateway.request("GET", scripts[0], token=None).headers["cache-control"]
    assert shared_gateway.request("GET", "/", token=None).headers["cache-control"] == "no-store"


def test_no_path_leads_out_of_the_folder(shared_gateway: GatewayProcess) -> None:
    for name in ("nothing.js", "..", "%2e%2e", "..%2findex.html", "%2e%2e%2f__init__.py", "a%00b"):
        assert shared_gateway.request("GET", f"/assets/{name}", token=None).status in (400, 401, 404), name


def test_without_a_build_the_page_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_BUILT", "nowhere")
    page = routes._page("/")
    assert b"was not built" in page.body and b"make run" in page.body


def test_a_spent_link_is_a_problem_for_programs_and_a_page_for_people(shared_gateway: GatewayProcess) -> None:
    plain = shared_gateway.request("GET", "/signin?code=wrong", token=None)
    assert (plain.status, plain.json()["error"]["code"]) == (401, "unauthorized")
    page = shared_gateway.request("GET", "/signin?code=wrong", token=None, headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "set-cookie" not in plain.headers and "set-cookie" not in page.headers


def hello(gateway: GatewayProcess, folder: Path) -> PluginProcess:
    address = {"SA_NODE_TOKEN": SHARED_TOKEN, "SA_GATEWAY_WS_URL": gateway.ws_url, "SA_NODE_ID": "hello"}
    return PluginProcess(ROOT / "examples" / "hello_node.py", folder, address)


# -- in the browser -----------------------------------------------------------------------------------------


def test_the_link_of_up_signs_in_once(visit: Open, tmp_path: Path) -> None:
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


def test_a_node_that_leaves_is_shown_offline(gateway: GatewayProcess, visit: Open, tmp_path: Path) -> None:
    one = visit()
    with running(hello(gateway, tmp_path)):
        page = one.sign_in(gateway)
        one.seen(page.locator("article").filter(has_text="hello"), "online")
    one.seen(page.locator("article").filter(has_text="hello"), "offline")
    one.seen(page.locator("main"), "0 of 1 online")


def test_the_page_outlives_its_gateway(visit: Open, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path / "home", "--open")
    one = visit()
    with gateway:
        page = one.page
        page.goto(f"{gateway.url}/#/calls")
        one.seen(page.locator("#line"), "Live")
        gateway.invoke("first.there")
        one.seen(page.locator("#calls"), "first.there")
    one.seen(page.locator("#banner"), "The gateway does not answer")
    one.seen(page.locator("#calls"), "first.there")
    with gateway:
        one.seen(page.locator("#line"), "Live")
        one.gone(page.locator("#banner"))
        gateway.invoke("nobody.there")
        one.seen(page.locator("#calls"), "nobody.there")
        one.context.close()
    assert all("ERR_" in text for text in one.complaints), one.complaints
    one.complaints.clear()


def test_a_session_survives_a_restart_of_the_gateway_and_a_reload(gateway: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(gateway)
    assert "page=" not in page.url
    gateway.stop()
    gateway.start()
    one.seen(page.locator("#line"), "Live")
    page.reload()
    one.seen(page.locator("#line"), "Live")
    one.complaints.clear()


def test_a_new_tab_is_signed_in_by_one_that_is_open_and_not_by_the_cookie(
    shared_gateway: GatewayProcess, visit: Open
) -> None:
    one = visit()
    page = one.sign_in(shared_gateway)
    other = one.context.new_page()
    other.goto(shared_gateway.url)
    one.seen(other.locator("#line"), "Live")
    other.close()
    page.goto("about:blank")  # no page of the console is left to ask
    alone = one.context.new_page()
    alone.goto(shared_gateway.url)
    one.seen(alone.locator("#signed-out"), "farhand console")
    one.origins.discard("about:blank")


def test_many_tabs_share_one_stream(shared_gateway: GatewayProcess, visit: Open) -> None:
    """Browsers open six connections to a server; more tabs than that work, also when the one that reads is gone."""
    one = visit()
    streams: list[str] = []
    one.context.on(
        "request", lambda request: streams.append(request.url) if request.url.endswith("/v1/events") else None
    )
    page = one.sign_in(shared_gateway, "calls")
    secret = page.evaluate("sessionStorage.getItem('farhand /')")
    others = [one.context.new_page() for _ in range(7)]
    for other in others:
        other.goto(f"{shared_gateway.url}/#/calls")
        one.seen(other.locator("#line"), "Live")
    assert len(streams) == 1
    shared_gateway.invoke("first.tab")
    for tab in (page, *others):
        one.seen(tab.locator("#calls"), "first.tab")
    page.close()  # it was the one that read
    shared_gateway.invoke("second.tab")
    for tab in others:
        one.seen(tab.locator("#calls"), "second.tab")
    assert len(streams) == 2
    # A tab that sleeps keeps what it holds; a new one takes over.
    for tab in others:
        one.context.new_cdp_session(tab).send("Page.setWebLifecycleState", {"state": "frozen"})
    fresh = one.context.new_page()
    fresh.add_init_script(f"sessionStorage.setItem('farhand /', {secret!r})")
    fresh.goto(f"{shared_gateway.url}/#/calls")
    one.seen(fresh.locator("#line"), "Live")
    shared_gateway.invoke("third.tab")
    one.seen(fresh.locator("#calls"), "third.tab")
    for tab in others:
        one.context.new_cdp_session(tab).send("Page.setWebLifecycleState", {"state": "active"})
        one.seen(tab.locator("#calls"), "third.tab")


def test_signing_out_ends_the_session(shared_gateway: GatewayProcess, visit: Open) -> None:
    before = {session["id"] for session in shared_gateway.get("/v1/console/sessions")["sessions"]}
    one = visit()
    page = one.sign_in(shared_gateway)
    [mine] = {session["id"] for session in shared_gateway.get("/v1/console/sessions")["sessions"]} - before
    one.button("Sign out").click()
    one.seen(page.locator("#signed-out"), "Run this on the gateway's machine to get a sign-in link.")
    assert not page.locator("#signed-in").is_visible()
    assert mine not in {session["id"] for session in shared_gateway.get("/v1/console/sessions")["sessions"]}
    one.complaints.clear()


def test_an_ended_session_keeps_what_was_typed(gateway: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(gateway, "machines/gsv/tools/gsv__WriteFile")
    page.get_by_label("content", exact=True).fill("half a thought")
    assert gateway.request("DELETE", "/v1/console/sessions").json() == {"ended": 1}
    one.seen(page.get_by_role("dialog"), "Your session has ended")
    # Another tab signs in, and this one continues.
    other = one.context.new_page()
    other.goto(gateway.url + gateway.request("POST", "/v1/signin", {}).json()["path"])
    one.seen(page.locator("#line"), "Live")
    one.gone(page.get_by_role("dialog"))
    assert page.get_by_label("content", exact=True).input_value() == "half a thought"
    one.complaints.clear()


def test_the_page_is_not_for_other_sites(shared_gateway: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(shared_gateway)
    hit = page.evaluate("""() => new Promise((done) => {
        const script = document.createElement("script");
        script.textContent = "window.hit = 1";
        document.head.append(script);
        setTimeout(() => done(window.hit ?? null), 50);
    })""")
    assert hit is None
    assert any("Content Security Policy" in text for text in one.complaints)
    one.complaints.clear()


def test_prefix_paths_are_relative() -> None:
    if (BUILT / "index.html").exists():
        assert not re.search(r'(src|href)="/', (BUILT / "index.html").read_text())
