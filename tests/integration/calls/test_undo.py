"""Undo through real gateways and nodes: nodes' tools, the agent's, the guide's, the workspace's, and transfers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, wait_until


@pytest.fixture
def folder(hands: NodeProcess) -> Path:
    path = hands.workspace / f"t-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def invoke(gateway: GatewayProcess, tool: str, args: Any, **options: Any) -> str:
    """The id of a call that succeeds."""
    answer = gateway.invoke(tool, args, **options)
    assert answer["ok"], answer
    return str(answer["request_id"])


def undo(gateway: GatewayProcess, call: str, **body: Any) -> Any:
    answer = gateway.request("POST", f"/v1/calls/{call}/undo", body or None)
    assert answer.status == 200, answer
    return answer.json()


def undone(gateway: GatewayProcess, call: str, **body: Any) -> Any:
    answer = undo(gateway, call, **body)
    assert answer["ok"], answer
    return answer


def refused(gateway: GatewayProcess, call: str, kind: str = "failed") -> str:
    answer = undo(gateway, call)
    assert answer["ok"] is False and answer["error"]["kind"] == kind, answer
    return str(answer["error"]["message"])


# -- a node


def test_write_and_edit_on_a_node_are_undone(shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("one\n")
    path.chmod(0o640)
    written = invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "two\n"})
    edited = invoke(shared_gateway, "hands__Edit", {"path": str(path), "oldString": "two", "newString": "three"})
    assert "was changed since the call" in refused(shared_gateway, written)
    undone(shared_gateway, edited)
    assert path.read_text() == "two\n"
    answer = undone(shared_gateway, written)
    assert path.read_text() == "one\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert answer["result"] == {
        "call": written,
        "undone": True,
        "files": [{"path": str(path), "action": "restored", "bytes": 4}],
    }
    assert answer["route"] == {"kind": "node", "node_id": "hands", "capability": "filesystem.write"}


def test_a_file_that_a_call_made_is_removed(shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path) -> None:
    made = invoke(shared_gateway, "hands__Write", {"path": f"{folder}/new/a.txt", "content": "x"})
    assert undone(shared_gateway, made)["result"]["files"][0]["action"] == "removed"
    assert list(folder.iterdir()) == []


def test_undo_after_a_later_edit_by_hand_refuses_and_says_why(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    path = folder / "a.txt"
    path.write_text("old")
    call = invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "new"})
    path.write_text("by hand")
    said = refused(shared_gateway, call)
    assert f"'{path}' was changed since the call: the call left 3 bytes with SHA-256" in said
    assert "now it has 7 bytes with SHA-256" in said
    assert ", changed at 20" in said and said.endswith("nothing was undone")
    assert path.read_text() == "by hand"


def test_an_undo_is_in_the_record_can_be_undone_and_is_not_done_twice(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    path = folder / "a.txt"
    path.write_text("old")
    call = invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "new"})
    first = undone(shared_gateway, call)["request_id"]
    record = shared_gateway.get(f"/v1/calls/{first}")
    assert (record["tool"], record["args"], record["state"]) == ("hands__Undo", {"call": call}, "ok")
    assert f"already undone, by call {first} at 20" in refused(shared_gateway, call)
    undone(shared_gateway, first)
    assert path.read_text() == "new"
    undone(shared_gateway, call)
    assert path.read_text() == "old"


def test_a_dry_run_tells_and_does_nothing(shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("old\n")
    call = invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "new\n"})
    reported = undone(shared_gateway, call, dry_run=True)["result"]
    assert reported["undone"] is False
    assert "-new\n+old\n" in reported["files"][0]["diff"]
    assert path.read_text() == "new\n"


def test_a_repeated_request_with_a_key_undoes_once(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    (folder / "a").write_text("old")
    call = invoke(shared_gateway, "hands__Write", {"path": f"{folder}/a", "content": "new"})
    key = {"Idempotency-Key": uuid.uuid4().hex}
    answers = [shared_gateway.request("POST", f"/v1/calls/{call}/undo", {}, headers=key).json() for _ in range(2)]
    assert answers[0]["ok"] and answers[0] == answers[1]


def test_what_was_never_kept_gets_a_clear_answer(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path, tmp_path: Path
) -> None:
    ran = invoke(shared_gateway, "hands__Bash", {"command": f"echo x > {folder}/made"})
    assert "What a command does" in refused(shared_gateway, ran, "not_found")
    assert (folder / "made").exists()
    missing = shared_gateway.request("POST", "/v1/calls/nobody/undo")
    assert missing.status == 404 and missing.json()["error"]["code"] == "not_found"


def test_a_call_that_failed_has_nothing_to_undo(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    (folder / "a").write_text("old")
    answer = shared_gateway.invoke("hands__Edit", {"path": f"{folder}/a", "oldString": "zzz", "newString": "y"})
    assert "nothing was kept" in refused(shared_gateway, answer["request_id"], "not_found")


def test_a_call_that_runs_is_not_undone(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    call = hands.begin("Bash", {"command": "sleep 60"})
    assert "has not ended" in refused(shared_gateway, call)
    shared_gateway.request("DELETE", f"/v1/calls/{call}")


def test_undo_is_not_offered_and_its_store_is_out_of_reach(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    path = folder / "secret.txt"
    path.write_text("the old secret")
    invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "new"})
    assert not [tool for tool in shared_gateway.get("/v1/tools")["tools"] if "undo" in tool["name"].lower()]
    store = hands.state / "undo"
    kept = [str(each) for each in store.rglob("*") if each.is_file()]
    assert kept and hands.state.stat().st_mode & 0o077 == 0
    assert all(each.stat().st_mode & 0o077 == 0 for each in store.iterdir())
    for each in kept:
        assert "protected folder" in hands.fails("Read", {"path": each}, "not_allowed")
        assert "protected folder" in hands.fails("Write", {"path": each, "content": ""}, "not_allowed")
    search = {"pattern": "the old secret", "path": str(hands.state)}
    assert "protected folder" in hands.fails("Grep", search, "not_allowed")
    above = str(hands.state.parent)
    assert hands.ok("Grep", {"pattern": "the old secret", "path": above})["matches"] == []
    assert hands.ok("Glob", {"pattern": "**/contents/*", "path": above})["matches"] == []


def test_a_lent_roots_rules_hold_for_undo(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("old")
    state = tmp_path / "state"
    with NodeProcess(shared_gateway, tmp_path, "limited", "--root", str(tmp_path / "a"), state=state):
        call = invoke(shared_gateway, "limited__Write", {"path": f"{tmp_path}/a/f", "content": "new"})
    (tmp_path / "b").mkdir()
    with NodeProcess(shared_gateway, tmp_path, "limited", "--root", str(tmp_path / "b"), "--reset-limits", state=state):
        assert "outside the allowed folders" in refused(shared_gateway, call, "not_allowed")
    with NodeProcess(shared_gateway, tmp_path, "limited", "--read-only", state=state):
        assert "read-only" in refused(shared_gateway, call, "not_allowed")
    with NodeProcess(shared_gateway, tmp_path, "limited", "--deny-tool", "Undo", state=state):
        assert "does not lend Undo" in refused(shared_gateway, call, "not_allowed")
    assert "offline" in refused(shared_gateway, call)
    assert (tmp_path / "a" / "f").read_text() == "new"


def test_the_oldest_make_room(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(shared_gateway, tmp_path, "small", "--undo-quota", "1") as node:
        calls = []
        for name in "abc":
            (node.workspace / name).write_bytes(name.encode() * 400_000)
            calls.append(invoke(shared_gateway, "small__Write", {"path": name, "content": "new"}))
        (node.workspace / "d").write_bytes(b"d" * 1_100_000)
        calls.append(invoke(shared_gateway, "small__Write", {"path": "d", "content": "new"}))
        assert "made room for newer changes" in refused(shared_gateway, calls[0], "not_found")
        assert "was not kept" in refused(shared_gateway, calls[3])
        undone(shared_gateway, calls[2])
        assert (node.workspace / "c").read_bytes() == b"c" * 400_000


def test_undo_works_after_node_and_gateway_were_killed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        (node.workspace / "a").write_text("old")
        call = invoke(gateway, "hands__Write", {"path": "a", "content": "new"})
        gateway.kill()
        node.kill()
        gateway.start()
        node.start()
        undone(gateway, call)
        assert (node.workspace / "a").read_text() == "old"


def test_after_a_kill_during_a_write_every_call_can_be_undone_or_says_why(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    """Wherever the kill falls: a file is old or new, undo gives the old one back or says that there is nothing."""
    with NodeProcess(shared_gateway, tmp_path, "mortal") as node:
        for life in range(3):
            calls: list[tuple[str, Path]] = []
            for number in range(12):
                path = node.workspace / f"{life}-{number}"
                path.write_text(f"old {path.name}")
                calls.append((node.begin("Write", {"path": str(path), "content": f"new {path.name}"}), path))
            last = calls[3 + 3 * life][0]
            wait_until(lambda call=last: shared_gateway.get(f"/v1/calls/{call}")["state"] != "running")
            node.restart()
            for call, path in calls:
                ended = node.end_of(call)
                content = path.read_text()
                assert content in (f"old {path.name}", f"new {path.name}")
                if ended["state"] == "ok":
                    assert content.startswith("new")
                answer = undo(shared_gateway, call)
                if content.startswith("new"):
                    assert answer["ok"], answer
                else:
                    assert answer["error"]["kind"] == "not_found", answer
                assert path.read_text() == f"old {path.name}"


def test_a_plain_node_keeps_nothing_and_undo_says_so(shared_gateway: GatewayProcess) -> None:
    async def act() -> Any:
        async with PlainNode.connect(shared_gateway, "plain", ["plain.notes"]) as node:
            call = asyncio.create_task(shared_gateway.ainvoke("plain.notes.write", {"text": "x"}))
            await node.answer(await node.receive("tool_request"), {"written": True})
            done = await call
            return await asyncio.to_thread(undo, shared_gateway, done["request_id"])

    answer = asyncio.run(act())
    assert answer["ok"] is False
    assert "node 'plain' keeps no old content" in answer["error"]["message"]
    assert shared_gateway.get(f"/v1/calls/{answer['request_id']}")["state"] == "error"


# -- the gateway's own machine

PATCH = """*** Begin Patch
*** Update File: {0}/a.txt
-one
+ONE
*** Delete File: {0}/b.txt
*** Add File: {0}/c.txt
+made
*** End Patch"""


@pytest.fixture
def here(shared_gateway: GatewayProcess) -> Path:
    """A folder of the test's own in the gateway's workspace."""
    path = shared_gateway.home / "agents" / "main" / f"t-{uuid.uuid4().hex[:8]}"
    path.mkdir(parents=True)
    return path


def test_the_agents_tools_are_undone(shared_gateway: GatewayProcess, here: Path) -> None:
    (here / "a.txt").write_text("one\n")
    wrote = invoke(shared_gateway, "write", {"path": f"{here.name}/a.txt", "content": "two\n"})
    edited = invoke(shared_gateway, "edit", {"path": f"{here.name}/a.txt", "old_text": "two", "new_text": "three"})
    undone(shared_gateway, edited)
    assert (here / "a.txt").read_text() == "two\n"
    answer = undone(shared_gateway, wrote)
    assert (here / "a.txt").read_text() == "one\n"
    assert answer["route"]["kind"] == "local"
    undone(shared_gateway, answer["request_id"])
    assert (here / "a.txt").read_text() == "two\n"


def test_a_patch_is_undone_whole_or_not_at_all(shared_gateway: GatewayProcess, here: Path) -> None:
    (here / "a.txt").write_text("one\n")
    (here / "b.txt").write_text("two\n")
    call = invoke(shared_gateway, "apply_patch", {"patch": PATCH.format(here.name)})
    (here / "b.txt").write_text("by hand\n")
    assert "b.txt' was changed since the call: the call left no file" in refused(shared_gateway, call)
    assert (here / "a.txt").read_text() == "ONE\n" and (here / "c.txt").exists()
    (here / "b.txt").unlink()
    redo = undone(shared_gateway, call)
    assert {path.name: path.read_text() for path in here.iterdir()} == {"a.txt": "one\n", "b.txt": "two\n"}
    assert {file["action"] for file in redo["result"]["files"]} == {"restored", "recreated", "removed"}
    undone(shared_gateway, redo["request_id"])
    assert {path.name: path.read_text() for path in here.iterdir()} == {"a.txt": "ONE\n", "c.txt": "made\n"}


def guide(gateway: GatewayProcess, name: str, **fields: Any) -> str:
    """The id of the newest call, after a tool of the guide was used."""
    body = {
        "input": [{"role": "user", "type": "message", "content": [{"type": "text", "text": "x"}]}],
        "session_id": "s",
        "user_id": "u",
        "stream": False,
        "biz_params": {"tool": {"name": name, "input": fields}},
    }
    answer = gateway.request("POST", "/agent/process", body)
    assert answer.status == 200, answer
    return str(gateway.get(f"/v1/calls?tool={name}&limit=1")["calls"][0]["id"])


def test_the_guides_tools_are_undone(shared_gateway: GatewayProcess, here: Path) -> None:
    path = here / "g.txt"
    created = guide(shared_gateway, "create_file", path=str(path), content="one")
    updated = guide(shared_gateway, "update_file", path=str(path), content="two")
    appended = guide(shared_gateway, "update_file", path=str(path), content=" more", mode="append")
    assert path.read_text() == "two more"
    undone(shared_gateway, appended)
    assert path.read_text() == "two"
    undone(shared_gateway, updated)
    assert path.read_text() == "one"
    undone(shared_gateway, created)
    assert not path.exists()


def test_workspace_files_are_undone(shared_gateway: GatewayProcess, here: Path) -> None:
    name = f"{here.name}/w.md"
    path = here / "w.md"
    path.write_text("one")
    wrote = invoke(shared_gateway, "gsv__WriteFile", {"path": name, "content": "two"})
    edited = invoke(shared_gateway, "gsv__EditFile", {"path": name, "oldString": "two", "newString": "three"})
    deleted = invoke(shared_gateway, "gsv__DeleteFile", {"path": name})
    assert not here.exists()
    back = undone(shared_gateway, deleted)
    assert path.read_text() == "three"
    undone(shared_gateway, back["request_id"])
    assert not path.exists()
    undone(shared_gateway, deleted)
    undone(shared_gateway, edited)
    undone(shared_gateway, wrote)
    assert shared_gateway.invoke("gsv__ReadFile", {"path": name})["result"]["content"] == "one"


def test_another_agents_workspace_is_undone_too(shared_gateway: GatewayProcess) -> None:
    args = {"path": "notes.md", "content": "x"}
    call = invoke(shared_gateway, "gsv__WriteFile", args, agent_id="helper")
    path = shared_gateway.home / "agents/helper/notes.md"
    assert path.read_text() == "x"
    undone(shared_gateway, call)
    assert not path.exists()


def test_a_file_that_a_transfer_replaced_is_restored(
    shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path
) -> None:
    (folder / "source").write_text("sent")
    (folder / "target").write_text("there before")
    ends = {"source": f"hands:{folder}/source", "destination": f"hands:{folder}/target"}
    call = invoke(shared_gateway, "gsv__Transfer", ends)
    assert (folder / "target").read_text() == "sent"
    undone(shared_gateway, call)
    assert (folder / "target").read_text() == "there before"
    name = f"{folder.name}.txt"
    into = {"source": f"hands:{folder}/source", "destination": f"gsv:{name}"}
    received = invoke(shared_gateway, "gsv__Transfer", into)
    undone(shared_gateway, received)
    assert not (shared_gateway.home / "agents/main" / name).exists()


# -- who may


def test_only_who_may_write_there_may_undo(shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("old")
    call = invoke(shared_gateway, "hands__Write", {"path": f"{folder}/a", "content": "new"})

    def attempt(**token: Any) -> Any:
        made = shared_gateway.request("POST", "/v1/tokens", {"label": "t", **token}).json()["token"]
        return shared_gateway.request("POST", f"/v1/calls/{call}/undo", token=made)

    assert attempt(scopes=["read", "tools.read"]).status == 403
    assert attempt(tools=["hands__Read"]).json()["state"] == "denied"
    for narrow in ({"nodes": ["elsewhere"]}, {"tools": ["elsewhere__*"]}):
        assert attempt(**narrow).status == 404, "a call on another node is as if it did not exist"
    assert (folder / "a").read_text() == "new"
    answer = attempt(nodes=["hands"]).json()
    assert answer["ok"], answer
    assert (folder / "a").read_text() == "old"


# -- the command


def farhand(gateway: GatewayProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_process([*FARHAND, *arguments], env={**os.environ, "FARHAND_HOME": str(gateway.home)})


def test_the_command(shared_gateway: GatewayProcess, hands: NodeProcess, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("old\n")
    call = invoke(shared_gateway, "hands__Write", {"path": str(path), "content": "new\n"})
    dry = farhand(shared_gateway, "undo", call[-12:], "--dry-run")
    assert dry.returncode == 0 and f"would be restored: {path} (4 bytes)" in dry.stdout and "+old" in dry.stdout
    done = farhand(shared_gateway, "undo", call)
    assert done.returncode == 0 and f"restored: {path} (4 bytes)" in done.stdout, done
    assert path.read_text() == "old\n"
    again = farhand(shared_gateway, "undo", call)
    assert again.returncode == 1 and "already undone" in again.stderr
    as_json = farhand(shared_gateway, "undo", call, "--json")
    assert as_json.returncode == 1 and json.loads(as_json.stdout)["error"]["kind"] == "failed"


def test_a_backup_leaves_what_is_kept_out(shared_gateway: GatewayProcess, here: Path, tmp_path: Path) -> None:
    (here / "a.txt").write_text("kept for undo alone")
    invoke(shared_gateway, "write", {"path": f"{here.name}/a.txt", "content": "new"})
    assert (shared_gateway.home / "undo").is_dir()
    packed = tmp_path / "home.tar.gz"
    done = farhand(shared_gateway, "backup", str(packed))
    assert done.returncode == 0, done
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert f"agents/main/{here.name}/a.txt" in names
    assert not [name for name in names if name.split("/")[0] == "undo"]


# -- a policy


def test_a_policy_is_asked_about_undo_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    rules = '[[policy.rules]]\nname = "{0}"\ndecision = "{0}"\ntool = ["Undo"]\n'
    (home / "farhand.toml").write_text(rules.format("ask"))
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        path = node.workspace / "a"
        path.write_text("old")
        call = invoke(gateway, "hands__Write", {"path": "a", "content": "new"})
        with ThreadPoolExecutor(1) as pool:
            undoing = pool.submit(undo, gateway, call)
            (approval,) = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 20, "the question")
            assert path.read_text() == "new"
            body = {"decision": "approve", "hash": approval["hash"]}
            assert gateway.request("POST", f"/v1/approvals/{approval['id']}", body).status == 200
            assert undoing.result(60)["ok"] is True
        assert path.read_text() == "old"
        call = invoke(gateway, "hands__Write", {"path": "a", "content": "new"})
        (home / "farhand.toml").write_text(rules.format("deny"))
        answer = wait_until(
            lambda: (reported := undo(gateway, call))["state"] == "denied" and reported, 20, "the denial"
        )
        assert answer["error"]["kind"] == "not_allowed"
        assert path.read_text() == "new"
