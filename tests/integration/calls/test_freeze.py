"""Freeze: one order that stops everything, holds on each node by itself, and is lifted by its gateway alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.test_agent import House, open_house
from tests.integration.http.test_connections import Line
from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import (
    SHARED_TOKEN,
    GatewayProcess,
    NodeProcess,
    PlainNode,
    Plugin,
    PluginProcess,
    free_port,
    wait_until,
)
from tests.support.model_server import calls, text

house_of = contextlib.contextmanager(open_house)

LINGERING = "setsid nohup sleep {mark} >/dev/null 2>&1 & echo left"


def freeze(gateway: GatewayProcess, reason: str = "", **options: Any) -> Any:
    answer = gateway.request("POST", "/v1/freeze", {"reason": reason}, **options)
    assert answer.status == 200, answer
    return answer.json()


def thaw(gateway: GatewayProcess) -> Any:
    answer = gateway.request("POST", "/v1/thaw", {})
    assert answer.status == 200, answer
    return answer.json()


def fate(answer: Any, node_id: str) -> Any:
    return next(node for node in answer["nodes"] if node["node_id"] == node_id)


def refused(answer: Any) -> str:
    """The text of a call that a freeze stopped before it began."""
    assert answer["ok"] is False and answer["error"]["kind"] == "not_allowed", answer
    assert "frozen since" in answer["error"]["message"], answer
    return str(answer["error"]["message"])


def events(gateway: GatewayProcess, kind: str) -> list[Any]:
    pages = gateway.request("GET", "/v1/events?follow=0&last_event_id=0").body.decode().split("\n\n")
    lines = [line.removeprefix("data: ") for page in pages for line in page.split("\n") if line.startswith("data: ")]
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


@pytest.fixture
def hand(gateway: GatewayProcess, tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(gateway, tmp_path / "hand", "hand") as node:
        yield node


# -- nothing begins ---------------------------------------------------------------------------------------


def test_no_call_begins_and_the_refusal_says_since_when_by_whom_why_and_how_to_lift_it(
    gateway: GatewayProcess, hand: NodeProcess
) -> None:
    answer = freeze(gateway, "it emails\neveryone")
    assert answer["frozen"] is True and answer["by"] == "owner" and answer["reason"] == "it emails everyone"
    said = refused(gateway.invoke("hand__Bash", {"command": "touch ran"}))
    assert "UTC by owner: it emails everyone" in said and "`farhand thaw`" in said
    refused(gateway.invoke("hand__Read", {"path": "x"}))
    refused(gateway.invoke("gsv__ReadFile", {"path": "SOUL.md"}))
    refused(gateway.invoke("gsv__WriteFile", {"path": "a.txt", "content": "x"}))
    refused(gateway.invoke("exec", {"command": "touch ran"}))
    refused(gateway.invoke("gsv__Cron", {"action": "status"}))
    refused(gateway.invoke("hand__Bash", {"command": "touch ran"}, background=True))
    refused(gateway.invoke("hand__Bash", {"command": "touch ran"}, headers={"Idempotency-Key": "frozen-1"}))
    assert not (hand.workspace / "ran").exists()
    thaw(gateway)
    # A call that was refused has not used its key up.
    again = gateway.invoke("hand__Bash", {"command": "touch ran"}, headers={"Idempotency-Key": "frozen-1"})
    assert again["ok"] is True and (hand.workspace / "ran").exists()


def test_a_freeze_holds_on_an_open_connection(gateway: GatewayProcess, hand: NodeProcess) -> None:
    body = {"tool": "hand__Bash", "args": {"command": "echo x >> log"}}
    with Line(gateway) as line:
        for _ in range(3):
            line.send(line.bytes_of(body))
            assert line.receive()[2]["ok"] is True
        freeze(gateway)
        for _ in range(3):
            line.send(line.bytes_of(body))
            refused(line.receive()[2])
        thaw(gateway)
        line.send(line.bytes_of(body))
        assert line.receive()[2]["ok"] is True
    assert (hand.workspace / "log").read_text() == "x\n" * 4


def test_no_route_starts_anything_and_reading_still_works(gateway: GatewayProcess, hand: NodeProcess) -> None:
    (hand.workspace / "a.txt").write_text("a")
    freeze(gateway, "test")
    tool = {"name": "shell", "input": {"command": "true"}}
    direct = {"input": [{"role": "user", "type": "message", "content": [{"type": "text", "text": "x"}]}]}
    direct |= {"session_id": "s", "user_id": "u", "stream": False, "biz_params": {"tool": tool}}
    for _ in range(3):
        answer = gateway.request("POST", "/agent/process", direct)
        assert answer.status == 403 and answer.json()["error"]["code"] == "tool_disabled", answer
        assert "frozen since" in answer.json()["error"]["message"]
    for method, path, body in (
        ("POST", "/v1/transfers", {"source": "hand:a.txt", "destination": "gsv:b.txt"}),
        ("GET", "/v1/transfers/content?source=hand:a.txt", None),
        ("PUT", "/v1/transfers/content?destination=hand:b.txt", b"x"),
        ("PUT", "/v1/workspace/main/b.txt", b"x"),
        ("DELETE", "/v1/workspace/main/b.txt", None),
    ):
        answer = gateway.request(method, path, body)
        assert answer.status == 423 and answer.json()["error"]["code"] == "frozen", (path, answer)
    for path, body in (
        ("/v1/chat/completions", {"model": "farhand", "messages": [{"role": "user", "content": "x"}]}),
        ("/agent/process", {key: value for key, value in direct.items() if key != "biz_params"}),
    ):
        answer = gateway.request("POST", path, body)
        assert answer.status == 423 and "frozen since" in answer.json()["error"]["message"], (path, answer)
    call = {"name": "hand__Bash", "arguments": {"command": "true"}}
    initialize = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    both = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": initialize}
    opened = gateway.request("POST", "/mcp", message, headers=both)
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]} if "mcp-session-id" in opened.headers else {}
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
    answer = gateway.request("POST", "/mcp", message, headers={**both, **session})
    assert b"frozen since" in answer.body, answer
    added = gateway.request("POST", "/v1/cron", {"name": "j", "schedule": "every 1h", "message": "x"})
    assert added.status == 403 and "frozen since" in added.json()["error"]["message"], added
    run = gateway.request("POST", "/v1/sessions/main/messages", {"message": "x", "wait_seconds": 10}).json()
    assert run["state"] == "failed" and run["error"]["kind"] == "frozen", run
    for path in ("/v1/nodes", "/v1/tools", "/v1/calls", "/v1/jobs", "/v1/sessions", "/v1/cron", "/v1/workspace/main"):
        assert gateway.request("GET", path).status == 200, path
    assert gateway.get("/v1/health")["frozen"]["reason"] == "test"
    assert gateway.get("/v1/freeze")["frozen"] is True
    thaw(gateway)
    assert gateway.get("/v1/health")["frozen"] is None
    assert gateway.request("POST", "/agent/process", direct).status == 200


def test_a_panic_button_can_stop_everything_and_nothing_else(gateway: GatewayProcess) -> None:
    made = gateway.request("POST", "/v1/tokens", {"label": "button", "scopes": ["freeze"]}).json()
    token = made["token"]
    assert gateway.request("POST", "/v1/thaw", {}, token=token).status == 403
    assert gateway.request("GET", "/v1/nodes", token=token).status == 403
    assert gateway.request("POST", "/v1/tools/invoke", {"tool": "ls"}, token=token).status == 403
    assert freeze(gateway, token=token)["by"] == made["id"]
    assert gateway.request("GET", "/v1/freeze", token=token).json()["frozen"] is True
    assert gateway.request("POST", "/v1/thaw", {}, token=token).status == 403
    other = gateway.request("POST", "/v1/tokens", {"scopes": ["tools.exec", "read", "chat"]}).json()["token"]
    assert gateway.request("POST", "/v1/freeze", {}, token=other).status == 403
    assert gateway.request("POST", "/v1/freeze", {"reason": "x" * 501}).status == 400
    assert gateway.request("POST", "/v1/freeze", b"").status == 200


# -- everything ends --------------------------------------------------------------------------------------


def test_every_process_tree_is_ended_including_detached_and_left_over_ones(
    gateway: GatewayProcess, hand: NodeProcess
) -> None:
    # Each is known by how long it would sleep.
    left, old, lost, back, front, own = marks = [f"{90_000 + number}.{hand.pid}" for number in range(6)]
    hand.ok("Bash", {"command": LINGERING.format(mark=old)})
    orphan = hand.ok("Bash", {"command": f"exec sleep {lost}", "background": True})
    hand.restart()  # from here on `old` is what a command of an earlier life left
    subprocess.run(["kill", "-9", str(pid_of_parent(orphan["pid"]))], check=True)  # and `lost` has no keeper
    hand.ok("Bash", {"command": LINGERING.format(mark=left)})
    hand.ok("Bash", {"command": f"sleep {back} & sleep 1000", "background": True})
    waiting = hand.begin("Bash", {"command": f"trap '' TERM; sleep {front}; sleep 1000"})
    gateway.invoke("exec", {"command": f"exec sleep {own}", "background": True})
    for mark in marks:
        wait_until(lambda mark=mark: alive(mark), 10, f"{mark} runs")

    answer = freeze(gateway)
    assert [mark for mark in marks if alive(mark)] == []
    reported = fate(answer, "hand")
    assert reported["confirmed"] is True and "error" not in reported and reported["ended_processes"] >= 5, answer
    assert answer["gateway"]["ended_processes"] >= 1 and "error" not in answer["gateway"], answer
    assert answer["gateway"]["cancelled_calls"] >= 1
    ended = hand.end_of(waiting)
    assert ended["state"] == "cancelled" and "frozen since" in ended["error"]["message"], ended
    assert not [job for job in gateway.get("/v1/jobs")["jobs"] if job["running"]]


def alive(mark: str) -> bool:
    listing = subprocess.run(["ps", "-A", "-o", "stat=,args="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[1:] == ["sleep", mark] and line[0] != "Z" for line in listing.splitlines())


def pid_of_parent(pid: int) -> int:
    found = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return int(found.strip() or 0)


def test_a_turn_of_the_agent_is_stopped_and_its_call_cancelled(tmp_path: Path) -> None:
    with house_of(tmp_path / "home") as house, NodeProcess(house.gateway, tmp_path / "hand", "hand") as hand:
        command = "touch began; sleep 1000"
        session = house.session(calls(("hand__Bash", {"command": command})), text("done"))
        begun = session.send(wait=0)
        wait_until((hand.workspace / "began").exists, 20, "the command")
        waiting = session.send("and then?", wait=0)
        answer = freeze(house.gateway, "enough")
        assert answer["gateway"]["stopped_runs"] >= 1 and fate(answer, "hand")["ended_processes"] >= 1, answer
        for run in (begun, waiting):
            outcome = session.outcome(run["run_id"])
            assert outcome["state"] == "stopped" and "frozen since" in outcome["error"]["message"], outcome
        asked = len(house.model.requests)
        assert session.send("again")["error"]["kind"] == "frozen"
        assert "frozen" in house.session().send("elsewhere")["error"]["message"]
        made = house.gateway.request("PUT", "/v1/hooks/bell", {"secret": ""})
        assert made.status in (200, 201), made
        assert house.gateway.request("POST", "/hooks/bell", b"ring the bell", token=None).status == 202
        assert len(house.model.requests) == asked, "the model was asked"
        thaw(house.gateway)
        other = house.session(text("back"))
        assert other.send("hello")["reply"] == "back"
        # Posts of one hook reach the agent in order: once the second is there, the first has been passed over.
        house.script("second ring", text("rung"))
        assert house.gateway.request("POST", "/hooks/bell", b"second ring", token=None).status == 202
        wait_until(lambda: house.asked("second ring"), 60, "the second post")
        assert house.asked("ring the bell") == []


def test_a_person_who_may_run_commands_can_freeze_in_a_chat(tmp_path: Path) -> None:
    with house_of(tmp_path / "home") as house:
        reader = house.gateway.request("POST", "/v1/tokens", {"scopes": ["chat", "tools.read"]}).json()["token"]
        body = {"message": "/freeze please", "wait_seconds": 10}
        answer = house.gateway.request("POST", "/v1/sessions/word/messages", body, token=reader).json()
        assert answer["error"]["kind"] == "not_allowed" and not house.gateway.get("/v1/freeze")["frozen"], answer
        assert "Frozen: 0 of 0 connected nodes" in house.session().command("/freeze it runs  away")
        assert house.gateway.get("/v1/freeze")["reason"] == "it runs away"
        thaw(house.gateway)


def test_scheduled_work_is_held_and_continues_after_the_thaw(tmp_path: Path) -> None:
    def asked(house: House) -> int:
        return len(house.asked("tick tock"))

    with house_of(tmp_path / "home") as house:
        house.script("tick tock", *[text("ok") for _ in range(1000)])
        spec = {"mode": "task", "message": "tick tock"}
        job = {"name": "tick", "schedule": {"kind": "every", "everyMs": 1000}, "spec": spec}
        added = house.gateway.invoke("gsv__Cron", {"action": "add", "job": job})
        assert added["ok"] is True, added
        wait_until(lambda: asked(house) >= 1, 20, "the first run")
        freeze(house.gateway)
        before = asked(house)
        job_id = added["result"]["job"]["id"]
        at = house.gateway.get(f"/v1/cron/{job_id}")["job"]["state"]["nextRunAtMs"]
        wait_until(lambda: time.time() * 1000 > at + 2500, 20, "slots passing")
        assert asked(house) == before
        thaw(house.gateway)
        wait_until(lambda: asked(house) > before, 20, "a run after the thaw")


# -- it holds ---------------------------------------------------------------------------------------------


def test_a_node_stays_frozen_when_its_gateway_is_killed_and_when_it_is_restarted(tmp_path: Path) -> None:
    port = free_port()
    gateway = GatewayProcess(tmp_path / "home", port=port)
    gateway.start()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: gateway.process is None or gateway.process.poll() is not None or gateway.kill())
        hand = stack.enter_context(NodeProcess(gateway, tmp_path / "hand", "hand"))
        hand.ok("Bash", {"command": "sleep 1000", "background": True})
        assert fate(freeze(gateway, "by the first"), "hand")["confirmed"] is True
        gateway.kill()

        # Another gateway, which knows of no freeze, in the same place.
        with GatewayProcess(tmp_path / "other", port=port) as other:
            other.wait_for_node("hand")
            hand.gateway = other
            said = hand.fails("Bash", {"command": "touch ran"}, "not_allowed")
            assert "this node is frozen since" in said and "by the first" in said, said
            assert hand.fails("Read", {"path": "x"}, "not_allowed")
            hand.restart()
            assert "frozen since" in hand.fails("Bash", {"command": "touch ran"}, "not_allowed")
            hand.kill()
            hand.start()
            assert other.wait_for_node("hand")["frozen"] is True
            assert fate(other.get("/v1/freeze"), "hand")["confirmed"] is False
            # It is not that one's to lift.
            refusal = fate(thaw(other), "hand")
            assert refusal["confirmed"] is False and "another gateway" in refusal["error"], refusal
            for output in ([], ["--json"]):
                environment = {**other.environment, "FARHAND_URL": other.url}
                assert run_process([*FARHAND, "thaw", *output], env=environment).returncode == 1, output
            hand.fails("Bash", {"command": "touch ran"}, "not_allowed")
            # Nor is a file carried round it.
            (hand.workspace / "a.txt").write_text("a")
            sent = other.request("POST", "/v1/transfers", {"source": "hand:a.txt", "destination": "gsv:a.txt"})
            assert sent.status == 403 and "frozen since" in sent.json()["error"]["message"], sent
        assert not (hand.workspace / "ran").exists()

        gateway.start()
        hand.gateway = gateway
        gateway.wait_for_node("hand")
        refused(gateway.invoke("hand__Bash", {"command": "true"}))
        assert fate(thaw(gateway), "hand")["confirmed"] is True
        hand.ok("Bash", {"command": "true"})
        gateway.stop()


def test_it_survives_a_restart_and_open_work_of_before_is_not_taken_up(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path / "hand", "hand") as hand:
        freeze(gateway, "for good")
        gateway.kill()
        gateway.start()
        assert gateway.get("/v1/freeze")["reason"] == "for good"
        refused(gateway.invoke("ls", {}))
        gateway.wait_for_node("hand")
        wait_until(lambda: fate(gateway.get("/v1/freeze"), "hand")["confirmed"], 15, "the node's word")
        gateway.stop()
        gateway.start()
        refused(gateway.invoke("hand__Bash", {"command": "true"}))
        thaw(gateway)
        gateway.stop()
        gateway.start()
        gateway.wait_for_node("hand")
        assert gateway.get("/v1/freeze")["frozen"] is False
        hand.ok("Bash", {"command": "true"})


def test_a_damaged_store_or_file_does_not_lift_it(gateway: GatewayProcess) -> None:
    freeze(gateway)
    gateway.kill()
    for name in ("farhand.db", "farhand.db-wal", "farhand.db-shm"):
        (gateway.home / name).write_bytes(b"not a database any more" * 100)
    gateway.start()
    refused(gateway.invoke("ls", {}))
    gateway.stop()
    (gateway.home / "freeze.json").write_bytes(b"{")
    gateway.start()
    assert "cannot be read" in refused(gateway.invoke("ls", {}))
    thaw(gateway)
    assert gateway.invoke("ls", {"path": "."})["ok"] is True


def test_an_offline_node_is_frozen_when_it_returns_before_any_call(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path / "hand", "hand") as hand:
        job = hand.ok("Bash", {"command": "sleep 1000", "background": True})
        open_call = hand.begin("Bash", {"command": "sleep 1000"})
        hand.kill()
        gateway.wait_for_node("hand", online=False)
        reported = fate(freeze(gateway), "hand")
        assert (reported["online"], reported["confirmed"], reported["ended_processes"]) == (False, False, 0)
        assert reported["error"].startswith("offline")
        assert hand.end_of(open_call)["state"] == "cancelled"
        hand.start()
        reported = wait_until(
            lambda: (one := fate(gateway.get("/v1/freeze"), "hand"))["confirmed"] and one, 15, "its word"
        )
        assert reported["online"] is True and reported["ended_processes"] >= 1, reported
        assert not Path(f"/proc/{job['pid']}/root").exists()
        kinds = [event["data"] for event in events(gateway, "freeze.node")]
        assert kinds and kinds[-1]["confirmed"] is True

        # And of the thaw too.
        hand.kill()
        gateway.wait_for_node("hand", online=False)
        assert fate(thaw(gateway), "hand")["confirmed"] is False
        hand.start()
        wait_until(lambda: gateway.wait_for_node("hand")["frozen"] is False, 15, "the thaw")
        hand.ok("Bash", {"command": "true"})
        assert [event["data"]["by"] for event in events(gateway, "freeze.on") + events(gateway, "freeze.off")] == [
            "owner",
            "owner",
        ]


# -- what nodes say ---------------------------------------------------------------------------------------


def test_a_node_that_knows_only_the_guide_is_reported_as_what_it_is(gateway: GatewayProcess) -> None:
    async def scenario() -> None:
        async with PlainNode.connect(gateway, "plain", ["test"]) as node:
            calling = asyncio.ensure_future(gateway.ainvoke("test.work", {}))
            await node.receive("tool_request")
            answer = await asyncio.to_thread(freeze, gateway)
            reported = fate(answer, "plain")
            assert reported["online"] is True and reported["confirmed"] is False
            assert reported["error"].startswith("not supported by this node"), reported
            ended = await calling
            assert ended["error"]["kind"] == "cancelled" and "frozen since" in ended["error"]["message"], ended
            refused(await gateway.ainvoke("test.work", {}))
            assert fate(await asyncio.to_thread(thaw, gateway), "plain")["confirmed"] is True
            calling = asyncio.ensure_future(gateway.ainvoke("test.more", {}))
            request = await node.receive()  # nothing but the six messages came in between
            assert request["type"] == "tool_request" and request["tool"] == "test.more"
            await node.answer(request, "fine")
            assert (await calling)["ok"] is True

    asyncio.run(scenario())


def test_a_plug_in_stops_its_calls_and_takes_no_others(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "plug") as plug:
        call = gateway.invoke("plug.hold", {"until": "never"}, background=True)["request_id"]
        plug.started(1)
        reported = fate(freeze(gateway), "plug")
        assert reported["confirmed"] is True and reported["stopped_calls"] == 1 and reported["ended_processes"] == 0, (
            reported
        )
        wait_until(lambda: "cancel" in plug.steps(call), 10, "the plug-in to be cancelled")
        wait_until(lambda: gateway.get(f"/v1/calls/{call}")["state"] == "cancelled", 10, "the end of the call")
        refused(gateway.invoke("plug.effect", {}))
        thaw(gateway)
        assert gateway.invoke("plug.effect", {})["ok"] is True
        assert len(plug.started()) == 2


MANY = """
import asyncio, os
from farhand.sdk import NodeClient, NodeInfo, ToolRegistry

async def main():
    tasks = []
    for number in range(int(os.environ["COUNT"])):
        registry = ToolRegistry()
        @registry.tool(f"n{number}.wait")
        async def wait(ctx) -> str:
            await ctx.cancel.cancelled()
            return "stopped"
        info = NodeInfo(f"n{number}", f"n{number}", "test", "1")
        tasks.append(NodeClient(node_info=info).spawn(registry))
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_many_nodes_are_frozen_at_once_and_each_answers_for_itself(gateway: GatewayProcess, tmp_path: Path) -> None:
    count = 40
    env = {"SA_GATEWAY_WS_URL": gateway.ws_url, "SA_NODE_TOKEN": SHARED_TOKEN, "COUNT": str(count)}
    with PluginProcess(MANY, tmp_path, env):
        wait_until(lambda: sum(node["online"] for node in gateway.get("/v1/nodes")["nodes"]) == count, 60, "all nodes")
        open_calls = [gateway.invoke(f"n{number}.wait", {}, background=True)["request_id"] for number in range(count)]
        answer = freeze(gateway)
        assert len(answer["nodes"]) == count and all(node["confirmed"] for node in answer["nodes"]), answer
        assert sum(node["stopped_calls"] for node in answer["nodes"]) == count
        for call in open_calls:
            over = wait_until(lambda call=call: gateway.get(f"/v1/calls/{call}")["state"] != "running", 15, "its end")
            assert over
        assert all(node["confirmed"] for node in thaw(gateway)["nodes"])


# -- the command ------------------------------------------------------------------------------------------


def farhand(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SA_", "FARHAND_"))}
    return run_process([*FARHAND, *arguments], env={**env, "FARHAND_HOME": str(home)})


def test_the_command_shows_each_node_and_its_status_says_whether_all_confirmed(
    gateway: GatewayProcess, hand: NodeProcess
) -> None:
    hand.ok("Bash", {"command": "sleep 1000", "background": True})
    done = farhand(gateway.home, "freeze", "--reason", "stop it")
    assert done.returncode == 0 and "by owner: stop it" in done.stdout, done
    assert "hand" in done.stdout and "yes" in done.stdout
    refused(gateway.invoke("hand__Bash", {"command": "true"}))
    assert "stop it" in farhand(gateway.home, "freeze", "--status").stdout
    assert "is frozen: nothing runs until" in farhand(gateway.home, "doctor").stdout
    call = farhand(gateway.home, "call", "hand__Bash", "command=true")
    assert call.returncode == 1 and "frozen since" in call.stderr
    state = json.loads(farhand(gateway.home, "freeze", "--json").stdout)
    assert state["frozen"] is True and state["reason"] == "stop it"
    assert farhand(gateway.home, "thaw").returncode == 0
    assert farhand(gateway.home, "freeze", "--status").stdout == "not frozen\n"
    hand.ok("Bash", {"command": "true"})


def test_without_a_gateway_its_home_is_frozen_and_what_it_left_running_is_ended(gateway: GatewayProcess) -> None:
    mark = f"91000.{gateway.port}"
    assert gateway.invoke("exec", {"command": f"exec sleep {mark}", "background": True})["ok"] is True
    wait_until(lambda: alive(mark), 10, "the command")
    gateway.kill()
    done = farhand(gateway.home, "freeze", "--reason", "while down")
    assert done.returncode == 0 and "will start frozen" in done.stdout, done
    assert not alive(mark)
    gateway.start()
    assert "while down" in refused(gateway.invoke("ls", {}))
    gateway.stop()
    assert json.loads(farhand(gateway.home, "thaw", "--json").stdout)["frozen"] is False
    gateway.start()
    assert gateway.invoke("ls", {"path": "."})["ok"] is True
    nowhere = farhand(gateway.home / "nowhere", "freeze", "--json")
    assert nowhere.returncode == 1 and json.loads(nowhere.stdout)["error"]["code"] == "no_gateway"
    named = farhand(gateway.home, "freeze", "--url", "http://127.0.0.1:1")
    assert named.returncode == 1 and gateway.get("/v1/freeze")["frozen"] is False
