"""Steering files can be changed only with the right to make the agent act, on every route."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.calls.test_principal import token
from tests.support.harness import GatewayProcess, NodeProcess, wait_until
from tests.support.model_server import calls, text

SPELLINGS = (
    "SOUL.md",
    "soul.MD",
    "./AGENTS.md",
    "IDENTITY.md",
    "USER.md",
    "MEMORY.md",
    "HEARTBEAT.md",
    "TOOLS.md",
    "BOOTSTRAP.md",
    "BOOT.md",
    "skills/tidy/SKILL.md",
    "Skills/tidy/run.sh",
    "notes/../SOUL.md",
    "alias.md",
)
FULL = ("read", "chat", "tools.read", "tools.write", "tools.exec")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = tmp_path_factory.mktemp("steering") / "home"
    folder = home / "agents" / "main"
    folder.mkdir(parents=True)
    (folder / "SOUL.md").write_text("the owner's words\n")
    (folder / "notes.txt").write_text("mine\n")
    (folder / "alias.md").symlink_to("SOUL.md")
    yield from open_house(home)


def invoke(gateway: GatewayProcess, secret: str, tool: str, args: Any, agent: str | None = None) -> Any:
    body = {"tool": tool, "args": args, **({"agent_id": agent} if agent else {})}
    return gateway.request("POST", "/v1/tools/invoke", body, token=secret).json()


def tree(house: House) -> dict[str, bytes]:
    folder = house.gateway.home / "agents"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def patch(path: str, word: str) -> str:
    return f"*** Begin Patch\n*** Add File: {path}\n+{word}\n*** End Patch\n"


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_file_tool_alone_writes_one(house: House, path: str) -> None:
    gateway = house.gateway
    tries = [
        ("gsv__WriteFile", {"path": path, "content": "evil"}),
        ("gsv__EditFile", {"path": path, "oldString": "the owner's words", "newString": "evil"}),
        ("gsv__DeleteFile", {"path": path}),
        ("write", {"file_path": path, "content": "evil"}),
        ("edit", {"file_path": path, "old_text": "the owner's words", "new_text": "evil"}),
        ("apply_patch", {"patch": patch(path, "evil")}),
        ("create_file", {"path": path, "content": "evil"}),
        ("update_file", {"path": path, "content": "evil"}),
        ("update_file", {"path": path, "content": "evil", "mode": "append"}),
    ]
    before = tree(house)
    tokens = [token(gateway, "tools.read", "tools.write")[1], token(gateway, "tools.write", "tools.exec")[1]]
    for tool, args in tries:
        narrow = token(gateway, "tools.write", "tools.exec", tools=[tool])[1]
        for secret in (*tokens, narrow):
            made = invoke(gateway, secret, tool, args)
            assert made["ok"] is False, (tool, path, made)
    for method, body in (("PUT", b"evil"), ("DELETE", None)):
        put = gateway.request(method, f"/v1/workspace/main/{path}", body, token=tokens[0])
        assert put.status in (403, 404), (method, path, put)
    assert tree(house) == before


def test_agent_process_does_not_write_one(house: House) -> None:
    gateway = house.gateway

    def process(secret: str, tool: str, **given: str) -> Any:
        wanted = {"biz_params": {"tool": {"name": tool, "input": given}}, "session_id": "s", "user_id": "u"}
        return gateway.request("POST", "/agent/process", {**wanted, "input": []}, token=secret)

    weak = token(gateway, "tools.read", "tools.write", "tools.exec")[1]
    assert process(weak, "create_file", path="plain.txt", content="fine").status == 200
    before = tree(house)
    for tool, path in (("create_file", "HEARTBEAT.md"), ("update_file", "SOUL.md"), ("update_file", "alias.md")):
        assert process(weak, tool, path=path, content="evil").status == 403, (tool, path)
    assert process(weak, "update_file", path="SOUL.md", content="evil", mode="append").status == 403
    assert tree(house) == before
    assert process(token(gateway, *FULL)[1], "create_file", path="HEARTBEAT.md", content="").status == 200


def test_who_may_make_the_agent_act_may(house: House) -> None:
    gateway = house.gateway
    secret = token(gateway, *FULL)[1]
    assert invoke(gateway, secret, "gsv__WriteFile", {"path": "USER.md", "content": "x"})["ok"] is True
    assert invoke(gateway, secret, "write", {"file_path": "IDENTITY.md", "content": "x"})["ok"] is True
    made = invoke(gateway, secret, "apply_patch", {"patch": patch("skills/one/SKILL.md", "x")})
    assert made["ok"] is True, made
    assert gateway.request("PUT", "/v1/workspace/main/TOOLS.md", b"x", token=secret).status == 200
    assert gateway.request("DELETE", "/v1/workspace/main/TOOLS.md", token=secret).status == 200
    plain = token(gateway, "tools.write")[1]
    assert invoke(gateway, plain, "gsv__WriteFile", {"path": "memory/today.md", "content": "x"})["ok"] is True
    assert invoke(gateway, plain, "write", {"file_path": "notes/SOUL.md", "content": "x"})["ok"] is True, "not there"


def test_undo_does_not_bring_one_back(house: House) -> None:
    gateway = house.gateway
    made = gateway.invoke("gsv__WriteFile", {"path": "BOOT.md", "content": "first"})
    made = gateway.invoke("gsv__WriteFile", {"path": "BOOT.md", "content": "second"})
    weak = token(gateway, "tools.read", "tools.write", "tools.exec")[1]
    undone = gateway.request("POST", f"/v1/calls/{made['request_id']}/undo", {}, token=weak)
    assert undone.status != 200 or undone.json()["ok"] is False, undone
    assert (gateway.home / "agents/main/BOOT.md").read_text() == "second"
    undone = gateway.request("POST", f"/v1/calls/{made['request_id']}/undo", {})
    assert undone.status == 200 and (gateway.home / "agents/main/BOOT.md").read_text() == "first"


def test_the_agent_writes_one_for_those_who_may(house: House) -> None:
    gateway = house.gateway
    for scopes, works in (((*FULL,), True), (("tools.exec",), False)):
        name, secret = token(gateway, *scopes)
        word = f"steer-{uuid.uuid4().hex[:8]}"
        house.script(word, calls(("write", {"file_path": "MEMORY.md", "content": word})), text("done"))
        args = {"sessionKey": word, "message": word, "waitSeconds": 30}
        sent = invoke(gateway, secret, "gsv__SessionSend", args)
        assert sent["ok"] is True, sent
        written = next(one for one in gateway.get("/v1/calls")["calls"] if one["on_behalf_of"] == name)
        assert (written["state"] == "ok") is works, written
        memory = gateway.home / "agents/main/MEMORY.md"
        assert (memory.exists() and memory.read_text() == word) is works


def test_no_transfer_brings_one(house: House, tmp_path: Path) -> None:
    gateway = house.gateway
    weak = token(gateway, "tools.read", "tools.write", "tools.exec")[1]
    before = tree(house)
    with NodeProcess(gateway, tmp_path, "sender") as sender:
        (sender.workspace / "HEARTBEAT.md").write_text("evil")
        (sender.workspace / "skills").mkdir()
        (sender.workspace / "skills" / "SKILL.md").write_text("evil")
        for source, target in (
            ("HEARTBEAT.md", "gsv:HEARTBEAT.md"),
            ("HEARTBEAT.md", "gsv:/"),
            ("skills", "gsv:skills"),
            ("skills", "gsv:/"),
        ):
            args = {"source": f"sender:{sender.workspace}/{source}", "destination": target}
            made = invoke(gateway, weak, "gsv__Transfer", args)
            assert made["ok"] is False, (target, made)
            begun = gateway.request("POST", "/v1/transfers", args, token=weak)
            if begun.status == 201:
                shown = gateway.get(f"/v1/transfers/{begun.json()['id']}?wait=1")
                assert shown["state"] != "done", shown
        assert tree(house) == before


def test_the_node_of_the_same_machine_does_not_bypass_it(tmp_path: Path) -> None:
    """`farhand up` lends the agent's own workspace."""
    home = tmp_path / "home"
    with GatewayProcess(home, command="up") as gateway:
        node = gateway.get("/v1/nodes")["nodes"] or [gateway.wait_for_node(only_node(gateway))]
        name = node[0]["node_id"]
        gateway.wait_for_node(name)
        folder = home / "agents" / "main"
        for path in ("HEARTBEAT.md", str(folder / "SOUL.md"), "skills/x/SKILL.md", str(home / "skills/x/SKILL.md")):
            made = gateway.invoke(f"{name}__Write", {"path": path, "content": "evil"})
            assert made["ok"] is False and made["error"]["kind"] == "not_allowed", made
        assert gateway.invoke(f"{name}__Write", {"path": "plain.txt", "content": "fine"})["ok"] is True
        moved = {"source": f"{name}:{folder}/plain.txt", "destination": f"{name}:{folder}/HEARTBEAT.md"}
        assert gateway.invoke("gsv__Transfer", moved)["ok"] is False
        assert not (folder / "HEARTBEAT.md").exists() and not (folder / "skills").exists()


def only_node(gateway: GatewayProcess) -> str:
    nodes = wait_until(lambda: gateway.get("/v1/nodes")["nodes"], 20, "the node of this machine")
    return str(nodes[0]["node_id"])
