"""Every screen in a real browser: on a desk and a phone, light and dark, without serious problems of accessibility."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farhand.cli.mcp.install import CLIENTS
from tests.support.browser import HOSTILE, Open
from tests.support.harness import ROOT, GatewayProcess, NodeProcess
from tests.support.model_server import ModelServer, Request, calls, text

AXE = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
SCREENS = {
    "Overview": "overview",
    "Chat": "chat/main",
    "Approvals": "approvals",
    "Calls": "calls",
    "Machines": "machines/hands",
    "Terminal": "terminal",
    "Files": "files",
    "Schedules": "schedules",
    "Memory and skills": "memory",
    "People and channels": "people",
    "Access": "access/policy",
    "Journal": "journal",
    "Add machine": "add",
    "Settings": "settings",
}
# With the other sizes and themes, the elements are the same.
CHECKED = {(1400, "light"), (390, "dark")}
CHECK = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations
    .filter((one) => ['serious', 'critical'].includes(one.impact))
    .map((one) => [one.id, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))])"""
# `FARHAND_SCREENSHOTS=docs/img` writes them there.
SHOTS = os.environ.get("FARHAND_SCREENSHOTS")
POLICY = """
[policy]
approval_seconds = 3600

[[policy.rules]]
name = "deletes"
reason = "deletes files"
decision = "ask"
tool = ["*__Bash", "exec"]
args = { command = "*rm -r*" }
"""


def answer(request: Request) -> Any:
    last = request.messages[-1]
    if last["role"] == "tool":
        return text("It printed **three** lines.\n\n- one\n- two\n\n<img src=x onerror=window.hit=1>")
    if isinstance(last["content"], list):
        pictures = [part["image_url"]["url"] for part in last["content"] if part["type"] == "image_url"]
        return text(f"I see {len(pictures)} image of {pictures[0][5:14]}")
    if "count" in str(last["content"]):
        return calls(("exec", {"command": "echo 1; until [ -e go ]; do sleep 0.05; done; echo 3"}))
    if "delete" in str(last["content"]):
        return calls(("exec", {"command": "rm -r old; echo gone"}))
    return text(f"You said: {last['content'][-40:]}")


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with a machine, a model, some history, and a call that waits."""
    folder = tmp_path_factory.mktemp("lived-in")
    home = folder / "home"
    home.mkdir()
    (home / "farhand.toml").write_text(POLICY)
    with ModelServer(answer=answer) as model:
        environment: dict[str, str | None] = dict(model.environment)
        with GatewayProcess(home, env=environment) as gateway, NodeProcess(gateway, folder, "hands") as node:
            for name, content in (("notes.py", "def hello():\n    return 1\n"), ("readme.md", "# Notes\n")):
                (node.workspace / name).write_text(content)
            for command in ("uname -a", "ls -l", "exit 3", "echo hello"):
                gateway.invoke("hands__Bash", {"command": command})
            gateway.invoke("hands__Read", {"path": "missing.txt"})
            gateway.invoke("hands__Bash", {"command": "rm -r build && make"}, background=True)
            job = {
                "name": "Nightly backup",
                "schedule": {"kind": "cron", "expr": "0 3 * * *"},
                "spec": {"mode": "task", "message": "Check the backups."},
            }
            assert gateway.request("POST", "/v1/cron", job).status == 201
            gateway.request("POST", "/v1/tokens", {"label": "ci", "scopes": ["read"], "tools": ["hands__Read"]})
            gateway.request("PUT", "/v1/workspace/main/MEMORY.md", "# Memory\n\nThe cat is called Ada.\n")
            said = {"message": "good morning", "wait_seconds": 60}
            assert gateway.request("POST", "/v1/sessions/main/messages", said).json()["state"] == "ok"
            yield gateway


def go_on(page: Any, title: str) -> None:
    page.wait_for_function("() => !document.querySelector('main [aria-busy=true], main .skeleton')")
    page.wait_for_function("(title) => document.querySelector('header h1')?.textContent === title", arg=title)


@pytest.mark.parametrize(("width", "height", "theme"), [(1400, 900, "light"), (1400, 900, "dark"), (390, 844, "light"), (390, 844, "dark")])
def test_every_screen(lived_in: GatewayProcess, visit: Open, width: int, height: int, theme: str) -> None:
    one = visit(viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce")
    page = one.sign_in(lived_in)
    page.evaluate(AXE.read_text())
    problems: list[Any] = []
    for title, path in SCREENS.items():
        one.go(path)
        go_on(page, title)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, title
        wider = page.evaluate("() => { const main = document.getElementById('main'); return main.scrollWidth - main.clientWidth; }")
        assert wider <= 1, f"{title} scrolls sideways by {wider} pixels"
        if (width, theme) in CHECKED:
            problems += [(title, one) for one in page.evaluate(CHECK)]
        if SHOTS:
            folder = ROOT / SHOTS
            folder.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "-", title.lower())
            page.screenshot(path=folder / f"console-{name}-{width}-{theme}.png")
    assert problems == []
    assert page.evaluate("window.hit") is None


def test_every_screen_is_in_the_navigation_and_the_palette(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit(viewport={"width": 390, "height": 844})
    page = one.sign_in(lived_in)
    for title in ("Journal", "Settings"):
        one.button("More").click()
        page.get_by_role("dialog").get_by_role("link", name=title, exact=True).click()
        go_on(page, title)
    page.set_viewport_size({"width": 1400, "height": 900})
    for title in SCREENS:
        page.get_by_role("navigation", name="Screens").first.get_by_role("link", name=re.compile(f"^{title}")).click()
        go_on(page, title)
    page.keyboard.press("Control+k")
    page.keyboard.type("people")
    page.keyboard.press("Enter")
    go_on(page, "People and channels")


def test_a_theme_is_chosen_and_kept(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "settings")
    page.get_by_label("Theme").select_option("contrast")
    page.reload()
    one.seen(page.locator("#line"), "Live")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(0, 0, 0)"


def test_a_conversation_streams_to_two_browsers(lived_in: GatewayProcess, visit: Open) -> None:
    one, other = visit(), visit()
    page, watching = one.sign_in(lived_in, "chat/two"), other.sign_in(lived_in, "chat/two")
    page.get_by_label("Message", exact=True).fill("please count")
    page.keyboard.press("Enter")
    for visitor, seen in ((one, page), (other, watching)):
        visitor.seen(seen.locator("details.card"), "exec")
        visitor.seen(seen.get_by_label("Live output"), "1")
    (lived_in.home / "agents" / "main" / "go").write_text("")
    for visitor, seen in ((one, page), (other, watching)):
        visitor.seen(seen.locator(".markdown strong"), "three")
        assert seen.locator(".messages img").count() == 0 and seen.evaluate("window.hit") is None
    one.button("Fork from here").last.click()
    page.wait_for_function("() => !location.hash.endsWith('/two')")
    one.seen(page.locator(".markdown strong"), "three")
    other.complaints = [text for text in other.complaints if "404" not in text]  # the session did not exist yet
    one.complaints = [text for text in one.complaints if "404" not in text]


# A red square of 2,000 pixels, as a script in the page makes it.
PAINT = """async (how) => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 2000, height: 2000});
    const brush = canvas.getContext("2d");
    brush.fillStyle = "red";
    brush.fillRect(0, 0, 2000, 2000);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
    const data = new DataTransfer();
    data.items.add(new File([blob], "red.png", {type: "image/png"}));
    const box = document.querySelector("form.compose textarea");
    box.dispatchEvent(how === "paste"
        ? new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
}"""


def test_images_are_pasted_shown_and_sent_to_the_model(lived_in: GatewayProcess, visit: Open, tmp_path: Path) -> None:
    one = visit()
    page = one.sign_in(lived_in, "chat/pictures")
    one.seen(page.get_by_label("Message", exact=True))
    page.evaluate(PAINT, "paste")
    page.evaluate(PAINT, "drop")
    kept = page.get_by_label("Images of this message").get_by_role("img")
    one.seen(kept.nth(1))
    one.button("Remove the image").first.click()
    one.gone(kept.nth(1))
    (tmp_path / "evil.png").write_text(HOSTILE)
    page.get_by_label("Image", exact=True).first.set_input_files(tmp_path / "evil.png")
    one.seen(page.get_by_role("alert"), "evil.png is not a PNG")
    page.get_by_label("Message", exact=True).fill("describe this image")
    one.button("Send").click()
    one.seen(page.locator(".markdown").last, "I see 1 image of image/png")
    one.seen(page.locator(".messages .entry.user img"))
    page.reload()
    one.seen(page.locator(".messages .entry.user img"))
    width = page.locator(".messages .entry.user img").evaluate("(image) => image.naturalWidth")
    assert width == 1568 and page.locator(".compose img").count() == 0
    one.complaints = [text for text in one.complaints if "404" not in text]  # the session did not exist yet


def test_an_approval_is_answered_in_the_conversation(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "chat/main")
    page.get_by_label("Message", exact=True).fill("delete the old folder")
    one.button("Send").click()
    card = page.locator(".messages article")
    one.seen(card, "rm -r old")
    card.get_by_role("button", name="Deny").click()
    card.get_by_role("button", name="Deny").click()
    one.gone(card)
    one.seen(page.locator(".markdown").last, "It printed")


def test_files_are_edited_unless_they_changed(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "files/hands")
    page.get_by_role("link", name="notes.py").click()
    one.seen(page.locator("pre.code .hljs-keyword").first, "def")
    one.button("Edit").click()
    page.get_by_label("notes.py").fill("def hello():\n    return 2\n")
    one.button("Save").click()
    one.seen(page.get_by_role("status").filter(has_text="Saved."))
    assert "return 2" in lived_in.invoke("hands__Read", {"path": "notes.py"})["result"]["content"]
    one.button("Edit").click()
    page.get_by_label("notes.py").fill("mine")
    lived_in.invoke("hands__Write", {"path": "notes.py", "content": "theirs"})
    one.button("Save").click()
    one.seen(page.get_by_role("alert"), "The file changed since you opened it")
    assert page.get_by_label("notes.py").input_value() == "mine"
    assert "theirs" in lived_in.invoke("hands__Read", {"path": "notes.py"})["result"]["content"]


def test_files_are_uploaded_and_copied_between_places(lived_in: GatewayProcess, visit: Open, tmp_path: Path) -> None:
    (tmp_path / "up.txt").write_text("from my desk")
    one = visit()
    page = one.sign_in(lived_in, "files/hands")
    one.seen(page.get_by_role("link", name="readme.md"))
    page.get_by_label("Upload", exact=True).set_input_files(tmp_path / "up.txt")
    page.get_by_role("link", name="up.txt").click()
    one.seen(page.locator("pre.code"), "from my desk")
    one.button("Copy to").click()
    page.get_by_role("dialog").get_by_label("Path").fill("copied.txt")
    page.get_by_role("dialog").get_by_role("button", name="Copy to").click()
    one.seen(page.locator(".transfer").filter(has_text="gsv:copied.txt"), "ok")
    assert lived_in.request("GET", "/v1/workspace/main/copied.txt").body == b"from my desk"


def test_a_schedule_is_made_with_a_preview(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "schedules")
    one.button("New schedule").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("Weekly")
    dialog.get_by_label(re.compile("^When")).fill("never on a sunny day")
    one.seen(dialog.get_by_role("alert"))
    dialog.get_by_label(re.compile("^When")).fill("0 9 * * MON")
    one.seen(dialog.locator(".note"), "Monday")
    dialog.get_by_label("Message to the agent").fill("Tidy up.")
    dialog.get_by_role("button", name="Save").click()
    one.gone(dialog)
    one.seen(page.get_by_role("heading", name="Weekly"))
    assert "Weekly" in {job["name"] for job in lived_in.get("/v1/cron")["jobs"]}
    one.complaints = [text for text in one.complaints if "400" not in text]  # the schedule that cannot be read


def test_a_narrow_token_is_made_shown_once_and_revoked(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "access")
    one.button("New token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Label").fill("robot")
    dialog.get_by_label(re.compile("^Only these tools")).fill("hands__Read")
    dialog.get_by_role("button", name="Create").click()
    secret = page.locator("code.secret")
    one.seen(secret, "fhc_")
    assert lived_in.request("GET", "/v1/nodes", token=secret.inner_text()).status == 200
    one.button("Done").click()
    page.evaluate("window.confirm = () => true")
    page.get_by_role("row").filter(has_text="robot").get_by_role("button", name="Revoke").click()
    one.seen(page.get_by_role("row").filter(has_text="robot"), "revoked")


def test_the_policy_is_explained_replayed_and_saved(lived_in: GatewayProcess, visit: Open) -> None:
    before = (lived_in.home / "farhand.toml").read_text()
    one = visit()
    page = one.sign_in(lived_in, "access/policy")
    one.seen(page.locator("ol.list"), "deletes files")
    page.get_by_label("Tool", exact=True).fill("hands__Bash")
    page.get_by_label("Arguments (JSON)").fill('{"command": "rm -r x"}')
    one.button("Explain").click()
    one.seen(page.get_by_role("status").filter(has_text="Rule"), "deletes")
    one.button("Add a rule").click()
    assert one.button("Save").is_disabled()
    draft = '{"approval_seconds": 3600, "rules": [{"decision": "deny", "name": "no ls", "args": {"command": "ls*"}}]}'
    page.get_by_label("Rules (JSON)").fill(draft)
    one.button("Explain").click()
    one.seen(page.get_by_role("status").filter(has_text="Rule"), "default")  # the draft has no rule about rm
    one.button("Replay the last week").click()
    one.seen(page.get_by_role("status").filter(has_text="denied"), "1 denied")
    try:
        # Somebody else changes the file meanwhile: nothing is overwritten, and the draft stays.
        (lived_in.home / "farhand.toml").write_text(before + "# changed\n" + '[[policy.rules]]\ndecision = "allow"\n')
        one.button("Save").click()
        one.seen(page.get_by_role("alert"), "The policy has changed since you loaded it")
        assert page.get_by_label("Rules (JSON)").input_value() == draft
        one.button("Discard the changes").click()
        one.gone(page.get_by_role("alert"))
        page.get_by_label("Rules (JSON)").fill(draft)
        one.button("Replay the last week").click()
        one.seen(page.get_by_role("status").filter(has_text="denied"), "1 denied")
        one.button("Save").click()
        one.seen(page.get_by_role("status").filter(has_text="Saved. These rules are in force now."))
        one.seen(page.locator("ol.list"), "no ls")
        assert lived_in.invoke("hands__Bash", {"command": "ls"})["error"]["kind"] == "not_allowed"
    finally:
        (lived_in.home / "farhand.toml").write_text(before)
    one.complaints = [text for text in one.complaints if "412" not in text]


def test_a_machine_is_renamed_and_tagged(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "machines/hands")
    one.button("Name and tags").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("^Name")).fill(f"Desk {HOSTILE}")
    dialog.get_by_label("Use the tags that the machine reports").uncheck()
    dialog.get_by_label(re.compile("^Tags")).fill("office, linux")
    dialog.get_by_role("button", name="Save").click()
    one.gone(dialog)
    one.seen(page.locator("main h2"), f"Desk {HOSTILE}")
    one.seen(page.locator("main"), "hands")
    one.go("machines/hands/about")
    one.seen(page.locator("dl.facts .tag").last, "linux")
    one.go("overview")
    one.seen(page.locator("article").filter(has_text="hands"), f"Desk {HOSTILE}")
    assert page.evaluate("window.hit") is None
    lived_in.request("PATCH", "/v1/nodes/hands", {"label": "", "tags": None})


@pytest.mark.parametrize("program", list(CLIENTS))
def test_a_client_is_configured_as_mcp_install_does(lived_in: GatewayProcess, visit: Open, program: str) -> None:
    one = visit()
    page = one.sign_in(lived_in, "access/connect")
    client = CLIENTS[program]
    one.button(client.title).click()
    one.button(f"Make a token for {client.title}").click()
    one.seen(page.get_by_role("status").filter(has_text="Copy this token now"))
    snippet = page.get_by_label("Configuration").inner_text()
    entry = (tomllib.loads(snippet) if client.toml else json.loads(snippet))[client.key]["farhand"]
    header = (entry.get("headers") or entry.get("http_headers"))["Authorization"]
    assert entry == client.entry(f"{lived_in.url}/mcp", header.removeprefix("Bearer "))
    assert lived_in.request("GET", "/v1/tools", token=header.removeprefix("Bearer ")).status == 200


def test_a_machine_is_added_with_a_line(lived_in: GatewayProcess, visit: Open, tmp_path: Path) -> None:
    one = visit()
    page = one.sign_in(lived_in, "add")
    one.button("Make a code").click()
    one.seen(page.locator("pre").last, "farhand join ")
    one.seen(page.get_by_role("img", name="QR code of the line"))
    one.seen(page.locator("main"), "Waiting for the machine")
    with NodeProcess(lived_in, tmp_path, "fresh"):
        one.seen(page.get_by_role("status").filter(has_text="fresh has joined"))


def test_the_journal_is_filtered_and_exported(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "journal?kind=call.ended")
    one.seen(page.locator("main .kind").first, "call.ended")
    page.locator("main .list .item").first.click()
    one.seen(page.get_by_label("Data"), '"kind": "call.ended"')
    with page.expect_download() as saved:
        one.button("Export").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert len(lines) >= 4 and all('"call.ended"' in line for line in lines)


def test_memory_is_searched_and_edited(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "memory")
    page.get_by_label("Search in memory").fill("cat")
    page.get_by_role("link", name=re.compile("called Ada")).click()
    page.get_by_label("MEMORY.md").fill("# Memory\n\nThe cat is called Grace.\n")
    one.button("Save").click()
    one.seen(page.get_by_role("status").filter(has_text="Saved."))
    assert b"Grace" in lived_in.request("GET", "/v1/workspace/main/MEMORY.md").body


def test_the_model_is_tested(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "settings")
    one.button("Test").click()
    one.seen(page.get_by_role("status").filter(has_text="It answered in"), "You said")


def test_a_long_list_scrolls_smoothly(lived_in: GatewayProcess, visit: Open) -> None:
    """100,000 calls: only the rows in view have elements, and frames keep coming while it scrolls."""
    one = visit()
    page = one.page
    page.add_init_script("""
        const fetched = window.fetch;
        const call = (n) => ({id: `id-${n}`, request_id: `id-${n}`, tool: "hands__Bash", state: "ok", route: {kind: "node"},
            created_at: Date.now(), duration_ms: n, args: {command: `echo ${n}`}});
        const calls = () => Array.from({length: 100_000}, (_, n) => call(200_000 - n));
        window.fetch = (path, options) => /^v1\\/calls\\?.*limit=200/.test(path)
            ? Promise.resolve(new Response(JSON.stringify({calls: calls()}))) : fetched(path, options);
    """)
    one.sign_in(lived_in, "calls")
    one.seen(page.get_by_role("status").filter(has_text="calls"), "100,000")
    rates = page.evaluate("""async () => {
        // Frames in a second and a half, while something is done for each.
        const count = async (act) => {
            let frames = 0;
            const began = performance.now();
            for (; performance.now() < began + 1500; frames += 1) {
                act();
                await new Promise(requestAnimationFrame);
            }
            return frames / (performance.now() - began) * 1000;
        };
        const view = document.querySelector("#calls .view");
        const rounds = [];
        for (let round = 0; round < 5; round += 1) {
            view.scrollTop = round * 500_000;
            rounds.push([await count(() => (view.scrollTop += 400)), await count(() => {})]);
        }
        return rounds;
    }""")
    assert page.locator("#calls li").count() < 100
    assert page.locator("#calls .view").evaluate("(view) => view.scrollTop") > 1_000_000
    print("frames/s while scrolling, and while idle:", [(round(one), round(other)) for one, other in rates])
    # The figures are printed, not promised: they depend on the machine. Frames have to keep coming.
    assert min(scrolling for scrolling, _ in rates) > 1, rates


def test_secrets_are_shown_by_name_only(lived_in: GatewayProcess, visit: Open) -> None:
    value = {"value": "do-not-show-this-value"}
    assert lived_in.request("PUT", "/v1/secrets/API_KEY", value).status == 200
    one = visit()
    page = one.sign_in(lived_in, "access/clients")
    one.seen(page.locator("main"), "API_KEY")
    one.seen(page.locator("main"), "No OAuth clients")
    assert "do-not-show" not in page.content()
    page.locator("li").filter(has_text="API_KEY").get_by_role("button", name="Remove").click()
    one.gone(page.locator("li").filter(has_text="API_KEY"))
