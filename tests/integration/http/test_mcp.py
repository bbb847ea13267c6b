"""`/mcp`, held to the official client in both generations of the protocol, and to its rules by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.integration.nodes.test_node_files import IMAGES
from tests.support.harness import GatewayProcess, NodeProcess, PlainNode, hello_frame, wait_until

MODES = ["legacy", "2026-07-28", "auto"]
BOTH = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def connected(
    gateway: GatewayProcess, mode: str, token: str | None = None, **options: Any
) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token or gateway.token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{gateway.url}/mcp", http_client=http)
        async with Client(transport, mode=mode, **options) as client:
            yield client


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


def text_of(result: types.CallToolResult) -> str:
    assert isinstance(result.content[0], types.TextContent)
    return result.content[0].text


# -- the official client


@pytest.mark.parametrize("mode", MODES)
def test_tools_are_listed_and_called(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            assert client.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
            if mode != "2026-07-28":  # version 2026-07-28 has no handshake
                assert client.server_info is not None and client.server_info.name == "farhand"
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            offered = {tool["name"] for tool in shared_gateway.get("/v1/tools")["tools"]}
            assert listed.keys() == offered
            read, bash = listed["hands__Read"], listed["hands__Bash"]
            assert read.annotations is not None and read.annotations.read_only_hint is True
            assert bash.annotations is not None and bash.annotations.read_only_hint is False
            assert read.input_schema["type"] == "object" and "path" in read.input_schema["properties"]
            (hands.workspace / "m.txt").write_text("hello\n")
            result = await client.call_tool("hands__Read", {"path": "m.txt"})
            assert result.is_error is False
            assert json.loads(text_of(result))["content"] == "1\thello"
            assert result.meta is not None
            record = shared_gateway.get(f"/v1/calls/{result.meta['farhand/call_id']}")
            assert (record["tool"], record["state"], record["route"]["node_id"]) == ("hands__Read", "ok", "hands")

    run(act())


@pytest.mark.parametrize("mode", MODES)
def test_failures_are_reported(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            missing = await client.call_tool("hands__Read", {"path": "no-such-file"})
            assert missing.is_error is True
            assert text_of(missing).startswith("not_found: Failed to read")
            wrong = await client.call_tool("hands__Read", {"path": 7})
            assert wrong.is_error is True and text_of(wrong).startswith("invalid_args: parameter 'path'")
            with pytest.raises(Exception, match="Unknown tool"):
                await client.call_tool("hands.nothing.there", {})

    run(act())


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_an_image_is_an_image(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    (hands.workspace / "p.png").write_bytes(IMAGES["image/png"])

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            result = await client.call_tool("hands__Read", {"path": "p.png"})
            assert isinstance(result.content[1], types.ImageContent)
            assert result.content[1].mime_type == "image/png"

    run(act())


def test_a_large_result_comes_whole(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    """More than the client takes in one event."""
    (hands.workspace / "large.txt").write_text("x" * 3_000_000 + "\n")

    async def act() -> None:
        async with connected(shared_gateway, "legacy") as client:
            result = await client.call_tool("hands__Read", {"path": "large.txt"})
            assert len(json.loads(text_of(result))["content"]) == 3_000_002

    run(act())


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_progress_is_reported_while_a_command_runs(
    shared_gateway: GatewayProcess, hands: NodeProcess, mode: str
) -> None:
    gate = hands.workspace / f"gate-{mode}"
    reported: list[tuple[float, str | None]] = []

    async def progress(value: float, _total: float | None, message: str | None) -> None:
        reported.append((value, message))
        if message == "one":
            gate.touch()

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            command = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two"
            result = await client.call_tool("hands__Bash", {"command": command}, progress_callback=progress)
            assert json.loads(text_of(result))["output"] == "one\ntwo\n"

    run(act())
    assert reported[0][1] == "one"
    assert [value for value, _ in reported] == sorted({value for value, _ in reported})


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_cancelling_reaches_the_node(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    mark = f"cancel-{uuid.uuid4().hex[:8]}"

    async def act() -> None:
        async with connected(shared_gateway, mode) as client:
            call = asyncio.create_task(client.call_tool("hands__Bash", {"command": f"touch {mark}; sleep 600"}))
            await asyncio.to_thread(wait_until, (hands.workspace / mark).exists)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_until, lambda: ended(mark) is not None, 20, "the end of the call")

    def ended(mark: str) -> Any:
        calls = shared_gateway.get("/v1/calls?tool=hands__Bash&limit=20")["calls"]
        found = next(call for call in calls if mark in call["args"]["command"])
        return None if found["state"] == "running" else found

    run(act())
    record = ended(mark)
    assert record["state"] == "cancelled"
    assert "ended" in record["error"]["message"] or "cancel" in record["error"]["message"]


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_a_client_may_cancel_and_leave_at_once(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    """An answer to what was cancelled would meet a client that is closing, and break it."""

    async def act() -> None:
        for _ in range(10):
            mark = f"leave-{uuid.uuid4().hex[:8]}"
            async with connected(shared_gateway, mode) as client:
                call = asyncio.create_task(client.call_tool("hands__Bash", {"command": f"touch {mark}; sleep 600"}))
                await asyncio.to_thread(wait_until, (hands.workspace / mark).exists)
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call

    run(act())
    calls = shared_gateway.get("/v1/calls?tool=hands__Bash&limit=10")["calls"]
    wait_until(
        lambda: (
            [
                state
                for call in calls
                if (state := shared_gateway.get(f"/v1/calls/{call['id']}")["state"]) != "cancelled"
            ]
            == []
        ),
        20,
        "the end of the calls",
    )


def test_a_long_call_is_kept_alive_and_answered(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    """Longer than an answer is waited for as JSON: it becomes a stream."""

    async def act() -> None:
        for mode in ("legacy", "2026-07-28"):
            async with connected(shared_gateway, mode) as client:
                result = await client.call_tool("hands__Bash", {"command": "sleep 2.5; echo done"})
                assert json.loads(text_of(result))["output"] == "done\n"

    run(act())


def test_names_that_clients_would_not_take_are_sent_otherwise_and_meant(shared_gateway: GatewayProcess) -> None:
    async def act() -> None:
        said = {"tools": [{"name": "Say", "capability": "say"}], "features": ["tools"]}
        async with (
            PlainNode.connect(shared_gateway, "type:host", hello=False) as node,
            connected(shared_gateway, "legacy") as client,
        ):
            await node.send(hello_frame("type:host", ["say"], farhand=said))
            await node.receive("gateway_welcome")
            names = [tool.name for tool in (await client.list_tools()).tools]
            (sent,) = [name for name in names if name.endswith("__Say")]
            assert sent == "type_host__Say"
            call = asyncio.create_task(client.call_tool(sent, {"a": 1}))
            asked = await node.receive("tool_request")
            assert (asked["tool"], asked["args"]) == ("Say", {"a": 1})
            await node.answer(asked, "plainly")
            assert text_of(await call) == "plainly"

    run(act())


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_clients_are_notified_when_machines_connect_and_disconnect(shared_gateway: GatewayProcess, mode: str) -> None:
    async def heard_of(changes: Callable[[], Awaitable[None]]) -> None:
        async with PlainNode.connect(shared_gateway, "comes", ["comes.and.goes"]):
            await changes()
        await changes()

    async def legacy() -> None:
        heard = asyncio.Event()

        async def on_message(message: Any) -> None:
            if isinstance(message, types.ToolListChangedNotification):
                heard.set()

        async def changed() -> None:
            await heard.wait()
            heard.clear()

        async with connected(shared_gateway, "legacy", message_handler=on_message) as client:
            await client.list_tools()
            # The client opens its stream at any time; notifications need it.
            await asyncio.sleep(0.5)
            await heard_of(changed)

    async def modern() -> None:
        async with connected(shared_gateway, mode) as client, client.listen(tools_list_changed=True) as events:

            async def changed() -> None:
                await anext(events)

            await heard_of(changed)

    run(legacy() if mode == "legacy" else modern())


def test_a_session_outlives_the_gateway(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway:

        async def act() -> None:
            async with connected(gateway, "legacy") as client:
                first = await client.call_tool("gsv__ReadFile", {})
                await asyncio.to_thread(gateway.kill)
                await asyncio.to_thread(gateway.start)
                second = await client.call_tool("gsv__ReadFile", {})
                assert first.content == second.content

        run(act())


def test_a_narrow_token_sees_and_calls_its_own_tools_alone(shared_gateway: GatewayProcess, hands: NodeProcess) -> None:
    made = shared_gateway.request("POST", "/v1/tokens", {"label": "n", "tools": ["hands__Read", "hands__Glob"]}).json()

    async def act() -> None:
        for mode in ("legacy", "2026-07-28"):
            async with connected(shared_gateway, mode, made["token"]) as client:
                assert [tool.name for tool in (await client.list_tools()).tools] == ["hands__Glob", "hands__Read"]
                refused = await client.call_tool("hands__Bash", {"command": "true"})
                assert refused.is_error is True and text_of(refused).startswith("not_allowed: ")

    run(act())


def test_a_call_that_needs_approval_is_answered_once_it_is_approved(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    rule = '[[policy.rules]]\nname = "ask"\ndecision = "ask"\ntool = ["Bash"]\n'
    (home / "farhand.toml").write_text(rule)
    with GatewayProcess(home) as gateway, NodeProcess(gateway, tmp_path, "hands"):

        def pending() -> Any:
            return [one for one in gateway.get("/v1/approvals")["approvals"] if one["state"] == "pending"]

        async def act() -> None:
            for mode in ("legacy", "2026-07-28"):
                async with connected(gateway, mode) as client:
                    call = asyncio.create_task(client.call_tool("hands__Bash", {"command": "echo approved"}))
                    (approval,) = await asyncio.to_thread(wait_until, pending, 20, "the question")
                    await asyncio.sleep(2.5)  # until the answer has become a stream
                    body = {"decision": "approve", "hash": approval["hash"]}
                    answer = await asyncio.to_thread(gateway.request, "POST", f"/v1/approvals/{approval['id']}", body)
                    assert answer.status == 200, answer
                    result = await call
                    assert json.loads(text_of(result))["output"] == "approved\n"

        run(act())


# -- over standard input and output


@contextlib.asynccontextmanager
async def started(gateway: GatewayProcess, mode: str, **options: Any) -> AsyncIterator[Client]:
    """`farhand mcp`, started by the official client."""
    arguments = ["-m", "farhand", "mcp", "--home", str(gateway.home)]
    program = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with Client(stdio_client(program), mode=mode, **options) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_starts_programs_is_served(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    reported: list[str | None] = []

    async def progress(_value: float, _total: float | None, message: str | None) -> None:
        reported.append(message)

    async def act() -> None:
        async with started(shared_gateway, mode) as client:
            assert "hands__Bash" in {tool.name for tool in (await client.list_tools()).tools}
            command = {"command": "echo one; sleep 1; echo two"}
            slow = asyncio.create_task(client.call_tool("hands__Bash", command, progress_callback=progress))
            quick = await client.call_tool("gsv__ReadFile", {})
            assert quick.is_error is False and not slow.done()
            result = await slow
            assert json.loads(text_of(result))["output"] == "one\ntwo\n"

    run(act())
    assert "one" in reported


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_it_cancels_too(shared_gateway: GatewayProcess, hands: NodeProcess, mode: str) -> None:
    mark = f"stdio-{uuid.uuid4().hex[:8]}"

    def state() -> Any:
        calls = shared_gateway.get("/v1/calls?tool=hands__Bash&limit=20")["calls"]
        return next(call for call in calls if mark in call["args"]["command"])["state"]

    async def act() -> None:
        async with started(shared_gateway, mode) as client:
            call = asyncio.create_task(client.call_tool("hands__Bash", {"command": f"touch {mark}; sleep 600"}))
            await asyncio.to_thread(wait_until, (hands.workspace / mark).exists)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_until, lambda: state() == "cancelled", 20, "the end of the call")

    run(act())


def test_it_finds_the_answer_of_a_gateway_that_was_killed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        gate = node.workspace / "gate"

        async def act() -> None:
            async with started(gateway, "legacy") as client:
                command = f"echo before; while [ ! -e {gate} ]; do sleep 0.05; done; echo after"
                heard = asyncio.Event()

                async def progress(_value: float, _total: float | None, _message: str | None) -> None:
                    heard.set()

                call = asyncio.create_task(
                    client.call_tool("hands__Bash", {"command": command}, progress_callback=progress)
                )
                await heard.wait()
                await asyncio.to_thread(gateway.kill)
                await asyncio.to_thread(gateway.start)
                await asyncio.to_thread(gateway.wait_for_node, "hands")
                gate.touch()
                result = await call
                assert json.loads(text_of(result))["output"] == "before\nafter\n"

        run(act())


def test_a_missing_gateway_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farhand", "mcp", "--home", str(tmp_path)],
        input=b"",
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1 and b"no gateway is running" in done.stderr


def bridge(gateway: GatewayProcess, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    arguments = [sys.executable, "-m", "farhand", "mcp", "--home", str(gateway.home)]
    return subprocess.run(arguments, check=False, timeout=60, **streams)


def test_a_file_of_messages_is_answered_whole(shared_gateway: GatewayProcess, tmp_path: Path) -> None:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    messages = [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        listing(),
    ]
    (tmp_path / "said").write_text("".join(f"{json.dumps(message)}\n" for message in messages))
    with (tmp_path / "said").open() as said:
        done = bridge(shared_gateway, stdin=said, capture_output=True)
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, b"")
    assert [message["id"] for message in reported] == [0, 1] and all("result" in message for message in reported)


def test_without_anything_to_read_it_ends(shared_gateway: GatewayProcess) -> None:
    done = bridge(shared_gateway, stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_client_that_stops_reading_does_not_cause_a_crash(shared_gateway: GatewayProcess) -> None:
    pipe_out, pipe_in = os.pipe()
    os.close(pipe_out)
    asked = f"{json.dumps(listing())}\n".encode()
    try:
        done = bridge(shared_gateway, input=asked, stdout=pipe_in, stderr=subprocess.PIPE)
    finally:
        os.close(pipe_in)
    assert b"Traceback" not in done.stderr and done.returncode in (0, 141)


# -- by hand


def post(gateway: GatewayProcess, message: Any, session: str | None = None, **headers: str) -> Any:
    wanted = {**BOTH, **({"Mcp-Session-Id": session} if session else {}), **headers}
    return gateway.request("POST", "/mcp", message, headers=wanted)


def begin(gateway: GatewayProcess, version: str = "2025-11-25") -> str:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    answer = post(gateway, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
    assert answer.status == 200, answer
    assert answer.json()["result"]["protocolVersion"] == version
    return str(answer.headers["mcp-session-id"])


def listing(request_id: Any = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/list"}


def test_every_older_version_is_supported(shared_gateway: GatewayProcess) -> None:
    for version in ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"):
        session = begin(shared_gateway, version)
        answer = post(shared_gateway, listing(), session, **{"MCP-Protocol-Version": version})
        assert answer.status == 200 and answer.json()["result"]["tools"]
    params = {"protocolVersion": "1999-01-01", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
    answer = post(shared_gateway, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
    assert answer.json()["result"]["protocolVersion"] == "2025-11-25"


@pytest.mark.parametrize("reason", ["cancelled by its client: enough", "its client ended the session"])
def test_a_client_that_gave_up_a_request_is_not_answered(
    shared_gateway: GatewayProcess, hands: NodeProcess, reason: str
) -> None:
    session, mark = begin(shared_gateway), f"given-up-{uuid.uuid4().hex[:8]}"
    params = {"name": "hands__Bash", "arguments": {"command": f"touch {mark}; sleep 600"}}
    with ThreadPoolExecutor(1) as pool:
        call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
        asked = pool.submit(post, shared_gateway, call, session)
        wait_until((hands.workspace / mark).exists)
        if "enough" in reason:
            why = {"requestId": 7, "reason": "enough"}
            reported = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": why}
            assert post(shared_gateway, reported, session).status == 202
        else:
            assert shared_gateway.request("DELETE", "/mcp", headers={"Mcp-Session-Id": session}).status == 200
        answer = asked.result(60)
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
    assert answer.body == b""
    calls = shared_gateway.get("/v1/calls?tool=hands__Bash&limit=20")["calls"]
    (record,) = [call for call in calls if mark in call["args"]["command"]]
    assert record["state"] == "cancelled" and reason in record["error"]["message"]


def test_a_session_is_required_belongs_to_its_creator_and_ends(shared_gateway: GatewayProcess) -> None:
    assert post(shared_gateway, listing()).status == 400
    assert post(shared_gateway, listing(), "0" * 32 + "-" + "0" * 32).status == 404
    session = begin(shared_gateway)
    assert post(shared_gateway, listing(), session).status == 200
    assert post(shared_gateway, {"jsonrpc": "2.0", "method": "notifications/initialized"}, session).status == 202
    other = shared_gateway.request("POST", "/v1/tokens", {"label": "o"}).json()["token"]
    stolen = shared_gateway.request("POST", "/mcp", listing(), headers={**BOTH, "Mcp-Session-Id": session}, token=other)
    assert stolen.status == 404
    assert shared_gateway.request("DELETE", "/mcp", headers={"Mcp-Session-Id": session}).status == 200
    assert post(shared_gateway, listing(), session).status == 404
    assert shared_gateway.request("DELETE", "/mcp", headers={"Mcp-Session-Id": session}).status == 404


def protocol(version: str) -> dict[str, str]:
    """2025-03-26 has no header for the version yet."""
    return {"MCP-Protocol-Version": version} if version > "2025-03-26" else {}


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25"])
def test_a_lost_stream_is_resumed_even_after_a_restart(tmp_path: Path, version: str) -> None:
    with GatewayProcess(tmp_path / "home") as gateway, NodeProcess(gateway, tmp_path, "hands") as node:
        session = begin(gateway, version)
        gate = node.workspace / "gate"
        command = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo through"
        params = {"name": "hands__Bash", "arguments": {"command": command}}
        headers = {
            **BOTH,
            "Authorization": f"Bearer {gateway.token}",
            "Mcp-Session-Id": session,
            **protocol(version),
        }
        message = {"jsonrpc": "2.0", "id": "seven", "method": "tools/call", "params": params}
        with (
            httpx2.Client(headers=headers, timeout=30) as http,
            http.stream("POST", f"{gateway.url}/mcp", json=message) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            place = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
            data = next(line for line in lines if line.startswith("data:")).removeprefix("data:").strip()
        if version < "2025-11-25":  # its clients take every event for a message
            asked = json.loads(data)
            assert asked["method"] == "ping"
            reply = post(gateway, {"jsonrpc": "2.0", "id": asked["id"], "result": {}}, session, **protocol(version))
            assert (reply.status, reply.body) == (202, b"")
        else:
            assert data == ""
        gateway.kill()
        gateway.start()
        gateway.wait_for_node("hands")
        gate.touch()
        with (
            httpx2.Client(headers={**headers, "Last-Event-ID": place}, timeout=30) as http,
            http.stream("GET", f"{gateway.url}/mcp") as answer,
        ):
            data = next(line for line in answer.iter_lines() if line.startswith("data: {"))
        reported = json.loads(data.removeprefix("data: "))
        assert reported["id"] == "seven"
        assert json.loads(reported["result"]["content"][0]["text"])["output"] == "through\n"
        other = gateway.request("POST", "/v1/tokens", {"label": "o"}).json()["token"]
        stranger = {"Accept": "text/event-stream", "Last-Event-ID": place, "Mcp-Session-Id": session}
        assert gateway.request("GET", "/mcp", headers=stranger, token=other).status == 404


@pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25"])
def test_every_event_of_a_stream_has_an_id_and_the_answer_can_be_fetched_again(
    shared_gateway: GatewayProcess, hands: NodeProcess, version: str
) -> None:
    session = begin(shared_gateway, version)
    command = "for i in 1 2 3; do echo step $i; sleep 0.5; done"
    params = {"name": "hands__Bash", "arguments": {"command": command}, "_meta": {"progressToken": "p"}}
    message = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": params}
    answer = post(shared_gateway, message, session, **protocol(version))
    events = [block for block in answer.body.decode().split("\n\n") if "data:" in block]
    assert len(events) >= 2 and all(block.startswith("id: ") for block in events)
    place = events[0].partition("\n")[0].removeprefix("id: ")
    again = {"Accept": "text/event-stream", "Last-Event-ID": place, "Mcp-Session-Id": session, **protocol(version)}
    replayed = shared_gateway.request("GET", "/mcp", headers=again)
    assert replayed.status == 200
    assert replayed.body.decode().partition("data: ")[2].strip() == events[-1].partition("data: ")[2].strip()


def modern(method: str, params: dict[str, Any] | None = None, version: str = "2026-07-28") -> dict[str, Any]:
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**(params or {}), "_meta": meta}}


def test_the_rules_of_requests_that_stand_alone(shared_gateway: GatewayProcess) -> None:
    version = {"MCP-Protocol-Version": "2026-07-28"}
    listed = post(shared_gateway, modern("tools/list"), **version, **{"Mcp-Method": "tools/list"})
    assert listed.status == 200 and "mcp-session-id" not in listed.headers
    assert {"resultType", "ttlMs", "cacheScope", "tools"} <= listed.json()["result"].keys()
    call = modern("tools/call", {"name": "gsv__ReadFile", "arguments": {}})
    fine = {**version, "Mcp-Method": "tools/call", "Mcp-Name": "=?base64?Z3N2X19SZWFkRmlsZQ==?="}
    assert post(shared_gateway, call, **fine).json()["result"]["isError"] is False
    for message, headers, status, code in [
        (modern("tools/list"), {**version, "Mcp-Method": "tools/call"}, 400, -32020),
        (modern("tools/list"), version, 400, -32020),
        (call, {**version, "Mcp-Method": "tools/call", "Mcp-Name": "other"}, 400, -32020),
        (listing(), {**version, "Mcp-Method": "tools/list"}, 400, -32602),
        (modern("nothing/here"), {**version, "Mcp-Method": "nothing/here"}, 404, -32601),
        (
            modern("tools/list", version="2030-01-01"),
            {"MCP-Protocol-Version": "2030-01-01", "Mcp-Method": "tools/list"},
            400,
            -32022,
        ),
    ]:
        answer = post(shared_gateway, message, **headers)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code), answer
        assert answer.json()["id"] == 1
    for method in ("GET", "DELETE"):
        assert shared_gateway.request(method, "/mcp", headers={**version, "Accept": "text/event-stream"}).status == 405
    assert post(shared_gateway, {"jsonrpc": "2.0", "method": "notifications/x"}, **version).status == 202


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"\xff", -32700),
        (b"[]", -32600),
        (b"7", -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[1]}', -32600),
        (b"[" * 100_000, -32600),
    ],
)
def test_an_invalid_message_is_refused(shared_gateway: GatewayProcess, body: bytes, code: int) -> None:
    answer = shared_gateway.request("POST", "/mcp", body, headers=BOTH)
    assert (answer.status, answer.json()["error"]["code"]) == (400, code), answer


@pytest.mark.parametrize(
    "arguments", ['{"path": 1e999}', '{"path": %s}' % ("9" * 400), '{{"path": {}1{}}}'.format("[" * 600, "]" * 600)]
)
def test_arguments_that_cannot_be_represented_are_invalid(
    shared_gateway: GatewayProcess, hands: NodeProcess, arguments: str
) -> None:
    session = begin(shared_gateway)
    head = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"hands__Read","arguments":'
    answer = post(shared_gateway, f"{head}{arguments}}}}}".encode(), session)
    assert answer.status in (200, 400), answer
    reported = answer.json()
    assert "error" in reported or reported["result"]["isError"] is True, reported
    body = f'{{"tool": "hands__Read", "args": {arguments}}}'.encode()
    invoked = shared_gateway.request("POST", "/v1/tools/invoke", body)
    assert (invoked.status, invoked.json()["error"]["kind"]) == (200, "invalid_args"), invoked


def test_strangers_and_other_pages_are_kept_out(shared_gateway: GatewayProcess) -> None:
    stranger = shared_gateway.request("POST", "/mcp", listing(), headers=BOTH, token=None)
    assert stranger.status == 401 and stranger.headers["www-authenticate"].startswith("Bearer resource_metadata=")
    page = post(shared_gateway, listing(), Origin="https://evil.example")
    assert page.status == 403
    assert post(shared_gateway, listing(), Host="evil.example").status == 403
    plain = {**BOTH, "Content-Type": "text/plain"}
    assert shared_gateway.request("POST", "/mcp", listing(), headers=plain).status == 415
    session = begin(shared_gateway)
    picky = {"Accept": "text/html", "Mcp-Session-Id": session}
    assert shared_gateway.request("POST", "/mcp", listing(), headers={**BOTH, **picky}).status == 406
    assert shared_gateway.request("GET", "/mcp", headers=picky).status == 406
