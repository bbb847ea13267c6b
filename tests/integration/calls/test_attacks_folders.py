"""Attempts to read or write files that rules protect, by way of a folder that holds them; each must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.calls.test_approvals import answer, asked, write_policy
from tests.support.harness import GatewayProcess, NodeProcess, wait_until

RULES = """
[[policy.rules]]
name = "secrets"
decision = "deny"
args = { path = "*/secret/*" }

[[policy.rules]]
name = "secrets of the workspace"
decision = "deny"
args = { path = "private/*" }

[[policy.rules]]
name = "memory"
decision = "deny"
args = { path = "memory/private*" }
"""
ASKING = """
[[policy.rules]]
name = "asked"
decision = "ask"
args = { path = "*/careful/*" }
"""
WORD = "hunter2"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = tmp_path_factory.mktemp("folders") / "home"
    write_policy(home, RULES)
    with GatewayProcess(home) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def hands(gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        for folder in ("top/secret", "open"):
            (node.workspace / folder).mkdir(parents=True)
            (node.workspace / folder / "key").write_text(WORD)
        yield node


def invoke(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> Any:
    return gateway.request("POST", "/v1/tools/invoke", {"tool": tool, "args": args, **more}).json()


@pytest.mark.parametrize("folder", [".", "", "top", "top/secret", "open/../top", "/proc/self/root", "/"])
@pytest.mark.parametrize("tool", ["Grep", "Glob"])
def test_a_search_does_not_reach_what_a_rule_protects(
    gateway: GatewayProcess, hands: NodeProcess, tool: str, folder: str
) -> None:
    pattern = WORD if tool == "Grep" else "**/key"
    found = invoke(gateway, f"hands__{tool}", {"pattern": pattern, "path": folder})
    assert found["state"] == "denied" and "secrets" in found["error"]["message"], found


def test_a_search_of_another_folder_runs(gateway: GatewayProcess, hands: NodeProcess) -> None:
    assert WORD in str(invoke(gateway, "hands__Read", {"path": "open/key"}))
    found = invoke(gateway, "hands__Grep", {"pattern": "x", "path": "open", "include": "*.txt"})
    assert found["state"] == "denied", "it may hold a folder of that name"


@pytest.mark.parametrize("source", ["hands:top", "hands:top/", "hands:top/secret", "hands:.", "hands:top//secret/."])
def test_no_transfer_of_a_folder_takes_what_a_rule_protects(
    gateway: GatewayProcess, hands: NodeProcess, source: str
) -> None:
    moved = invoke(gateway, "gsv__Transfer", {"source": source, "destination": "gsv:stolen"})
    assert moved["ok"] is False and "secrets" in moved["error"]["message"], moved
    begun = gateway.request("POST", "/v1/transfers", {"source": source, "destination": "gsv:stolen"})
    assert begun.status == 403 and "secrets" in begun.json()["error"]["message"], begun
    listed = gateway.request("GET", f"/v1/transfers/manifest?source={source}")
    assert listed.status == 403 and b"key" not in listed.body, listed
    assert not list((gateway.home / "agents" / "main").glob("stolen*"))


def test_no_transfer_of_a_folder_writes_what_a_rule_protects(gateway: GatewayProcess, hands: NodeProcess) -> None:
    source = gateway.home / "agents" / "main" / "upload"
    (source / "secret").mkdir(parents=True)
    (source / "secret" / "key").write_text("planted")
    for destination in ("hands:top", "hands:new"):
        moved = invoke(gateway, "gsv__Transfer", {"source": "gsv:upload", "destination": destination})
        assert moved["ok"] is False and "secrets" in moved["error"]["message"], moved
    assert (hands.workspace / "top" / "secret" / "key").read_text() == WORD
    assert not (hands.workspace / "new").exists()


def test_one_file_is_still_transferred(gateway: GatewayProcess, hands: NodeProcess) -> None:
    moved = invoke(gateway, "gsv__Transfer", {"source": "hands:open/key", "destination": "gsv:copied"})
    assert moved["ok"] is True, moved
    assert gateway.request("GET", "/v1/transfers/content?source=hands:open/key").body == WORD.encode()


def test_a_rule_that_asks_about_files_asks_about_their_folder(tmp_path: Path) -> None:
    write_policy(tmp_path / "home", ASKING)
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        (node.workspace / "careful").mkdir()
        (node.workspace / "careful" / "key").write_text(WORD)
        ends = {"source": "hands:careful", "destination": "gsv:copy"}
        moved = invoke(gateway, "gsv__Transfer", ends)
        assert moved["ok"] is False and "ends with '/'" in moved["error"]["message"], moved
        assert gateway.request("POST", "/v1/transfers", ends).status == 403
        begun = invoke(gateway, "gsv__Transfer", {**ends, "source": "hands:careful/"}, background=True)
        assert begun["state"] == "waiting", begun
        assert answer(gateway, asked(gateway, begun["request_id"])).status == 200

        def over() -> Any:
            found = gateway.get(f"/v1/calls/{begun['request_id']}")
            return found if found["state"] not in ("waiting", "running") else None

        assert wait_until(over, 30, "the end of the transfer")["state"] == "ok"
        assert (gateway.home / "agents" / "main" / "copy" / "key").read_text() == WORD


def test_a_search_of_the_memory_does_not_show_what_a_rule_protects(gateway: GatewayProcess) -> None:
    memory = gateway.home / "agents" / "main" / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    (memory / "private.md").write_text(f"The word is {WORD}.\n")
    assert invoke(gateway, "memory_get", {"path": "memory/private.md"})["state"] == "denied"
    found = invoke(gateway, "memory_search", {"query": "word"})
    assert found["state"] == "denied", found
    answered = gateway.request("GET", "/v1/memory/search?q=word")
    assert answered.status == 403 and WORD.encode() not in answered.body, answered


def test_no_message_carries_what_a_rule_protects(gateway: GatewayProcess) -> None:
    for path, stopped in (("private/x", True), ("/private//x", True), ("public/x", False)):
        sent = invoke(gateway, "gsv__Message", {"text": "x", "channel": "crm", "to": "y", "media": [path]})
        assert (sent["state"] == "denied") is stopped, sent


@pytest.mark.parametrize("agent", ["main", "other"])
def test_an_undo_in_a_workspace_is_judged_by_the_path_there(gateway: GatewayProcess, agent: str) -> None:
    """The write itself is made before the rule exists, so only the undo meets it."""
    settings = gateway.home / "farhand.toml"
    rules = settings.read_text()
    (gateway.home / "agents" / agent).mkdir(parents=True, exist_ok=True)
    for name, stopped in (("private/x", True), ("public/x", False)):
        settings.write_text("")

        def written(content: str, name: str = name) -> Any:
            made = invoke(gateway, "gsv__WriteFile", {"path": name, "content": content}, agent_id=agent)
            return made if made["ok"] else None

        wait_until(lambda: written("old"), 20, "the settings without rules")
        made = written("new")
        settings.write_text(rules)
        wait_until(lambda: gateway.get("/v1/policy")["rules"], 20, "the settings with rules")
        undone = gateway.request("POST", f"/v1/calls/{made['request_id']}/undo", {}).json()
        assert undone["state"] == ("denied" if stopped else "ok"), undone
        content = (gateway.home / "agents" / agent / name).read_text()
        assert content == ("new" if stopped else "old")


PATCH = "*** Begin Patch\n*** Update File: private/x\n@@\n-hunter2\n+y\n*** End Patch"


@pytest.fixture
def private(gateway: GatewayProcess) -> Path:
    file = gateway.home / "agents" / "main" / "private" / "x"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(WORD)
    return file


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("read", {"path": "private/x"}),
        ("read", {"file_path": "./private//x"}),
        ("read", {"path": "{file}"}),
        ("grep", {"pattern": "hunter", "path": "private"}),
        ("grep", {"pattern": "hunter"}),
        ("glob", {"pattern": "p*/*"}),
        ("edit", {"path": "private/x", "old_text": "h", "new_text": "i"}),
        ("write", {"path": "private/x", "content": "i"}),
        ("apply_patch", {"patch": PATCH}),
        ("gsv__ReadFile", {"path": "/private/x"}),
        ("gsv__ReadFile", {"path": "agents/main/private/x"}),
        ("gsv__DeleteFile", {"path": "private/x"}),
        ("gsv__Transfer", {"source": "gsv:private/x", "destination": "hands:y"}),
    ],
)
def test_no_tool_of_the_gateway_reaches_what_a_rule_protects(
    gateway: GatewayProcess, private: Path, tool: str, args: dict[str, str]
) -> None:
    named = {name: value.replace("{file}", str(private)) for name, value in args.items()}
    called = invoke(gateway, tool, named)
    assert called["state"] == "denied" and WORD not in str(called), called
    assert private.read_text() == WORD


@pytest.mark.parametrize("path", ["private/x", "./private/x", "private//x", "{file}"])
@pytest.mark.parametrize("tool", ["read_file", "update_file", "create_file"])
def test_agent_process_does_not_reach_what_a_rule_protects(
    gateway: GatewayProcess, private: Path, tool: str, path: str
) -> None:
    arguments = {"path": path.replace("{file}", str(private))}
    if tool != "read_file":
        arguments["content"] = "new"
    said = [{"role": "user", "type": "message", "content": [{"type": "text", "text": "x"}]}]
    body = {"input": said, "session_id": "s", "user_id": "u", "channel": "console", "stream": False}
    body["biz_params"] = {"tool": {"name": tool, "input": arguments}}
    answered = gateway.request("POST", "/agent/process", body)
    assert answered.status == 403 and WORD.encode() not in answered.body, answered
    assert private.read_text() == WORD
