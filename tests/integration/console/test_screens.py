"""Every screen in a real browser: on desktop and phone, light and dark, without serious accessibility problems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from farhand.cli.mcp.install import CLIENTS
from farhand.protocol.receipts import fingerprint as fingerprint_of
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
    "Budgets": "budgets",
    "Journal": "journal",
    "Add machine": "add",
    "Settings": "settings",
}
# What else the screens show, by the name of its picture: the screen and the address of a call, a job, a terminal.
PARTS = {
    "call": ("Calls", "calls/CALL"),
    "machine-list": ("Machines", "machines"),
    "machine-tools": ("Machines", "machines/hands/tools/hands__Bash"),
    "machine-jobs": ("Machines", "machines/hands/jobs"),
    "machine-about": ("Machines", "machines/hands/about"),
    "machine-log": ("Machines", "machines/hands/logs"),
    "file": ("Files", "files/hands?file=notes.py"),
    "schedule": ("Schedules", "schedules/JOB"),
    "memory-file": ("Memory and skills", "memory/file/MEMORY.md"),
    "skills": ("Memory and skills", "memory/skills"),
    "shell": ("Terminal", "terminal/SHELL"),
    "access-tokens": ("Access", "access/tokens"),
    "access-always": ("Access", "access/always"),
    "access-connect": ("Access", "access/connect"),
    "access-clients": ("Access", "access/clients"),
    "access-sessions": ("Access", "access/sessions"),
}
# With the other sizes and themes, the elements are the same.
CHECKED = {(1400, "light"), (390, "dark")}
CHECK = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations
    .filter((one) => ['serious', 'critical'].includes(one.impact))
    .map((one) => [one.id, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))])"""
# `FARHAND_SCREENSHOTS=docs/img` writes them there.
SHOTS = os.environ.get("FARHAND_SCREENSHOTS")
ALL = bool(SHOTS) or os.environ.get("FARHAND_SIEGE") == "long"
SIZES = [(1400, 900, "light"), (1400, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
POLICY = """
[policy]
approval_seconds = 3600

[[policy.rules]]
name = "deletes"
reason = "deletes files"
decision = "ask"
tool = ["*__Bash", "exec"]
args = { command = "*rm -r*" }

[budgets.session]
money = 2.0
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
            token = {"label": "ci", "scopes": ["read"], "tools": ["hands__Read"]}
            limits = [{"unit": "calls", "amount": 500}, {"unit": "bytes", "amount": 10**9, "period": "total"}]
            assert gateway.request("POST", "/v1/tokens", {**token, "budget": limits}).status == 201
            for subject, limit in (
                ("all", {"unit": "money", "amount": 20}),
                ("agent:main", {"unit": "tokens", "amount": 200_000}),
            ):
                assert gateway.request("PUT", "/v1/budgets", {"subject": subject, "limits": [limit]}).status == 200
            gateway.request("PUT", "/v1/workspace/main/MEMORY.md", b"# Memory\n\nThe cat is called Ada.\n")
            shell = "cat readme.md; ls -l; PS1='hands$ ' exec sh -i"
            assert gateway.request("POST", "/v1/terminals", {"node": "hands", "command": shell}).status == 200
            said = {"message": "good morning", "wait_seconds": 60}
            assert gateway.request("POST", "/v1/sessions/main/messages", said).json()["state"] == "ok"
            yield gateway


def go_on(page: Any, title: str) -> None:
    page.wait_for_function("() => !document.querySelector('main [aria-busy=true], main .skeleton')")
    page.wait_for_function("(title) => document.querySelector('header h1')?.textContent === title", arg=title)


@pytest.mark.siege
@pytest.mark.parametrize(("width", "height", "theme"), [one for one in SIZES if ALL or (one[0], one[2]) in CHECKED])
def test_every_screen(lived_in: GatewayProcess, visit: Open, width: int, height: int, theme: str) -> None:
    one = visit(viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce")
    page = one.sign_in(lived_in)
    page.evaluate(AXE.read_text())
    problems: list[Any] = []
    call = lived_in.get("/v1/calls?tool=hands__Bash&state=ok&limit=1")["calls"][0]["id"]
    job = lived_in.get("/v1/cron")["jobs"][0]["id"]
    shell = lived_in.get("/v1/terminals")["terminals"][0]["terminal_id"]
    pictures = {re.sub(r"\W+", "-", title.lower()): (title, path) for title, path in SCREENS.items()}
    for name, (title, path) in {**pictures, **PARTS}.items():
        one.go(path.replace("CALL", call).replace("JOB", job).replace("SHELL", shell))
        go_on(page, title)
        if name == "shell":
            one.seen(page.locator(".xterm-rows"), "hands$")
        if name == "call":
            page.get_by_text("Receipt", exact=True).click()
            one.seen(page.locator("details dl.facts"), "signed with")
            page.locator("details pre").scroll_into_view_if_needed()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        wider = page.evaluate(
            "() => { const main = document.getElementById('main'); return main.scrollWidth - main.clientWidth; }"
        )
        assert wider <= 1, f"{name} scrolls sideways by {wider} pixels"
        if (width, theme) in CHECKED:
            problems += [(name, one) for one in page.evaluate(CHECK)]
        if SHOTS:
            folder = ROOT / SHOTS
            folder.mkdir(parents=True, exist_ok=True)
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


def test_a_budget_is_set_shown_changed_and_removed(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "budgets")
    agent = page.locator("article").filter(has_text="main").first
    one.seen(agent, re.compile(r"Model tokens.*of 200,000.*Per day, renews in", re.DOTALL))
    one.seen(page.locator("article").filter(has_text="ci"), "500")
    one.seen(page.locator("main"), "Each session")
    one.button("Set a budget").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Save").click()
    one.seen(dialog.get_by_role("alert"), "Enter at least one limit.")
    dialog.get_by_label("Budget for").select_option("agent")
    dialog.get_by_role("combobox", name="Agent", exact=True).fill("helper")
    dialog.get_by_label(re.compile("^Calls")).fill("3")
    dialog.get_by_role("button", name="Save").click()
    one.gone(dialog)
    helper = page.locator("article").filter(has_text="helper")
    one.seen(helper, "0 of 3")
    [set_] = lived_in.get("/v1/budgets?subject=agent:helper")["budgets"]
    assert (set_["unit"], set_["limit"], set_["period"], set_["source"]) == ("calls", 3, "day", "set")
    helper.get_by_role("button", name="Edit").click()
    dialog.get_by_label(re.compile("^Calls")).fill("4.5")
    dialog.get_by_label(re.compile("^Money")).fill("1.25")
    dialog.get_by_role("button", name="Save").click()
    assert dialog.get_by_label(re.compile("^Calls")).evaluate("(field) => !field.checkValidity()")
    dialog.get_by_label(re.compile("^Calls")).fill("")
    dialog.get_by_role("combobox", name="Period: Money").select_option("total")
    dialog.get_by_role("button", name="Save").click()
    one.gone(dialog)
    one.seen(helper, re.compile(r"Money.*\$0.00 of \$1.25.*In total", re.DOTALL))
    page.evaluate("window.confirm = () => true")
    helper.get_by_role("button", name="Remove").click()
    one.gone(helper)
    assert lived_in.get("/v1/budgets?subject=agent:helper")["budgets"] == []


def test_a_token_gets_a_budget_and_a_used_up_one_is_reported(lived_in: GatewayProcess, visit: Open) -> None:
    one = visit()
    page = one.sign_in(lived_in, "access/tokens")
    one.button("New token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Label").fill(f"spender {HOSTILE}")
    dialog.get_by_label("tools.exec").check()
    dialog.get_by_text("Budget of the token").click()
    dialog.get_by_label(re.compile("^Calls")).fill("1")
    dialog.get_by_role("button", name="Create").click()
    secret = page.locator("code.secret")
    one.seen(secret, "fhc_")
    reported = {"tool": "hands__Bash", "args": {"command": "true"}}
    states = [
        lived_in.request("POST", "/v1/tools/invoke", reported, token=secret.inner_text()).json()["ok"] for _ in range(2)
    ]
    assert states == [True, False]
    page.get_by_role("row").filter(has_text="spender").get_by_role("link", name="Budgets").click()
    one.seen(page.get_by_role("dialog"), "Budget: spender")
    page.keyboard.press("Escape")
    spender = page.locator("article").filter(has_text=f"spender {HOSTILE}")
    one.seen(spender, re.compile("Used up.*1 of 1", re.DOTALL))
    one.go("overview")
    one.seen(page.locator("section").filter(has=page.locator("#budgets-title")), "Used up")
    assert page.evaluate("window.hit") is None


def test_a_receipt_is_downloaded_and_verified(lived_in: GatewayProcess, visit: Open, tmp_path: Path) -> None:
    call = lived_in.invoke("hands__Bash", {"command": "echo signed"})["request_id"]
    one = visit()
    page = one.sign_in(lived_in, f"calls/{call}")
    page.get_by_text("Receipt", exact=True).click()
    one.seen(page.locator("details dl.facts"), re.compile("Gateway.*signed.*Machine.*signed with", re.DOTALL))
    command = page.locator("details pre").inner_text()
    fingerprint = lived_in.get("/v1/receipts/key")["fingerprint"]
    assert command.startswith(f"farhand receipt verify receipt-{call}.json --gateway-key {fingerprint}")
    page.get_by_label("Include the arguments and the result").check()
    with page.expect_download() as saved:
        one.button("Download the receipt").click()
    assert saved.value.suggested_filename == f"receipt-{call}.json"
    file = tmp_path / saved.value.suggested_filename
    saved.value.save_as(file)
    assert "echo signed" in file.read_text()
    one.seen(page.locator("details dl.facts"), fingerprint_of(json.loads(file.read_text())["node"]["key"]))
    program = [sys.executable, "-m", "farhand", *command.split()[1:]]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(file.read_text().replace("echo signed", "echo forged"))
    assert subprocess.run(program, cwd=tmp_path, capture_output=True, check=False).returncode == 1


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
        # Another program changes the file meanwhile: nothing is overwritten, and the draft stays.
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


# Scrolls by a number of pixels in each of a number of frames; returns the frames per second.
SCROLL = """async ([pixels, frames]) => {
    const view = document.querySelector("#calls .view");
    const began = performance.now();
    for (let frame = 0; frame < frames; frame += 1) {
        view.scrollTop += pixels;
        await new Promise(requestAnimationFrame);
    }
    return frames / (performance.now() - began) * 1000;
}"""


@pytest.mark.parametrize(("pixels", "what"), [(400, "flicked"), (5_000, "dragged")])
def test_a_list_of_100_000_calls_scrolls_at_50_frames_a_second(
    lived_in: GatewayProcess, visit: Open, pixels: int, what: str
) -> None:
    """The processor time of the page's main thread is judged: the wall clock also measures what else is running."""
    frames, rounds = 60, 7
    one = visit()
    page = one.page
    page.add_init_script("""
        const fetched = window.fetch;
        const call = (n) => ({id: `id-${n}`, request_id: `id-${n}`, tool: "hands__Bash", state: "ok",
            route: {kind: "node"}, created_at: Date.now(), duration_ms: n, args: {command: `echo ${n}`}});
        const calls = () => Array.from({length: 100_000}, (_, n) => call(200_000 - n));
        window.fetch = (path, options) => /^v1\\/calls\\?.*limit=200/.test(path)
            ? Promise.resolve(new Response(JSON.stringify({calls: calls()}))) : fetched(path, options);
    """)
    one.sign_in(lived_in, "calls")
    one.seen(page.get_by_role("status").filter(has_text="calls"), "100,000")
    page.locator("#calls li").nth(20).evaluate("(row) => row.marked = true")
    session = one.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration") * 1000

    page.evaluate(SCROLL, [pixels, frames])
    costs, rates = [], []
    for _ in range(rounds):
        before = spent()
        rates.append(page.evaluate(SCROLL, [pixels, frames]))
        costs.append((spent() - before) / frames)
    print(f"{what}: {median(costs):.1f} ms of main thread per frame, {median(rates):.0f} frames/s by the wall clock")
    # Rows are reused, in order, and the last one in view is the right one.
    positions = page.locator("#calls li").evaluate_all("(rows) => rows.map((row) => Number(row.ariaPosInSet))")
    assert len(positions) < 60 and positions == list(range(positions[0], positions[0] + len(positions)))
    assert page.locator("#calls li").evaluate_all("(rows) => rows.some((row) => row.marked)")
    top = page.locator("#calls .view").evaluate("(view) => view.scrollTop")
    assert top > pixels * frames * rounds
    one.seen(page.locator("#calls li").first, f"echo {200_001 - positions[0]}")
    assert median(costs) <= 1000 / 50, costs


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
