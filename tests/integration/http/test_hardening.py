"""Attacks and accidents found in a review: each affects at most the client that causes it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.fork_server import FARHAND, run_process
from tests.support.harness import SHARED_TOKEN, GatewayProcess, NodeProcess, PlainNode, hello_frame, wait_until


def raw(gateway: GatewayProcess, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "//", "http://"])
def test_an_origin_that_is_not_an_address_is_refused_like_any_other(
    shared_gateway: GatewayProcess, origin: str
) -> None:
    answer = shared_gateway.request("GET", "/v1/nodes", headers={"Origin": origin})
    assert answer.status == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
    assert answer.headers["x-request-id"]


def test_a_head_without_end_is_cut_off(shared_gateway: GatewayProcess) -> None:
    answer = raw(shared_gateway, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * 66_000)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and json.loads(body)["error"]["code"] == "too_large"
    assert shared_gateway.request("GET", "/healthz", headers={"X-A": "a" * 30_000}).status == 200


def test_trailers_are_not_headers(shared_gateway: GatewayProcess) -> None:
    body = b'{"tool": "gsv__ConfigGet", "args": {"path": "gateway.port"}}'
    head = f"POST /v1/tools/invoke HTTP/1.1\r\nHost: 127.0.0.1:{shared_gateway.port}\r\nConnection: close\r\n"
    proof = f"Authorization: Bearer {shared_gateway.token}\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    for before, after, status in (
        ("", proof, 401),
        ("", f"X-API-Key: {shared_gateway.token}\r\n", 401),
        (proof, "Authorization: Bearer wrong\r\nOrigin: http://evil.example\r\n", 200),
        (proof * 2, "", 400),
    ):
        answer = raw(shared_gateway, (head + before).encode() + chunked + after.encode() + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), (before, after, answer[:200])


def test_looking_at_a_sign_in_link_does_not_use_it_up(shared_gateway: GatewayProcess) -> None:
    path = shared_gateway.request("POST", "/v1/signin", {}).json()["path"]
    assert shared_gateway.request("HEAD", path, token=None).status == 401
    assert shared_gateway.request("GET", path, token=None).status == 303
    assert shared_gateway.request("GET", path, token=None).status == 401


def test_waiting_callers_are_notified_when_the_gateway_stops(tmp_path: Path) -> None:
    async def run() -> None:
        with GatewayProcess(tmp_path / "home") as gateway:
            extras = {"features": ["cancel", "resume"], "resume": {"boot": "b"}}
            async with PlainNode.connect(gateway, hello=False) as node:
                await node.send(hello_frame("plain", ["test"], farhand=extras))
                await node.receive("gateway_welcome")
                waiting = asyncio.create_task(gateway.ainvoke("test.long"))
                await node.receive("tool_request")
                assert gateway.process is not None
                gateway.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                gateway.process.send_signal(signal.SIGTERM)  # the second time: now
                envelope = await waiting
                assert envelope["state"] == "unknown"
                assert envelope["error"]["message"].startswith("outcome unknown: the gateway stopped")
            assert await asyncio.to_thread(gateway.process.wait, 20) == 0

    asyncio.run(run())


def test_revoking_one_token_of_a_node_leaves_what_uses_another(gateway: GatewayProcess) -> None:
    async def run() -> None:
        old = gateway.request("POST", "/v1/tokens", {"node_id": "box"}).json()
        new = gateway.request("POST", "/v1/tokens", {"node_id": "box"}).json()
        async with PlainNode.connect(gateway, "box", token=new["token"]) as node:
            assert gateway.request("DELETE", f"/v1/tokens/{old['id']}").status == 200
            await node.send({"type": "ping", "timestamp": 1})
            assert (await node.receive("pong"))["timestamp"] == 1
            assert gateway.request("DELETE", f"/v1/tokens/{new['id']}").status == 200
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await node.receive(seconds=10)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401

    asyncio.run(run())


def test_the_shared_token_does_not_speak_for_a_node_with_its_own(gateway: GatewayProcess) -> None:
    async def run() -> None:
        token = gateway.request("POST", "/v1/tokens", {"node_id": "box"}).json()["token"]
        async with PlainNode.connect(gateway, "box", token=token):
            async with PlainNode.connect(gateway, "box", token=SHARED_TOKEN, hello=False) as stranger:
                await stranger.send(hello_frame("box", ["test"]))
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await stranger.receive(seconds=10)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
            assert gateway.wait_for_node("box")

    asyncio.run(run())


async def offering(node: PlainNode, node_id: str, tools: list[Any], features: list[str]) -> None:
    extras = {"features": features, "tools": tools, "resume": {"boot": "b"}}
    await node.send(hello_frame(node_id, ["test"], farhand=extras))
    await node.receive("gateway_welcome")


def test_numbers_out_of_range_are_invalid(gateway: GatewayProcess) -> None:
    async def run() -> None:
        async with PlainNode.connect(gateway, hello=False) as node:
            schema = {"type": "object", "properties": {"a": {"type": "number"}}}
            await offering(node, "plain", [{"name": "test.add", "parameters": schema}], ["resume"])
            body = b'{"tool": "test.add", "args": {"a": 1e999}}'
            envelope = (await asyncio.to_thread(gateway.request, "POST", "/v1/tools/invoke", body)).json()
            assert envelope["ok"] is False and envelope["error"]["kind"] == "invalid_args"
            assert gateway.get(f"/v1/calls/{envelope['request_id']}")["state"] == "error"

    asyncio.run(run())


def test_a_schema_that_unfolds_without_end_does_not_stall_others(gateway: GatewayProcess) -> None:
    async def run() -> None:
        schema: dict[str, Any] = {"type": "object", "$ref": "#/$defs/a0", "$defs": {"a60": {"type": "object"}}}
        for level in range(60):
            schema["$defs"][f"a{level}"] = {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2}
        async with PlainNode.connect(gateway, hello=False) as node:
            await offering(node, "plain", [{"name": "test.bomb", "parameters": schema}], ["resume"])
            call = asyncio.create_task(gateway.ainvoke("test.bomb", {"a": 1}))
            await node.answer(await node.receive("tool_request"), "fine")
            assert (await call)["result"] == "fine"

    asyncio.run(run())


def test_invalid_jobs_of_one_node_do_not_spoil_the_list_of_others(gateway: GatewayProcess) -> None:
    async def run() -> None:
        async with PlainNode.connect(gateway, hello=False) as node:
            await offering(node, "liar", [], ["resume", "query.jobs"])
            for nonsense in (5, [{"job_id": "1"}], [{"job_id": 1}], "x", None):
                listing = asyncio.create_task(asyncio.to_thread(gateway.get, "/v1/jobs"))
                query = await node.receive("node_query")
                await node.send({"type": "node_answer", "query_id": query["query_id"], "result": nonsense})
                assert await listing == {"jobs": [], "count": 0, "unanswered": ["liar"]}
            listing = asyncio.create_task(asyncio.to_thread(gateway.get, "/v1/jobs"))
            query = await node.receive("node_query")
            job = {"node_id": "laptop", "job_id": "1", "command": "x", "started_at": 1, "running": True}
            await node.send({"type": "node_answer", "query_id": query["query_id"], "result": [job]})
            assert [each["node_id"] for each in (await listing)["jobs"]] == ["liar"]

    asyncio.run(run())


def test_a_blank_owner_token_admits_no_caller(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("\n")
    gateway = GatewayProcess(home)
    gateway.start(wait=False)
    assert gateway.process is not None and gateway.process.wait(60) == 1
    assert "is blank" in gateway.log.read_text() and "Traceback" not in gateway.log.read_text()
    assert gateway.process.stdout is not None
    gateway.process.stdout.close()


def test_denying_the_shell_denies_what_tends_it(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "box"):
        started = gateway.invoke("box__Bash", {"command": "sh -i", "background": True})["result"]
    with NodeProcess(gateway, tmp_path, "box", "--deny-tool", "Bash"):
        arguments = {"action": "submit", "sessionId": started["sessionId"], "data": "echo pwned"}
        for tool, args in (("box__Bash", {"command": "true"}), ("box__Process", arguments)):
            assert gateway.invoke(tool, args)["error"]["kind"] == "not_allowed"
    with NodeProcess(gateway, tmp_path, "box"):
        gateway.invoke("box__Process", {"action": "kill", "sessionId": started["sessionId"]})


def test_the_token_of_a_node_is_not_in_its_environment(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "box", env={"FARHAND_TEST_FORK": "0"}) as node:
        assert node.process is not None
        environ = Path(f"/proc/{node.process.pid}/environ").read_bytes()
        assert b"SA_NODE_TOKEN=" in environ and SHARED_TOKEN.encode() not in environ


def test_a_second_program_for_the_same_node_is_refused(gateway: GatewayProcess, tmp_path: Path) -> None:
    with NodeProcess(gateway, tmp_path, "box"):
        command = [*FARHAND, "node", "--gateway", gateway.url, "--id", "box"]
        second = run_process([*command, "--home", str(tmp_path / "state"), "--token", SHARED_TOKEN], env=os.environ)
        assert second.returncode == 1 and "already runs on this machine" in second.stderr
        assert "Traceback" not in second.stderr
        assert gateway.invoke("box__Bash", {"command": "true"})["result"]["status"] == "completed"


def test_many_callers_at_once_are_all_answered(shared_gateway: GatewayProcess) -> None:
    """Every caller is answered when a node answers out of order and some callers leave."""

    async def run() -> None:
        async with PlainNode.connect(shared_gateway, "crowd", ["crowd"]) as node:
            envelopes: list[Any] = []

            def call(number: int) -> None:
                envelopes.append(shared_gateway.invoke("crowd.n", number))

            threads = [threading.Thread(target=call, args=(number,)) for number in range(40)]
            for thread in threads:
                thread.start()
            requests = [await node.receive("tool_request", 20) for _ in threads]
            for request in reversed(requests):
                await node.answer(request, request["args"])
            await asyncio.to_thread(lambda: [thread.join(60) for thread in threads])
            assert sorted(envelope["result"] for envelope in envelopes) == list(range(40))
        wait_until(lambda: shared_gateway.get("/v1/health")["calls"]["open"] == 0)

    asyncio.run(run())


def test_the_guard_checks_in_its_order(shared_gateway: GatewayProcess) -> None:
    """For a request with several faults, the outermost one is reported; nothing after it was checked."""
    made = shared_gateway.request("POST", "/v1/tokens", {"scopes": ["read"]}).json()
    faults: dict[str, tuple[dict[str, str], int, str]] = {
        "host": ({"Host": "evil.example"}, 403, "host_not_allowed"),
        "origin": ({"Origin": "http://evil.example"}, 403, "origin_not_allowed"),
        "size": ({"Content-Length": str(1 << 40)}, 413, "too_large"),
        "credential": ({"Authorization": "Bearer wrong"}, 401, "unauthorized"),
        "scope": ({"Authorization": f"Bearer {made['token']}"}, 403, "forbidden"),
        "body": ({"Authorization": f"Bearer {shared_gateway.token}"}, 400, "invalid_request"),
    }
    names = list(faults)
    for place, name in enumerate(names):
        headers: dict[str, str] = {"Content-Type": "application/json", "Content-Length": "1"}
        for later in reversed(names[place:]):  # the fault itself, and all that are looked for later
            headers.update(faults[later][0])
        line = http.client.HTTPConnection("127.0.0.1", shared_gateway.port, timeout=30)
        line.putrequest("POST", "/v1/tokens", skip_host="Host" in headers)
        for header, value in headers.items():
            line.putheader(header, value)
        line.endheaders(b"{")
        answer = line.getresponse()
        code = json.loads(answer.read())["error"]["code"]
        line.close()
        assert (name, answer.status, code) == (name, *faults[name][1:])
    print(f"requests that are wrong in every way: {len(names)} tried, {len(names)} held")


def test_input_cannot_inject_log_lines(tmp_path: Path) -> None:
    """What a peer says is one line, without the characters that steer a terminal."""
    with GatewayProcess(tmp_path / "home") as gateway:

        async def scenario() -> None:
            reply = {"type": "tool_response", "request_id": "a\nWARNING all is well\x1b[2J\x9b1m\r", "ok": True}
            async with PlainNode.connect(gateway, "liar", ["liar"]) as node:
                task = asyncio.create_task(gateway.ainvoke("liar.do", {}))
                request = json.loads(await node.socket.recv())
                await node.send(json.dumps({**reply, "result": 1}))
                error = {"kind": "failed", "message": "no\nERROR forged line\x1b]0;x\x07"}
                await node.send(json.dumps({**reply, "request_id": request["request_id"], "ok": False, "error": error}))
                await task

        asyncio.run(scenario())
        assert gateway.request("GET", "/v1/nothing%0AERROR%20forged%1b[2J").status == 404
    text = gateway.log.read_bytes()
    assert not [line for line in text.splitlines() if line.startswith((b"ERROR forged", b"WARNING all"))]
    assert b"\x1b" not in text and b"\x9b" not in text and b"\x07" not in text


@pytest.mark.parametrize(("name", "value"), [("SA_NODE_CAPS", "pi=p.q"), ("SA_NODE_TOKENS", "hidden-token")])
def test_an_environment_that_cannot_be_meant_starts_nothing(tmp_path: Path, name: str, value: str) -> None:
    gateway = GatewayProcess(tmp_path / "home", env={name: value})
    gateway.start(wait=False)
    assert gateway.process is not None and gateway.process.stdout is not None
    assert gateway.process.wait(60) == 1 and gateway.process.stdout.read() == ""
    gateway.process.stdout.close()
    [line] = gateway.log.read_text().splitlines()
    assert line.startswith(f"farhand: {name}: entry 1") and "hidden-token" not in line


CUT_SHORT = b"POST /v1/tools/invoke HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"FROBNICATE /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        CUT_SHORT + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CUT_SHORT + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        CUT_SHORT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 66_000,
    ],
)
def test_what_the_parser_refuses_is_answered_like_any_other_mistake(
    shared_gateway: GatewayProcess, request_bytes: bytes
) -> None:
    head, _, body = raw(shared_gateway, request_bytes).partition(b"\r\n\r\n")
    status, *lines = head.decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert status.split(" ")[1] in ("400", "431") and headers["connection"] == "close" and headers["x-request-id"]
    assert headers["content-type"] == "application/json" and headers["x-content-type-options"] == "nosniff"
    assert json.loads(body)["error"]["code"] in ("invalid_request", "too_large")


def test_what_follows_a_whole_request_does_not_take_its_answer(shared_gateway: GatewayProcess) -> None:
    answer = raw(shared_gateway, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGARBAGE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"ok":true}')


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud83d", rb"\ud83d at byte 27"),
        (rb"\\\uD83Dx and more of it", rb"\uD83D at byte 29"),
        (rb"\ude00 and more of it", rb"\ude00 at byte 27"),
    ],
)
def test_half_a_character_is_named(shared_gateway: GatewayProcess, text: bytes, half: bytes) -> None:
    body = b'{"tool":"a.b","args":{"a":"%b"}}' % text
    headers = {"Content-Type": "application/json"}
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body, headers=headers)
    assert answer.status == 400 and half.decode() + " is half of a surrogate pair" in answer.json()["error"]["message"]
