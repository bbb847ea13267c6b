"""Approvals: what was approved is what runs; without an answer, after a change, or by a stranger, nothing runs."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import Command
from tests.support.channel_servers import TelegramServer
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, Plugin, hello_frame, wait_until
from tests.support.model_server import ModelServer, calls, text

ASK = """
[[policy.rules]]
name = "changes are asked about"
decision = "ask"
tool = ["Write", "Edit", "Bash", "write", "edit", "apply_patch", "exec", "create_file", "update_file", "gsv__*File"]
"""


def write_policy(home: Path, rules: str = ASK, **settings: Any) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (home / "farhand.toml").write_text("[policy]\n" + "\n".join(lines) + rules)


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node of a gateway that asks before anything is changed."""
    home = tmp_path_factory.mktemp("asking") / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path_factory.mktemp("hands"), "hands") as node:
        yield node


def ask(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> Any:
    """Make a call in the background; its approval once it is asked."""
    answer = gateway.invoke(tool, args, background=True, **more)
    assert answer["ok"] is True and answer["state"] == "waiting", answer
    return asked(gateway, answer["request_id"])


def asked(gateway: GatewayProcess, call_id: str) -> Any:
    def found() -> Any:
        answer = gateway.request("GET", f"/v1/approvals/{call_id}")
        return answer.json() if answer.status == 200 else None

    return wait_until(found, 20, "the approval")


def answer(gateway: GatewayProcess, approval: Any, decision: str = "approve", **more: Any) -> Any:
    token = more.pop("token", "owner")
    body = {"decision": decision, "hash": approval["hash"], **more}
    return gateway.request("POST", f"/v1/approvals/{approval['id']}", body, token=token)


def end_of(gateway: GatewayProcess, approval: Any) -> Any:
    def over() -> Any:
        found = gateway.get(f"/v1/calls/{approval['call_id']}")
        return found if found["state"] not in ("waiting", "running") else None

    return wait_until(over, 30, "the end of the call")


def made(gateway: GatewayProcess, *scopes: str) -> str:
    options = [word for scope in scopes for word in ("--scope", scope)]
    return str(Command(gateway.home)("token", "create", *options, "--json").json()["token"])


def events(gateway: GatewayProcess, subject: str) -> list[str]:
    command = Command(gateway.home)("events", "--json").json()
    return [event["kind"] for event in command["events"] if event["subject"] == subject]


# -- what is asked ----------------------------------------------------------------------------------------


def test_a_write_is_shown_as_a_diff_and_runs_once_it_is_approved(hands: NodeProcess) -> None:
    file = hands.workspace / "diffed.txt"
    file.write_text("one\ntwo\nthree\n")
    approval = ask(hands.gateway, "hands__Write", {"path": "diffed.txt", "content": "one\n2\nthree\n"})
    assert approval["state"] == "pending" and approval["rule"] == "changes are asked about"
    assert "-two\n+2\n" in approval["diff"] and f"--- {file}" in approval["diff"]
    assert file.read_text() == "one\ntwo\nthree\n"
    assert answer(hands.gateway, approval).json()["state"] == "approved"
    assert end_of(hands.gateway, approval)["state"] == "ok"
    assert file.read_text() == "one\n2\nthree\n"


def test_an_edit_is_shown_as_a_diff(hands: NodeProcess) -> None:
    (hands.workspace / "edited.txt").write_text("a\nb\n")
    args = {"path": "edited.txt", "oldString": "b", "newString": "c"}
    approval = ask(hands.gateway, "hands__Edit", args)
    assert "-b\n+c\n" in approval["diff"]
    answer(hands.gateway, approval)
    assert end_of(hands.gateway, approval)["state"] == "ok"
    assert (hands.workspace / "edited.txt").read_text() == "a\nc\n"


def test_a_command_is_shown_with_its_folder_whole(hands: NodeProcess) -> None:
    (hands.workspace / "sub").mkdir(exist_ok=True)
    command = "echo " + "x" * 5000 + "; touch made-by-approval"
    approval = ask(hands.gateway, "hands__Bash", {"command": command, "workdir": "sub"})
    assert approval["command"] == command and approval["cwd"] == str(hands.workspace / "sub")
    answer(hands.gateway, approval)
    assert end_of(hands.gateway, approval)["state"] == "ok"
    assert (hands.workspace / "sub" / "made-by-approval").exists()


def test_the_gateways_own_tools_are_shown_too(hands: NodeProcess) -> None:
    gateway = hands.gateway
    shown = ask(gateway, "write", {"file_path": "own.txt", "content": "hello\n"})
    assert "+hello\n" in shown["diff"] and "/dev/null" in shown["diff"]
    answer(gateway, shown)
    assert end_of(gateway, shown)["state"] == "ok"
    patch = "*** Begin Patch\n*** Update File: own.txt\n-hello\n+bye\n*** End Patch"
    shown = ask(gateway, "apply_patch", {"patch": patch})
    assert "-hello\n+bye\n" in shown["diff"]
    answer(gateway, shown, "deny")
    shown = ask(gateway, "exec", {"command": "env", "env": {"COLOUR": "red"}})
    assert shown["command"] == "env" and shown["env"] == {"COLOUR": "red"} and shown["cwd"]
    answer(gateway, shown, "deny")
    shown = ask(gateway, "gsv__WriteFile", {"path": "notes/a.md", "content": "kept\n"})
    assert "+kept\n" in shown["diff"]
    answer(gateway, shown)
    assert end_of(gateway, shown)["state"] == "ok"
    shown = ask(gateway, "gsv__DeleteFile", {"path": "notes/a.md"})
    assert "-kept\n" in shown["diff"]
    answer(gateway, shown, "deny")


def test_the_effect_of_a_tool_is_described(hands: NodeProcess) -> None:
    gateway = hands.gateway
    more = """
[[policy.rules]]
decision = "ask"
tool = ["Process", "process", "gsv__Transfer", "gsv__Cron", "cron", "gsv__SessionSend"]
"""
    write_policy(gateway.home, ASK + more)
    try:
        wait_until(lambda: len(gateway.get("/v1/policy")["rules"]) == 2, 20, "the new rules")
        started = ask(gateway, "hands__Bash", {"command": "cat", "background": True, "yieldMs": -5})
        assert "in the background" in started["summary"]
        answer(gateway, started)
        session = end_of(gateway, started)["result"]["sessionId"]
        shown = ask(gateway, "hands__Process", {"action": "submit", "sessionId": session, "data": "rm -rf x"})
        assert shown["stdin"] == "rm -rf x\n" and session in shown["summary"] and shown["summary"].endswith(": cat")
        answer(gateway, shown, "deny")
        shown = ask(gateway, "hands__Process", {"action": "kill", "sessionId": session})
        assert shown["summary"].startswith(f"kills session {session}")
        answer(gateway, shown)
        assert end_of(gateway, shown)["state"] == "ok"
        shown = ask(gateway, "gsv__Transfer", {"source": "hands:a.txt", "destination": "gsv:b.txt"})
        assert shown["summary"] == "copies 'a.txt' on hands to 'b.txt' in the workspace of agent main"
        answer(gateway, shown, "deny")
        shown = ask(gateway, "cron", {"action": "add", "expression": "in 2 hours", "prompt": "look"})
        assert shown["args"]["schedule"] == "in 2 hours" and "adds a job for agent main: look" in shown["summary"]
        answer(gateway, shown)
        job = json.loads(end_of(gateway, shown)["result"]["content"])["id"]
        shown = ask(gateway, "gsv__Cron", {"action": "remove", "id": job})
        assert shown["summary"] == f"removes the job {job} of agent main: look"
        answer(gateway, shown)
        assert end_of(gateway, shown)["state"] == "ok"
        shown = ask(gateway, "gsv__Cron", {"action": "remove", "id": job})
        assert "would fail" in shown["note"]
        answer(gateway, shown, "deny")
        shown = ask(gateway, "gsv__SessionSend", {"sessionKey": "main", "message": "hello"})
        assert "session agent:main:main" in shown["summary"] and shown["summary"].endswith("\nhello")
        answer(gateway, shown, "deny")
    finally:
        write_policy(gateway.home)
        wait_until(lambda: len(gateway.get("/v1/policy")["rules"]) == 1, 20, "the old rules")


def test_no_second_spelling_reaches_an_approval(hands: NodeProcess) -> None:
    (hands.workspace / "two.txt").write_text("a\nb\n")
    for tool, args in (
        ("hands__Edit", {"path": "two.txt", "oldString": "a", "newString": "A", "old_text": "b", "new_text": "B"}),
        ("hands__Bash", {"command": "pwd", "workdir": ".", "cwd": "/"}),
        ("exec", {"command": "pwd", "workdir": ".", "working_dir": "/"}),
    ):
        refused = hands.gateway.invoke(tool, args, background=True)
        assert refused["ok"] is False and refused["error"]["kind"] == "invalid_args", refused
    assert (hands.workspace / "two.txt").read_text() == "a\nb\n"


def test_an_unreadable_value_is_reported(hands: NodeProcess) -> None:
    (hands.workspace / "blob.bin").write_bytes(b"\xff\xfe\x00")
    approval = ask(hands.gateway, "hands__Write", {"path": "blob.bin", "content": "text"})
    assert approval["diff"] == "" and "not text" in approval["note"]
    answer(hands.gateway, approval, "deny")
    args = {"path": "missing.txt", "oldString": "a", "newString": "b"}
    approval = ask(hands.gateway, "hands__Edit", args)
    assert "would fail" in approval["note"]
    answer(hands.gateway, approval, "deny")


def test_a_plug_ins_call_is_shown_by_its_arguments(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, '\n[[policy.rules]]\ndecision = "ask"\ntool = "plug.*"\n')
    with GatewayProcess(home) as gateway, Plugin(gateway, tmp_path, "plug") as plugin:
        approval = ask(gateway, "plug.effect", {"text": "hi"})
        assert approval["args"] == {"text": "hi"} and approval["node_id"] == "plug"
        assert plugin.started() == []
        answer(gateway, approval)
        assert end_of(gateway, approval)["state"] == "ok"
        assert plugin.started() == [approval["call_id"]]


# -- answers ----------------------------------------------------------------------------------------------


def test_a_caller_who_waits_gets_the_result(hands: NodeProcess) -> None:
    results: list[Any] = []
    args = {"command": "echo waited for"}
    thread = threading.Thread(target=lambda: results.append(hands.gateway.invoke("hands__Bash", args)))
    thread.start()
    (approval,) = wait_until(lambda: hands.gateway.get("/v1/approvals")["approvals"], 20)
    answer(hands.gateway, approval)
    thread.join(60)
    assert results[0]["ok"] is True and "waited for" in results[0]["result"]["output"]


def test_a_caller_that_timed_out_finds_the_call_by_its_id(hands: NodeProcess) -> None:
    reported = hands.gateway.invoke("hands__Bash", {"command": "echo later"}, timeout_ms=300)
    assert reported["ok"] is False and reported["state"] == "waiting" and reported["error"]["kind"] == "timeout"
    assert "has not run" in reported["error"]["message"] and reported["request_id"] in reported["error"]["message"]
    approval = asked(hands.gateway, reported["request_id"])
    assert answer(hands.gateway, approval).status == 200
    assert "later" in end_of(hands.gateway, approval)["result"]["output"]


def test_a_denial_is_reported_with_its_reason(hands: NodeProcess) -> None:
    approval = ask(hands.gateway, "hands__Bash", {"command": "touch denied"})
    assert answer(hands.gateway, approval, "deny", reason="not today").json()["state"] == "denied"
    record = end_of(hands.gateway, approval)
    assert record["state"] == "denied" and record["error"]["kind"] == "not_allowed"
    assert "denied by owner: not today" in record["error"]["message"] and "did not run" in record["error"]["message"]
    assert not (hands.workspace / "denied").exists()


def test_the_command_line_shows_approves_and_denies(hands: NodeProcess) -> None:
    farhand = Command(hands.gateway.home)
    (hands.workspace / "cli.txt").write_text("old\n")
    approval = ask(hands.gateway, "hands__Write", {"path": "cli.txt", "content": "new\x1b[31m\n"})
    shown = farhand("approvals").out
    assert approval["id"] in shown and "-old" in shown and "+new" in shown and "\x1b" not in shown
    assert "waiting: approval" in farhand("calls", "--waiting").out
    assert farhand("approve", approval["id"], "--hash", "0" * 64).status == 1
    assert farhand("approve", approval["id"].lower()).status == 0
    assert end_of(hands.gateway, approval)["state"] == "ok"
    other = ask(hands.gateway, "hands__Bash", {"command": "touch by-cli"})
    denied = farhand("deny", other["id"], "--reason", "no", "--json")
    assert denied.json()["state"] == "denied" and denied.json()["remark"] == "no"
    assert farhand("approvals").out == ""
    assert end_of(hands.gateway, other)["state"] == "denied"
    assert farhand("approve", "AAAAAA").status == 1


def test_every_decision_is_in_the_journal(hands: NodeProcess) -> None:
    approval = ask(hands.gateway, "hands__Bash", {"command": "true"})
    answer(hands.gateway, approval)
    assert end_of(hands.gateway, approval)["state"] == "ok"
    assert events(hands.gateway, approval["id"]) == ["approval.asked", "approval.approved"]
    assert events(hands.gateway, approval["call_id"]) == ["call.waiting", "call.started", "call.ended"]


def test_the_journal_of_calls_that_waited_is_in_order(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands"):
        first, second, _waiting = (ask(gateway, "hands__Bash", {"command": "true"}) for _ in range(3))
        answer(gateway, first)
        answer(gateway, second, "deny")
        assert end_of(gateway, first)["state"] == "ok"
        assert end_of(gateway, second)["state"] == "denied"
        verified = Command(home)("audit", "verify")
        assert verified.status == 0, verified


def test_a_waiting_call_is_cancelled_by_one_command(hands: NodeProcess) -> None:
    approval = ask(hands.gateway, "hands__Bash", {"command": "touch cancelled"})
    assert Command(hands.gateway.home)("calls", "cancel", approval["call_id"]).status == 0
    assert end_of(hands.gateway, approval)["state"] == "cancelled"
    assert hands.gateway.get(f"/v1/approvals/{approval['id']}")["state"] == "cancelled"
    assert answer(hands.gateway, approval).status == 409
    assert not (hands.workspace / "cancelled").exists()


# -- attacks ----------------------------------------------------------------------------------------------


def test_a_credential_cannot_approve_its_own_call(hands: NodeProcess) -> None:
    """The agent's credential may have any scope but the right to answer for itself."""
    gateway = hands.gateway
    agent = made(gateway, "tools.exec", "approve", "read")
    call = {"tool": "hands__Bash", "args": {"command": "touch self-approved"}, "background": True}
    begun = gateway.request("POST", "/v1/tools/invoke", call, token=agent).json()
    approval = asked(gateway, begun["request_id"])
    for decision in ("approve", "deny"):
        refused = answer(gateway, approval, decision, token=agent)
        assert (
            refused.status == 403
            and "was made by or on behalf of this credential" in refused.json()["error"]["message"]
        ), refused
    assert gateway.get(f"/v1/approvals/{approval['id']}")["state"] == "pending"
    other = made(gateway, "approve")
    assert answer(gateway, approval, token=other).status == 200
    assert end_of(gateway, approval)["state"] == "ok"


def test_answering_takes_the_scope(hands: NodeProcess) -> None:
    approval = ask(hands.gateway, "hands__Bash", {"command": "touch unscoped"})
    for token in (made(hands.gateway, "read", "chat", "tools.exec", "pair"), None):
        assert answer(hands.gateway, approval, token=token).status in (401, 403)
    assert hands.gateway.get(f"/v1/approvals/{approval['id']}")["state"] == "pending"
    answer(hands.gateway, approval, "deny")


def test_a_stale_hash_approves_nothing(hands: NodeProcess) -> None:
    first = ask(hands.gateway, "hands__Bash", {"command": "touch first"})
    second = ask(hands.gateway, "hands__Bash", {"command": "touch second"})
    wrong = {**second, "hash": first["hash"]}
    assert answer(hands.gateway, wrong).status == 409
    bare = hands.gateway.request("POST", f"/v1/approvals/{second['id']}", {"decision": "approve"})
    assert bare.status == 400
    assert not (hands.workspace / "second").exists()
    for approval in (first, second):
        answer(hands.gateway, approval, "deny")


def test_an_answer_counts_once_and_cannot_be_replayed(hands: NodeProcess) -> None:
    approval = ask(hands.gateway, "hands__Bash", {"command": "echo x >> replayed"})
    assert answer(hands.gateway, approval).status == 200
    assert end_of(hands.gateway, approval)["state"] == "ok"
    for decision in ("approve", "deny"):
        assert answer(hands.gateway, approval, decision).status == 409
    again = ask(hands.gateway, "hands__Bash", {"command": "echo x >> replayed"})
    assert again["hash"] != approval["hash"]
    assert answer(hands.gateway, {**again, "hash": approval["hash"]}).status == 409
    answer(hands.gateway, again, "deny")
    assert (hands.workspace / "replayed").read_text() == "x\n"


def test_only_one_of_two_concurrent_answers_counts(hands: NodeProcess) -> None:
    for number in range(5):
        approval = ask(hands.gateway, "hands__Bash", {"command": f"echo x >> raced-{number}"})
        with ThreadPoolExecutor(8) as pool:
            decisions = ["approve", "deny"] * 4
            statuses = list(pool.map(lambda one: answer(hands.gateway, approval, one).status, decisions))  # noqa: B023
        assert sorted(statuses) == [200] + [409] * 7
        won = decisions[statuses.index(200)]
        record = end_of(hands.gateway, approval)
        assert record["state"] == ("ok" if won == "approve" else "denied")
        assert (hands.workspace / f"raced-{number}").exists() is (won == "approve")


# -- what changes between asking and running --------------------------------------------------------------


def test_a_file_that_changed_since_the_diff_is_not_written(hands: NodeProcess) -> None:
    file = hands.workspace / "moving.txt"
    file.write_text("one\n")
    approval = ask(hands.gateway, "hands__Write", {"path": "moving.txt", "content": "two\n"})
    file.write_text("by hand\n")
    assert answer(hands.gateway, approval).status == 200
    record = end_of(hands.gateway, approval)
    assert record["state"] == "denied" and f"{file} has changed" in record["error"]["message"]
    assert "did not run" in record["error"]["message"]
    assert file.read_text() == "by hand\n"


def test_a_replaced_folder_runs_nothing(hands: NodeProcess) -> None:
    for name in ("real", "trap"):
        (hands.workspace / name).mkdir()
    link = hands.workspace / "link"
    link.symlink_to("real")
    approval = ask(hands.gateway, "hands__Bash", {"command": "touch here", "workdir": "link"})
    link.unlink()
    link.symlink_to("trap")
    answer(hands.gateway, approval)
    record = end_of(hands.gateway, approval)
    assert record["state"] == "denied" and "folder" in record["error"]["message"]
    assert not list((hands.workspace / "trap").iterdir()) and not list((hands.workspace / "real").iterdir())


def test_a_replaced_node_runs_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "one", "hands") as node:
        approval = ask(gateway, "hands__Bash", {"command": "touch replaced"})
        node.stop()
        with NodeProcess(gateway, tmp_path / "two", "hands") as other:
            answer(gateway, approval)
            record = end_of(gateway, approval)
            assert record["state"] == "denied" and "was replaced" in record["error"]["message"]
            assert not (other.workspace / "replaced").exists()


def test_a_node_that_was_restarted_runs_what_was_approved(tmp_path: Path) -> None:
    """Its own token proves that it is the same; one that came with the shared token cannot prove it."""
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway:
        own = gateway.request("POST", "/v1/tokens", {"node_id": "hands"}).json()["token"]
        with NodeProcess(gateway, tmp_path / "own", "hands", env={"SA_NODE_TOKEN": own}) as node:
            approval = ask(gateway, "hands__Bash", {"command": "touch after-restart"})
            node.stop()
            shutil.rmtree(node.state)  # with the ledger that named the life of the program
            node.start()
            gateway.wait_for_node("hands")
            answer(gateway, approval)
            assert end_of(gateway, approval)["state"] == "ok"
            assert (node.workspace / "after-restart").exists()
        with NodeProcess(gateway, tmp_path / "shared", "feet") as node:
            approval = ask(gateway, "feet__Bash", {"command": "touch after-restart"})
            node.stop()
            shutil.rmtree(node.state)
            node.start()
            gateway.wait_for_node("feet")
            answer(gateway, approval)
            assert end_of(gateway, approval)["state"] == "denied"
            assert not (node.workspace / "after-restart").exists()


def test_a_tool_that_was_registered_again_does_not_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, '\n[[policy.rules]]\ndecision = "ask"\ntool = "test.*"\n')

    async def join(node: PlainNode, description: str) -> None:
        extras = {"features": ["tools"], "tools": [{"name": "test.run", "description": description}]}
        await node.send(hello_frame("plain", ["test"], farhand=extras))
        await node.receive("gateway_welcome")

    async def replace(gateway: GatewayProcess) -> None:
        async with PlainNode.connect(gateway, hello=False) as node:
            await join(node, "Reads a thing.")
            approval = await asyncio.to_thread(ask, gateway, "test.run", {})
        async with PlainNode.connect(gateway, hello=False) as node:
            await join(node, "Removes a thing.")
            await asyncio.to_thread(answer, gateway, approval)
            record = await asyncio.to_thread(end_of, gateway, approval)
            assert record["state"] == "denied" and "registered again" in record["error"]["message"], record

    with GatewayProcess(home) as gateway:
        asyncio.run(replace(gateway))


def test_a_policy_that_denies_by_now_wins_over_an_approval(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands") as node:
        approval = ask(gateway, "hands__Bash", {"command": "touch forbidden"})
        write_policy(home, '\n[[policy.rules]]\nname = "none"\ndecision = "deny"\ntool = "Bash"\n')
        answer(gateway, approval)
        record = end_of(gateway, approval)
        assert record["state"] == "denied" and "(none)" in record["error"]["message"]
        assert not (node.workspace / "forbidden").exists()


def test_the_call_of_a_revoked_token_does_not_run(hands: NodeProcess) -> None:
    gateway = hands.gateway
    created = Command(gateway.home)("token", "create", "--json").json()
    call = {"tool": "hands__Bash", "args": {"command": "touch revoked"}, "background": True}
    begun = gateway.request("POST", "/v1/tools/invoke", call, token=created["token"]).json()
    approval = asked(gateway, begun["request_id"])
    assert Command(gateway.home)("token", "revoke", created["id"]).status == 0
    answer(gateway, approval)
    record = end_of(gateway, approval)
    assert record["state"] == "denied" and "was revoked" in record["error"]["message"]
    assert not (hands.workspace / "revoked").exists()


# -- rules ------------------------------------------------------------------------------------------------


def test_rules_hold_for_the_next_call_on_a_connection_that_is_kept(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with GatewayProcess(home) as gateway, Plugin(gateway, tmp_path, "plug") as plugin:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        headers = {"Authorization": f"Bearer {gateway.token}", "Content-Type": "application/json"}

        def call() -> Any:
            body = json.dumps({"tool": "plug.effect", "args": {"text": "x"}})
            connection.request("POST", "/v1/tools/invoke", body, headers)
            return json.loads(connection.getresponse().read())

        assert [call()["state"] for _ in range(5)] == ["ok"] * 5
        write_policy(home, '\n[[policy.rules]]\nname = "stop"\ndecision = "deny"\nnode = "plug"\n')
        denied = call()
        assert denied["state"] == "denied" and "(stop)" in denied["error"]["message"], denied
        assert gateway.invoke("gsv__ConfigGet", {"path": "policy.rules.0.name"})["result"]["value"] == "stop"
        write_policy(home, '\n[[policy.rules]]\ndecision = "nonsense"\n')
        assert call()["state"] == "denied"  # a file that cannot be used changes nothing
        write_policy(home, "")
        assert call()["state"] == "ok"
        connection.close()
        assert len(plugin.started()) == 6


def test_the_rule_is_named_and_a_new_policy_is_tried_on_the_past(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, '\n[[policy.rules]]\nname = "no rm"\ndecision = "deny"\nargs = { command = "*rm *" }\n')
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands"):
        farhand = Command(home)
        for command in ("echo a", "echo b", "rm -rf nothing"):
            gateway.invoke("hands__Bash", {"command": command})
        ran = gateway.get("/v1/calls")["calls"][2]["id"]
        explained = farhand("policy", "explain", "hands__Bash", "command=rm x", "--json").json()
        assert explained["decision"] == "deny" and explained["rule"] == "no rm"
        assert farhand("policy", "explain", ran, "--json").json()["rule"] == "default"
        assert "no rm" in farhand("policy", "explain", "hands__bash", "command=rm x").out
        assert farhand("policy", "explain", "no.such.tool").status == 1
        now = farhand("policy", "replay", "--since", "1h", "--json").json()
        assert (now["calls"], now["deny"], now["ask"]) == (3, 1, 0)
        new = tmp_path / "new.toml"
        new.write_text('[[policy.rules]]\ndecision = "ask"\ntool = "Bash"\nargs = { command = "re:^echo" }\n')
        tried = farhand("policy", "replay", "--since", "7d", "--policy", str(new), "--json").json()
        assert (tried["calls"], tried["ask"], tried["deny"]) == (3, 2, 0)
        assert {one["call_id"] for one in tried["stopped"]} >= {ran}
        new.write_text('[[policy.rules]]\ndecision = "perhaps"\n')
        assert farhand("policy", "replay", "--policy", str(new)).status == 1
        assert gateway.invoke("hands__Bash", {"command": "echo still"})["ok"] is True


# -- time and kills ---------------------------------------------------------------------------------------


def test_without_an_answer_the_call_is_denied(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, approval_seconds=0.5)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands") as node:
        reported = gateway.invoke("hands__Bash", {"command": "touch silent"})
        assert reported["state"] == "denied" and reported["error"]["kind"] == "not_allowed"
        assert "it was not approved before" in reported["error"]["message"]
        approval = asked(gateway, reported["request_id"])
        assert approval["state"] == "expired"
        assert answer(gateway, approval).status == 409
        assert not (node.workspace / "silent").exists()


def test_an_approval_survives_a_kill_of_the_gateway(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands") as node:
        before = ask(gateway, "hands__Write", {"path": "kept.txt", "content": "kept\n"})
        denied = ask(gateway, "hands__Bash", {"command": "touch denied"})
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("hands")
        after = gateway.get(f"/v1/approvals/{before['id']}")
        assert after == before
        assert gateway.get(f"/v1/calls/{before['call_id']}")["state"] == "waiting"
        assert answer(gateway, after).status == 200
        assert end_of(gateway, before)["state"] == "ok"
        answer(gateway, denied, "deny")
        assert end_of(gateway, denied)["state"] == "denied"
        assert (node.workspace / "kept.txt").read_text() == "kept\n"
        assert not (node.workspace / "denied").exists()


def test_an_approved_call_waits_for_its_node_and_runs_once(tmp_path: Path) -> None:
    """Approved while the gateway has just been killed and its node is not back yet."""
    home = tmp_path / "home"
    write_policy(home, '\n[[policy.rules]]\ndecision = "ask"\ntool = "plug.*"\n')
    with GatewayProcess(home) as gateway, Plugin(gateway, tmp_path, "plug") as plugin:
        approval = ask(gateway, "plug.effect", {"text": "hi"})
        gateway.kill()
        gateway.start()
        assert answer(gateway, approval).status == 200
        gateway.kill()
        gateway.start()
        assert end_of(gateway, approval)["state"] == "ok"
        assert plugin.started() == [approval["call_id"]]


def test_a_deadline_that_passed_while_the_gateway_was_down_is_a_no(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, approval_seconds=2)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands") as node:
        approval = ask(gateway, "hands__Bash", {"command": "touch late"})
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("hands")
        assert end_of(gateway, approval)["state"] == "denied"
        assert not (node.workspace / "late").exists()


# -- the agent and people on channels ---------------------------------------------------------------------


def test_the_agents_call_needs_approval_and_is_denied(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rule = '\n[[policy.rules]]\ndecision = "ask"\ntool = "exec"\norigin = "http"\ncredential = "agent:*"\n'
    write_policy(home, rule)
    replies = [calls(("exec", {"command": "touch by-agent"})), text("it was not allowed")]
    with ModelServer(*replies) as model:
        env: dict[str, str | None] = {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "k", "FARHAND_MODEL": "m"}
        with GatewayProcess(home, env=env) as gateway:
            run = gateway.request("POST", "/v1/sessions/main/messages", {"message": "do it"})
            assert run.status in (200, 202), run
            (approval,) = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 30)
            assert approval["credential"] == "agent:main" and approval["origins"] == ["http"]
            answer(gateway, approval, "deny", reason="never")
            wait_until(lambda: len(model.requests) == 2, 30)
            reported = [message for message in model.requests[1].messages if message["role"] == "tool"]
            assert "denied by owner: never" in str(reported[0]["content"])


@pytest.fixture
def telegram() -> Iterator[TelegramServer]:
    with TelegramServer() as server:
        yield server


def channel(server: TelegramServer) -> str:
    return f'\n[channels.telegram]\ntoken = "{server.TOKEN}"\nurl = "{server.url}"\npolicy = "open"\n'


def test_an_approver_is_asked_and_answers_on_a_channel(telegram: TelegramServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, ASK + channel(telegram), approvers='["telegram:7"]')
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands") as node:
        first = ask(gateway, "hands__Bash", {"command": "touch by-telegram"})
        wait_until(lambda: telegram.said, 30)
        assert telegram.said[0].to == "7" and "touch by-telegram" in telegram.said[0].text
        assert f"approve {first['id']}" in telegram.said[0].text
        telegram.write(8, f"approve {first['id']}")  # a stranger
        telegram.write(7, f"Approve {first['id'].lower()}")
        record = end_of(gateway, first)
        assert record["state"] == "ok" and (node.workspace / "by-telegram").exists()
        assert gateway.get(f"/v1/approvals/{first['id']}")["decided_by"] == "telegram:7"
        second = ask(gateway, "hands__Bash", {"command": "touch never"})
        telegram.write(7, f"deny {second['id']} because I say so")
        assert "because I say so" in end_of(gateway, second)["error"]["message"]
        assert not (node.workspace / "never").exists()


def test_a_stranger_on_a_channel_approves_nothing(telegram: TelegramServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home, ASK + channel(telegram), approvers='["telegram:7"]')
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands"):
        approval = ask(gateway, "hands__Bash", {"command": "touch strange"})
        telegram.write(8, f"approve {approval['id']}")
        telegram.write(7, f"approve {approval['id']}", chat={"id": -100200, "type": "supergroup", "title": "Team"})
        wait_until(lambda: any(said.to == "8" for said in telegram.said), 30)  # taken for a message to the agent
        assert gateway.get(f"/v1/approvals/{approval['id']}")["state"] == "pending"


def test_a_request_that_is_too_long_for_a_chat_cannot_be_approved_in_it(
    telegram: TelegramServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    write_policy(home, ASK + channel(telegram), approvers='["telegram:7"]')
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path / "hands", "hands"):
        approval = ask(gateway, "hands__Bash", {"command": "echo " + "y" * 9000})
        wait_until(lambda: telegram.said, 30)
        assert "too long" in telegram.said[0].text
        telegram.write(7, f"approve {approval['id']}")
        wait_until(lambda: len(telegram.said) == 2, 30)
        assert "too long" in telegram.said[1].text
        assert gateway.get(f"/v1/approvals/{approval['id']}")["state"] == "pending"


def test_agent_process_asks_and_denies_too(hands: NodeProcess) -> None:
    gateway = hands.gateway

    def create() -> Any:
        tool = {"name": "create_file", "input": {"path": "direct.txt", "content": "hi"}}
        words = [{"role": "user", "content": [{"type": "text", "text": "make it"}]}]
        body = {"session_id": "s", "user_id": "u", "stream": False, "input": words, "biz_params": {"tool": tool}}
        return gateway.request("POST", "/agent/process", body)

    for decision, status in (("deny", 403), ("approve", 200)):
        with ThreadPoolExecutor(1) as pool:
            reported = pool.submit(create)
            (approval,) = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 20)
            assert approval["origins"] == ["direct"] and "+hi\n" in approval["diff"]
            answer(gateway, approval, decision)
            assert reported.result(60).status == status, reported.result()
        if decision == "deny":
            assert reported.result().json()["error"]["code"] == "tool_disabled"


def test_a_gateway_that_stops_tells_who_waits_that_the_call_still_does(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_policy(home)
    with GatewayProcess(home) as gateway, ThreadPoolExecutor(1) as pool:
        reported = pool.submit(gateway.invoke, "exec", {"command": "echo kept"})
        (approval,) = wait_until(lambda: gateway.get("/v1/approvals")["approvals"], 20)
        assert gateway.stop() == 0
        assert reported.result(60)["state"] == "waiting" and reported.result()["error"]["kind"] == "timeout"
        gateway.start()
        assert answer(gateway, approval).status == 200
        assert "kept" in end_of(gateway, approval)["result"]["content"]


def test_the_node_gets_the_value_of_a_repeated_key_that_the_policy_judged(tmp_path: Path) -> None:
    """A node in another language may take the first of two; so it is given one."""
    home = tmp_path / "home"
    write_policy(home, '\n[[policy.rules]]\ndecision = "deny"\ntool = "twice.*"\nargs = { text = "forbidden" }\n')
    bodies = [
        '{"text": "forbidden", "text": "fine"}',
        '{"text": "fine", "more": {"a": 1, "a": 2}, "text": "fine"}',
        '{"text": "forbidden", "te\\u0078t": "fine"}',
    ]

    async def scenario(gateway: GatewayProcess) -> list[str]:
        frames = []
        async with PlainNode.connect(gateway, "twice", ["twice"]) as node:
            for body in bodies:
                task = asyncio.create_task(asyncio.to_thread(post, gateway, body))
                frames.append(str(await node.socket.recv()))
                request_id = json.loads(frames[-1])["request_id"]
                await node.send(f'{{"type":"tool_response","request_id":"{request_id}","ok":true,"result":1}}')
                assert (await task)["ok"] is True
            refused = await asyncio.to_thread(post, gateway, '{"text": "fine", "text": "forbidden"}')
            assert refused["error"]["kind"] == "not_allowed"
        return frames

    def post(gateway: GatewayProcess, args: str) -> Any:
        line = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        headers = {"Authorization": f"Bearer {gateway.token}", "Content-Type": "application/json"}
        line.request("POST", "/v1/tools/invoke", f'{{"tool": "twice.say", "args": {args}}}', headers)
        return json.loads(line.getresponse().read())

    with GatewayProcess(home) as gateway:
        frames = asyncio.run(scenario(gateway))
        assert all(frame.count("text") == 1 and "forbidden" not in frame for frame in frames), frames
        assert '"a":2' in frames[1] and '"a":1' not in frames[1]
