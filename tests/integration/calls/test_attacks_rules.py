"""Attacks on the rules of the policy by other spellings of paths, commands and folders; each must fail."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

# Everything that no rule before it allows is denied in this session.
CLOSED = "closed"
RULES = """
[[policy.rules]]
name = "no etc"
decision = "deny"
args = {{ path = "/etc/*" }}

[[policy.rules]]
name = "marked commands are asked about"
decision = "ask"
args = {{ command = "*ask-me*" }}

[[policy.rules]]
name = "no preload"
decision = "deny"
tool = "exec"
args = {{ env = "*LD_PRELOAD*" }}

[[policy.rules]]
name = "only git"
decision = "allow"
tool = "exec"
args = {{ command = "re:git (status|log)" }}

[[policy.rules]]
name = "one folder"
decision = "allow"
tool = "Read"
args = {{ path = "{above}/*" }}

[[policy.rules]]
name = "only notes"
decision = "allow"
tool = "gsv__WriteFile"
args = {{ path = "notes/*", content = "*" }}

[[policy.rules]]
name = "locked files are not undone"
decision = "deny"
tool = "undo"
args = {{ path = "*/locked/*" }}

[[policy.rules]]
name = "no logs"
decision = "deny"
node = "hands"
tool = "gsv__LogsGet"

[[policy.rules]]
name = "no memory"
decision = "deny"
tool = ["memory_get", "memory_search"]

[[policy.rules]]
name = "private files stay private"
decision = "deny"
tool = ["gsv__ReadFile", "gsv__WriteFile", "gsv__DeleteFile"]
args = {{ path = "private/*" }}

[[policy.rules]]
name = "undo is asked about"
decision = "ask"
tool = "undo"
args = {{ path = "*/asked/*" }}

[[policy.rules]]
name = "nothing else"
decision = "deny"
session = "closed"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[GatewayProcess]:
    # What three `..` leave of the node's workspace.
    write_policy(folder / "home", RULES.format(above=folder))
    with GatewayProcess(folder / "home") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def hands(gateway: GatewayProcess, folder: Path) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, folder / "a" / "b", "hands") as node:
        assert node.workspace.parents[2] == folder
        yield node


def invoke(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> Any:
    return gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more}).json()


def ask(gateway: GatewayProcess, tool: str, args: Any) -> Any:
    begun = invoke(gateway, tool, args, background=True)
    assert begun["state"] == "waiting", begun
    return asked(gateway, begun["request_id"])


def end_of(gateway: GatewayProcess, approval: Any) -> Any:
    def over() -> Any:
        found = gateway.get(f"/v1/calls/{approval['call_id']}")
        return found if found["state"] not in ("waiting", "running") else None

    return wait_until(over, 20, "the end of the call")


@pytest.mark.parametrize("path", ["/proc/self/cwd/../../../etc/hostname", "/proc/self/fd/../cwd/../../../etc/hostname"])
def test_a_denied_path_has_no_other_spelling_on_a_node(gateway: GatewayProcess, hands: NodeProcess, path: str) -> None:
    assert invoke(gateway, "hands__Read", {"path": "/etc/hostname"})["state"] == "denied"
    read = invoke(gateway, "hands__Read", {"path": path})
    assert not read["ok"], read


def test_a_denied_path_is_not_written_by_another_spelling(gateway: GatewayProcess, hands: NodeProcess) -> None:
    path = Path("/etc") / f"farhand-rules-{uuid.uuid4().hex[:8]}"
    try:
        invoke(gateway, "hands__Write", {"path": f"/proc/self/cwd/../../..{path}", "content": "x"})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_an_allowed_folder_is_that_folder_alone(gateway: GatewayProcess, hands: NodeProcess) -> None:
    (hands.workspace / "note").write_text("x")
    read = invoke(gateway, "hands__Read", {"path": "note"}, session_key=CLOSED)
    assert read["ok"], read
    read = invoke(gateway, "hands__Read", {"path": "/proc/self/cwd/../../../usr/lib/os-release"}, session_key=CLOSED)
    assert read["state"] == "denied", read


@pytest.mark.parametrize("workdir", ["/proc/self/cwd", "/proc/thread-self/cwd", "/dev/fd/../cwd", "link/.."])
def test_the_folder_that_is_shown_is_the_folder_of_the_command(
    gateway: GatewayProcess, hands: NodeProcess, workdir: str
) -> None:
    link = hands.workspace / "link"
    if not link.is_symlink():
        link.symlink_to("/usr/lib")
    approval = ask(gateway, "hands__Bash", {"command": "pwd -P; echo ask-me", "workdir": workdir})
    assert answer(gateway, approval).status == 200
    ended = end_of(gateway, approval)
    if ended["state"] == "ok":
        assert ended["result"]["output"].splitlines()[0] == approval["cwd"], (approval["cwd"], ended["result"])
    assert (ended["state"] == "ok") is (workdir == "link/.."), ended


def test_a_command_does_not_run_in_a_folder_of_a_process(gateway: GatewayProcess, hands: NodeProcess) -> None:
    ran = invoke(gateway, "hands__Bash", {"command": "pwd", "workdir": "/proc/self/cwd"})
    assert ran["error"]["kind"] == "not_allowed" and "/proc" in ran["error"]["message"], ran


def test_a_regular_expression_that_allows_fits_the_whole_command(gateway: GatewayProcess, tmp_path: Path) -> None:
    made = tmp_path / "made"
    ran = invoke(gateway, "exec", {"command": f"touch {made} git status"}, session_key=CLOSED)
    assert ran["state"] == "denied" and not made.exists(), ran


def test_a_rule_that_stops_sees_the_names_of_variables(gateway: GatewayProcess) -> None:
    ran = invoke(gateway, "exec", {"command": "true", "env": {"LD_PRELOAD": "/tmp/x.so"}})
    assert ran["state"] == "denied", ran


def test_a_rule_about_paths_holds_for_the_ends_of_a_transfer(gateway: GatewayProcess, hands: NodeProcess) -> None:
    moved = invoke(gateway, "gsv__Transfer", {"source": "hands:/etc/hostname", "destination": "gsv:h"})
    assert moved["state"] == "denied", moved


@pytest.mark.parametrize("pattern", ["/etc/host*", "/e*/hostname", "{/etc/hostname,x}", "../" * 20 + "etc/hostname"])
def test_a_rule_about_paths_holds_for_a_search(gateway: GatewayProcess, hands: NodeProcess, pattern: str) -> None:
    found = invoke(gateway, "hands__Glob", {"pattern": pattern})
    assert found["state"] == "denied", found


def test_an_allowed_folder_of_the_workspace_is_not_that_of_another_agent(gateway: GatewayProcess) -> None:
    for path, allowed in (("notes/x", True), ("agents/other/notes/x", False)):
        wrote = invoke(gateway, "gsv__WriteFile", {"path": path, "content": "x"}, session_key=CLOSED)
        assert (wrote["state"] == "ok") is allowed, wrote


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["private/x", "private//x", "./private/x", "open/../private/x"])
def test_the_workspace_routes_obey_the_rules_of_the_tools(gateway: GatewayProcess, method: str, path: str) -> None:
    file = gateway.home / "agents" / "main" / "private" / "x"
    file.parent.mkdir(exist_ok=True)
    file.write_text("kept")
    answered = gateway.request(method, f"/v1/workspace/main/{path}", "new" if method == "PUT" else None)
    assert answered.status in (400, 403, 404), answered
    assert answered.status == 403 or path != "private/x"
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/memory/get?path=MEMORY.md", None),
        ("GET", "/v1/memory/search?q=x", None),
        ("GET", "/v1/nodes/hands/logs", None),
        ("POST", "/v1/nodes/hands/probe", {"bins": ["ls"]}),
    ],
)
def test_other_routes_obey_the_rules_of_the_tools(
    gateway: GatewayProcess, hands: NodeProcess, method: str, path: str, body: Any
) -> None:
    answered = gateway.request(method, path, body)
    assert answered.status == 403, answered


def test_the_workspace_routes_serve_what_no_rule_stops(gateway: GatewayProcess) -> None:
    assert gateway.request("PUT", "/v1/workspace/main/public/x", "text").status == 200
    assert gateway.request("GET", "/v1/workspace/main/public/x").status == 200
    assert gateway.request("GET", "/v1/workspace/main").status == 200
    assert gateway.request("DELETE", "/v1/workspace/main/public/x").status == 200


@pytest.mark.parametrize("tool", ["write", "hands__Write"])
def test_an_undo_is_judged_by_the_files_it_changes(gateway: GatewayProcess, hands: NodeProcess, tool: str) -> None:
    folder = gateway.home / "agents" / "main" if tool == "write" else hands.workspace
    for name, allowed in (("locked/a", False), ("open/a", True)):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
        written = invoke(gateway, tool, {"path": str(file), "content": "new"})
        assert written["ok"], written
        undone = gateway.request("POST", f"/v1/calls/{written['request_id']}/undo", {}).json()
        assert undone["state"] == ("ok" if allowed else "denied"), undone
        assert file.read_text() == ("old" if allowed else "new")


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_undo_that_may_wait_for_its_node_is_judged_by_the_files(
    gateway: GatewayProcess, hands: NodeProcess, dry_run: bool
) -> None:
    """The node is connected, so it does not wait."""
    for name, state in (("locked/b", "denied"), ("open/b", "ok")):
        file = hands.workspace / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
        written = invoke(gateway, "hands__Write", {"path": str(file), "content": "new"})
        args = {"call": written["request_id"], "dryRun": dry_run}
        started = gateway.invoke("hands__Undo", args, when_online=True)
        ended = wait_until(lambda at=started["request_id"]: end(gateway, at))
        assert ended["state"] == state, ended
        assert file.read_text() == ("old" if state == "ok" and not dry_run else "new")


def end(gateway: GatewayProcess, call_id: str) -> Any:
    call = gateway.get(f"/v1/calls/{call_id}")
    return call if call["state"] not in ("running", "waiting") else None


@pytest.mark.parametrize("tool", ["write", "hands__Write"])
def test_an_undo_that_is_asked_about_shows_what_it_changes(
    gateway: GatewayProcess, hands: NodeProcess, tool: str
) -> None:
    def change(content: str) -> str:
        return str(invoke(gateway, tool, {"path": "asked/a", "content": content})["request_id"])

    change("one\n")
    written = change("two\n")

    def pending() -> Any:
        waiting = gateway.get("/v1/approvals?state=pending")["approvals"]
        return next((one for one in waiting if one["args"].get("call") == written), None)

    with ThreadPoolExecutor(1) as pool:
        undone = pool.submit(gateway.request, "POST", f"/v1/calls/{written}/undo", {})
        approval = wait_until(pending, 20, "the question")
        assert "-two\n+one\n" in approval["diff"], approval
        change("three\n")
        assert answer(gateway, approval).status == 200
        ended = undone.result().json()
    assert ended["state"] == "denied" and "changed" in ended["error"]["message"], ended
