"""A call from `POST /v1/tools/invoke` to its single, correct end, through every fault in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import GatewayProcess, PlainNode, Plugin, Proxy, hello_frame, wait_until

UNKNOWN = "outcome unknown:"


@pytest.fixture(scope="module")
def worker(shared_gateway: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    with Plugin(shared_gateway, tmp_path_factory.mktemp("worker"), "worker") as plugin:
        yield plugin


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def record(gateway: GatewayProcess, call_id: str) -> Any:
    return gateway.get(f"/v1/calls/{call_id}")


def ended(gateway: GatewayProcess, call_id: str, seconds: float = 20) -> Any:
    """The record of a call once it has ended."""

    def over() -> Any:
        found = record(gateway, call_id)
        return found if found["state"] != "running" else None

    return wait_until(over, seconds, f"the end of call {call_id}")


def in_background(gateway: GatewayProcess, tool: str, args: Any, **more: Any) -> str:
    answer = gateway.invoke(tool, args, background=True, **more)
    assert answer["state"] == "running", answer
    return str(answer["request_id"])


def started(plugin: Plugin, call_id: str) -> None:
    wait_until(lambda: plugin.steps(call_id), 15, f"the start of call {call_id}")


def still_open(future: Future[Any]) -> bool:
    time.sleep(0.2)
    return not future.done()


# -- the envelope ----------------------------------------------------------------------------------------------


def test_envelope_of_a_success(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    body = {"tool": "worker.echo", "args": {"text": "ab", "count": 2}, "session_key": "s1", "agent_id": "main"}
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body)
    assert answer.status == 200
    envelope = answer.json()
    assert set(envelope) - {"state"} == {"request_id", "ok", "route", "result", "duration_ms"}
    assert envelope["ok"] is True
    assert envelope["route"] == {"kind": "node", "node_id": "worker", "capability": "worker"}
    assert envelope["result"] == {"text": "abab", "session": "s1"}
    assert isinstance(envelope["duration_ms"], int) and envelope["duration_ms"] >= 0
    assert answer.headers["x-request-id"] == envelope["request_id"]


@pytest.mark.parametrize(
    ("tool", "kind", "text"),
    [("worker.denied", "not_allowed", "TCC denied access to Notes"), ("worker.crash", "failed", "boom")],
)
def test_envelope_of_a_failure_is_200(
    shared_gateway: GatewayProcess, worker: Plugin, tool: str, kind: str, text: str
) -> None:
    envelope = shared_gateway.invoke(tool, {})
    assert set(envelope) - {"state"} == {"request_id", "ok", "route", "error", "duration_ms"}
    assert envelope["ok"] is False
    assert envelope["route"]["kind"] == "node"
    assert set(envelope["error"]) == {"kind", "message"}
    assert envelope["error"]["kind"] == kind and text in envelope["error"]["message"]


def test_null_result_is_there(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "nuller", ["nuller"]) as node:
            task = asyncio.create_task(shared_gateway.ainvoke("nuller.x"))
            await node.answer(await node.receive("tool_request"), None)
            return await task

    envelope = asyncio.run(scenario())
    assert "result" in envelope and envelope["result"] is None
    assert record(shared_gateway, envelope["request_id"])["result"] is None


@pytest.mark.parametrize(
    "tool", ["nobody.serves.this", "nonode__Bash", "worker__Nope", "__x", "x__", "workerx.echo", "."]
)
def test_unknown_tool_or_node_is_not_found(shared_gateway: GatewayProcess, worker: Plugin, tool: str) -> None:
    envelope = shared_gateway.invoke(tool, {})
    assert envelope["ok"] is False and envelope["error"]["kind"] == "not_found"
    assert envelope["route"] == {"kind": "unknown"}
    assert record(shared_gateway, envelope["request_id"])["state"] == "error"


def test_call_of_a_node_that_is_offline_did_not_run(shared_gateway: GatewayProcess) -> None:
    async def join_and_leave() -> None:
        async with PlainNode.connect(shared_gateway, "away", ["away"]):
            pass

    asyncio.run(join_and_leave())
    shared_gateway.wait_for_node("away", online=False)
    envelope = shared_gateway.invoke("away__away.x")
    assert envelope["error"]["kind"] == "failed" and "did not run" in envelope["error"]["message"]
    assert envelope["route"] == {"kind": "node", "node_id": "away"}


def test_dotted_tool_by_the_name_of_its_node(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    envelope = shared_gateway.invoke("worker__worker.echo", {"text": "x"})
    assert envelope["ok"] is True and envelope["route"]["node_id"] == "worker"


def test_tools_are_listed_with_their_schema(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    tools = {tool["name"]: tool for tool in shared_gateway.get("/v1/tools?agent=main")["tools"]}
    echo = tools["worker.echo"]
    assert set(echo) >= {"name", "description", "parameters", "host"}
    assert echo["description"] == "Repeat a text." and echo["host"] == "worker"
    assert echo["parameters"]["required"] == ["text"]
    assert echo["parameters"]["properties"]["count"]["type"] == "integer"


# -- routing -----------------------------------------------------------------------------------------------------


def test_longest_capability_wins(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> None:
        async with (
            PlainNode.connect(shared_gateway, "r-a", ["route"]) as short,
            PlainNode.connect(shared_gateway, "r-z", ["route.long"]) as long,
        ):
            for tool, node in (
                ("route.long", long),
                ("route.long.x", long),
                ("route.longer", short),
                ("route.x", short),
            ):
                task = asyncio.create_task(shared_gateway.ainvoke(tool))
                await node.answer(await node.receive("tool_request"), tool)
                assert (await task)["result"] == tool

    asyncio.run(scenario())


def test_capability_matches_whole_segments_only(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> None:
        async with PlainNode.connect(shared_gateway, "segment", ["seg.ment"]):
            for tool in ("seg.men", "seg.ments", "seg", "ment"):
                assert (await shared_gateway.ainvoke(tool))["error"]["kind"] == "not_found"

    asyncio.run(scenario())


def test_fewest_running_calls_then_smallest_id(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> None:
        async with (
            PlainNode.connect(shared_gateway, "even-b", ["even"]) as b,
            PlainNode.connect(shared_gateway, "even-a", ["even"]) as a,
        ):
            first = asyncio.create_task(shared_gateway.ainvoke("even.x"))
            on_a = await a.receive("tool_request")  # the smallest id
            second = asyncio.create_task(shared_gateway.ainvoke("even.x"))
            on_b = await b.receive("tool_request")  # a is busy
            await a.answer(on_a, "a")
            assert (await first)["route"]["node_id"] == "even-a"
            third = asyncio.create_task(shared_gateway.ainvoke("even.x"))
            await a.answer(await a.receive("tool_request"), "a again")  # now b is
            assert (await third)["route"]["node_id"] == "even-a"
            await b.answer(on_b, "b")
            assert (await second)["route"]["node_id"] == "even-b"

    asyncio.run(scenario())


def test_names_are_found_in_any_casing(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    assert shared_gateway.invoke("WORKER.Echo", {"text": "x"})["result"]["text"] == "x"

    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "caser", ["MixedCase"]) as node:
            task = asyncio.create_task(shared_gateway.ainvoke("mixedcase.X"))
            await node.answer(await node.receive("tool_request"), 1)
            return await task

    assert asyncio.run(scenario())["ok"] is True


def test_another_node_takes_over_when_the_first_has_left(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "over-b", ["over"]) as stays:
            async with PlainNode.connect(shared_gateway, "over-a", ["over"]):
                pass
            await asyncio.to_thread(shared_gateway.wait_for_node, "over-a", online=False)
            task = asyncio.create_task(shared_gateway.ainvoke("over.x"))
            await stays.answer(await stays.receive("tool_request"), 1)
            return await task

    assert asyncio.run(scenario())["route"]["node_id"] == "over-b"


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "until"),
        (None, "until"),
        ({"until": 5}, "until"),
        ({"until": "x", "stubborn": "yes"}, "stubborn"),
        ([1], "object"),
    ],
)
def test_arguments_that_do_not_fit_the_schema(
    shared_gateway: GatewayProcess, worker: Plugin, args: Any, named: str
) -> None:
    envelope = shared_gateway.invoke("worker.hold", args)
    assert envelope["error"]["kind"] == "invalid_args"
    assert named in envelope["error"]["message"]
    assert worker.steps(envelope["request_id"]) == []


def test_oversize_request_to_a_plain_node_is_answered_and_not_sent(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> tuple[Any, Any]:
        async with PlainNode.connect(shared_gateway, "small", ["small"]) as node:
            task = asyncio.create_task(shared_gateway.ainvoke("small.x", {"text": "x" * (250 * 1024)}))
            fits = await node.receive("tool_request")
            await node.answer(fits, "fits")
            assert (await task)["result"] == "fits"
            refused = await shared_gateway.ainvoke("small.x", {"text": "x" * (256 * 1024)})
            await node.send({"type": "ping", "timestamp": 1})
            return refused, await node.receive()

    refused, next_frame = asyncio.run(scenario())
    assert refused["error"]["kind"] == "invalid_args"
    assert str(256 * 1024) in refused["error"]["message"]
    assert next_frame["type"] == "pong", "nothing was sent"


def test_oversize_request_to_a_plugin_is_answered(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    envelope = shared_gateway.invoke("worker.echo", {"text": "x" * (300 * 1024)})
    assert envelope["error"]["kind"] == "invalid_args" and str(256 * 1024) in envelope["error"]["message"]


@pytest.mark.parametrize("size", [1_000_000, 10 * 1024 * 1024])
def test_large_results_come_through(shared_gateway: GatewayProcess, worker: Plugin, size: int) -> None:
    envelope = shared_gateway.invoke("worker.blob", {"size": size}, timeout=60)
    assert envelope["result"] == "x" * size
    assert len(record(shared_gateway, envelope["request_id"])["result"]) == size


# -- stopping ----------------------------------------------------------------------------------------------------


def test_timeout_reaches_the_node(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    envelope = shared_gateway.invoke("worker.hold", {"until": "never"}, timeout_ms=300)
    assert envelope["error"]["kind"] == "timeout"
    assert "0.3 s" in envelope["error"]["message"]
    assert 300 <= envelope["duration_ms"] < 10_000
    assert record(shared_gateway, envelope["request_id"])["state"] == "timeout"
    assert worker.steps(envelope["request_id"]) == ["start", "cancel"]


def test_timeout_of_a_tool_that_does_not_listen(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    began = time.monotonic()
    envelope = shared_gateway.invoke("worker.hold", {"until": "never", "stubborn": True}, timeout_ms=200)
    assert envelope["error"]["kind"] == "timeout"
    assert time.monotonic() - began < 60
    assert "cancel" in worker.steps(envelope["request_id"])


def test_answer_after_the_timeout_changes_nothing(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "slowpoke", ["slowpoke"]) as node:
            envelope = await shared_gateway.ainvoke("slowpoke.x", timeout_ms=200)
            await node.answer(await node.receive("tool_request"), "too late")
            await node.send({"type": "ping", "timestamp": 1})
            await node.receive("pong")
            return envelope

    envelope = asyncio.run(scenario())
    assert envelope["error"]["kind"] == "timeout"
    found = record(shared_gateway, envelope["request_id"])
    assert found["state"] == "timeout" and "result" not in found


@pytest.mark.parametrize("timeout_ms", [0, -1, 10**12, 1.5, "100"])
def test_timeout_that_cannot_be_is_400(shared_gateway: GatewayProcess, worker: Plugin, timeout_ms: Any) -> None:
    body = {"tool": "worker.echo", "args": {"text": "x"}, "timeout_ms": timeout_ms}
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body)
    assert answer.status == 400 and "timeout_ms" in answer.json()["error"]["message"]


def test_timeout_may_be_null(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    assert shared_gateway.invoke("worker.echo", {"text": "x"}, timeout_ms=None)["ok"] is True


def test_delete_cancels_on_the_node(
    shared_gateway: GatewayProcess, worker: Plugin, threads: ThreadPoolExecutor
) -> None:
    call_id = in_background(shared_gateway, "worker.hold", {"until": "never"})
    started(worker, call_id)
    answer = shared_gateway.request("DELETE", f"/v1/calls/{call_id}")
    assert answer.status == 200 and answer.json()["state"] == "cancelled"
    assert worker.steps(call_id) == ["start", "cancel"]
    found = record(shared_gateway, call_id)
    assert found["state"] == "cancelled" and found["error"]["kind"] == "cancelled"


def test_caller_of_a_cancelled_call_is_notified(
    shared_gateway: GatewayProcess, worker: Plugin, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(shared_gateway.invoke, "worker.hold", {"until": "never"}, session_key="told")
    found = wait_until(lambda: shared_gateway.get("/v1/calls?session_key=told&state=running")["calls"], 10, "the call")
    shared_gateway.request("DELETE", f"/v1/calls/{found[0]['id']}")
    assert waiting.result(60)["error"]["kind"] == "cancelled"


def test_delete_of_an_ended_call_leaves_it(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    call_id = shared_gateway.invoke("worker.effect", {"text": "kept"})["request_id"]
    answer = shared_gateway.request("DELETE", f"/v1/calls/{call_id}")
    assert answer.status == 200
    assert answer.json()["state"] == record(shared_gateway, call_id)["state"] == "ok"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_unknown_call_is_404(shared_gateway: GatewayProcess, method: str) -> None:
    answer = shared_gateway.request(method, "/v1/calls/no-such-call")
    assert answer.status == 404 and answer.json()["error"]["code"] == "not_found"


def send_and_leave(gateway: GatewayProcess, body: dict[str, Any], leave_when: Any, *headers: str) -> None:
    """POST a call on a raw socket and close it once `leave_when()` is true."""
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/tools/invoke HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {gateway.token}",
        f"Content-Length: {len(data)}",
        *headers,
        "",
        "",
    ]
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall("\r\n".join(lines).encode() + data)
        wait_until(leave_when, 15, "the moment to hang up")


def test_hang_up_of_the_client_reaches_the_node(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    before = len(worker.started())
    body = {"tool": "worker.hold", "args": {"until": "never"}}
    send_and_leave(shared_gateway, body, lambda: len(worker.started()) > before)
    call_id = worker.started(before + 1)[-1]
    found = ended(shared_gateway, call_id)
    assert found["state"] == "cancelled" and "disconnected" in found["error"]["message"]
    assert worker.steps(call_id) == ["start", "cancel"]


def test_hang_up_with_a_key_lets_the_call_continue(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    before = len(worker.started())
    body = {"tool": "worker.hold", "args": {"until": "keyed"}}
    send_and_leave(shared_gateway, body, lambda: len(worker.started()) > before, "Idempotency-Key: hang-up-and-return")
    call_id = worker.started(before + 1)[-1]
    worker.release("keyed")
    envelope = shared_gateway.invoke(
        "worker.hold", {"until": "keyed"}, headers={"Idempotency-Key": "hang-up-and-return"}
    )
    assert envelope["request_id"] == call_id and envelope["ok"] is True
    assert worker.steps(call_id) == ["start", "end"]


def test_background_answers_at_once(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    envelope = shared_gateway.invoke("worker.hold", {"until": "background"}, background=True)
    assert envelope["state"] == "running"
    call_id = envelope["request_id"]
    assert record(shared_gateway, call_id)["state"] == "running"
    assert "result" not in envelope and "error" not in envelope
    worker.release("background")
    assert ended(shared_gateway, call_id)["result"] == {"call": call_id, "until": "background"}


def test_background_call_that_cannot_start_says_so(shared_gateway: GatewayProcess) -> None:
    envelope = shared_gateway.invoke("nobody.here", {}, background=True)
    assert envelope["ok"] is False and envelope["error"]["kind"] == "not_found" and envelope["state"] == "error"


# -- limits --------------------------------------------------------------------------------------------------------


def test_slots_of_calls_that_were_given_up_are_free_again(
    shared_gateway: GatewayProcess, threads: ThreadPoolExecutor
) -> None:
    async def scenario() -> tuple[list[str], Any]:
        async with PlainNode.connect(shared_gateway, "leaky", ["leaky"]) as node:

            def give_up(_: int) -> str:
                return str(shared_gateway.invoke("leaky.x", timeout_ms=20)["error"]["kind"])

            kinds = await asyncio.to_thread(lambda: list(threads.map(give_up, range(300))))
            task = asyncio.create_task(shared_gateway.ainvoke("leaky.last"))
            while (request := await node.receive("tool_request"))["tool"] != "leaky.last":
                pass
            await node.answer(request, "free")
            return kinds, await task

    kinds, last = asyncio.run(scenario())
    assert set(kinds) == {"timeout"}
    assert last["result"] == "free"


def test_node_with_too_many_open_calls_is_busy(
    shared_gateway: GatewayProcess, worker: Plugin, threads: ThreadPoolExecutor
) -> None:
    async def scenario() -> Any:
        async with PlainNode.connect(shared_gateway, "flooded", ["flooded"]):

            def flood() -> Any:
                list(threads.map(lambda _: in_background(shared_gateway, "flooded.x", None), range(256)))
                refused = shared_gateway.invoke("flooded.x")
                assert shared_gateway.invoke("worker.echo", {"text": "x"})["ok"] is True
                return refused

            return await asyncio.to_thread(flood)

    refused = asyncio.run(scenario())
    assert refused["error"]["kind"] == "failed"
    assert "busy" in refused["error"]["message"] and "did not run" in refused["error"]["message"]


def test_node_that_stops_reading_does_not_block_others(
    shared_gateway: GatewayProcess, worker: Plugin, threads: ThreadPoolExecutor
) -> None:
    """Its buffers are full, yet its calls end at their deadline and other nodes' calls are served."""

    async def scenario() -> tuple[list[Any], Any, float]:
        with Proxy(shared_gateway.port) as proxy:
            async with PlainNode.connect(shared_gateway, "stuck", ["stuck"], port=proxy.port):
                proxy.freeze()
                began = time.monotonic()
                calls = [
                    threads.submit(shared_gateway.invoke, "stuck.x", "x" * 200_000, timeout_ms=1500, timeout=60)
                    for _ in range(60)
                ]
                other = await shared_gateway.ainvoke("worker.echo", {"text": "x"})
                envelopes = await asyncio.to_thread(lambda: [call.result() for call in calls])
                return envelopes, other, time.monotonic() - began

    envelopes, other, seconds = asyncio.run(scenario())
    assert other["ok"] is True
    assert {envelope["error"]["kind"] for envelope in envelopes} == {"timeout"}
    assert seconds < 20


def test_memory_of_large_calls_is_released(gateway: GatewayProcess) -> None:
    """Neither an answer its caller waited for nor arguments that were refused stay in memory."""
    large = "x" * 4_000_000

    def resident() -> int:
        text = Path(f"/proc/{gateway.process.pid}/status").read_text() if gateway.process else ""
        return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024

    async def growth(turn: Any) -> int:
        for _ in range(4):
            await turn()
        before = resident()
        for _ in range(16):
            await turn()
        return resident() - before

    async def scenario() -> list[int]:
        async with PlainNode.connect(gateway, "large", ["large"]) as node:

            async def answered() -> None:
                call = asyncio.create_task(gateway.ainvoke("large.x"))
                request = await node.receive("tool_request")
                await asyncio.sleep(0.1)  # long enough for the gateway to look whether the caller is still there
                await node.answer(request, large)
                assert (await call)["ok"] is True

            async def refused() -> None:
                assert (await gateway.ainvoke("nobody.x", large))["error"]["kind"] == "not_found"

            return [await growth(answered), await growth(refused)]

    assert max(asyncio.run(scenario())) < 8 * len(large)


# -- the idempotency key -----------------------------------------------------------------------------------------


def test_same_key_same_outcome(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    key = {"Idempotency-Key": "once"}
    first = shared_gateway.invoke("worker.effect", {"text": "a"}, headers=key)
    again = shared_gateway.invoke("worker.effect", {"text": "a"}, headers=key)
    assert again == first and first["result"]["text"] == "a"
    assert worker.steps(first["request_id"]) == ["start", "end"]


def test_same_key_at_the_same_time_runs_once(
    shared_gateway: GatewayProcess, worker: Plugin, threads: ThreadPoolExecutor
) -> None:
    before = set(worker.started())
    calls = [
        threads.submit(
            shared_gateway.invoke, "worker.hold", {"until": "together"}, headers={"Idempotency-Key": "together"}
        )
        for _ in range(16)
    ]
    wait_until(lambda: set(worker.started()) - before, 15, "the call")
    assert not any(call.done() for call in calls)
    worker.release("together")
    envelopes = [call.result(60) for call in calls]
    assert len({envelope["request_id"] for envelope in envelopes}) == 1
    assert all(envelope["ok"] for envelope in envelopes)
    assert len(set(worker.started()) - before) == 1


def test_same_key_with_another_body_is_a_conflict(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    key = {"Idempotency-Key": "conflict"}
    first = shared_gateway.invoke("worker.effect", {"text": "a"}, headers=key)
    for body in ({"tool": "worker.effect", "args": {"text": "b"}}, {"tool": "worker.echo", "args": {"text": "a"}}):
        answer = shared_gateway.request("POST", "/v1/tools/invoke", body, headers=key)
        assert answer.status == 409 and answer.json()["error"]["code"] == "idempotency_conflict"
    assert shared_gateway.invoke("worker.effect", {"text": "a"}, headers=key) == first


def test_same_key_with_the_same_arguments_written_otherwise_is_the_same(
    shared_gateway: GatewayProcess, worker: Plugin
) -> None:
    key = {"Idempotency-Key": "otherwise"}
    texts = (
        b'{"tool": "worker.effect", "args": {"text": "a"}}',
        b'{"args":{"text":"\\u0061"},"tool":"worker.effect"}',
    )
    first, second = (shared_gateway.request("POST", "/v1/tools/invoke", text, headers=key).json() for text in texts)
    assert first == second and first["ok"] is True
    assert worker.steps(first["request_id"]) == ["start", "end"]


def test_same_key_after_a_failure_gives_that_failure(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    key = {"Idempotency-Key": "denied"}
    first = shared_gateway.invoke("worker.denied", {}, headers=key)
    assert first["error"]["kind"] == "not_allowed"
    assert shared_gateway.invoke("worker.denied", {}, headers=key) == first


def test_keys_of_two_credentials_are_apart(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    token = shared_gateway.request("POST", "/v1/tokens", {"label": "other caller"}).json()["token"]
    key = {"Idempotency-Key": "mine"}
    body = {"tool": "worker.effect", "args": {"text": "a"}}
    mine = shared_gateway.request("POST", "/v1/tools/invoke", body, headers=key).json()
    theirs = shared_gateway.request("POST", "/v1/tools/invoke", body, headers=key, token=token).json()
    assert mine["request_id"] != theirs["request_id"]


@pytest.mark.parametrize("key", ["", "x" * 257])
def test_key_of_no_or_too_great_length_is_400(shared_gateway: GatewayProcess, worker: Plugin, key: str) -> None:
    body = {"tool": "worker.effect", "args": {}}
    answer = shared_gateway.request("POST", "/v1/tools/invoke", body, headers={"Idempotency-Key": key})
    assert answer.status == 400 and "Idempotency-Key" in answer.json()["error"]["message"]


def test_same_key_after_a_restart_gives_the_first_outcome(gateway: GatewayProcess, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "across"}
    with Plugin(gateway, tmp_path, "w") as plugin:
        first = gateway.invoke("w.effect", {"text": "a"}, headers=key)
        gateway.stop()
        gateway.start()
        gateway.wait_for_node("w")
        assert gateway.invoke("w.effect", {"text": "a"}, headers=key) == first
        assert plugin.steps(first["request_id"]) == ["start", "end"]


# -- the record --------------------------------------------------------------------------------------------------


def test_record_of_a_call(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    before = time.time() * 1000 - 2000  # the gateway's clock may differ a little
    call_id = shared_gateway.invoke("worker.effect", {"text": "ä"}, session_key="rec", agent_id="main")["request_id"]
    found = record(shared_gateway, call_id)
    assert found["id"] == call_id and found["tool"] == "worker.effect" and found["state"] == "ok"
    assert found["args"] == {"text": "ä"} and found["result"] == {"call": call_id, "text": "ä"}
    assert found["route"] == {"kind": "node", "node_id": "worker", "capability": "worker"}
    assert found["session_key"] == "rec" and found["agent_id"] == "main"
    assert before <= found["created_at"] <= found["ended_at"] <= time.time() * 1000 + 2000


def test_calls_are_listed_newest_first(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    ids = [shared_gateway.invoke("worker.effect", {}, session_key="order")["request_id"] for _ in range(5)]
    listed = shared_gateway.get("/v1/calls?session_key=order")
    assert [call["id"] for call in listed["calls"]] == ids[::-1]
    assert listed["count"] == 5
    page = shared_gateway.get("/v1/calls?session_key=order&limit=2")["calls"]
    assert [call["id"] for call in page] == ids[:2:-1]
    rest = shared_gateway.get(f"/v1/calls?session_key=order&before={page[-1]['id']}")["calls"]
    assert [call["id"] for call in rest] == ids[2::-1]


def test_list_has_bodies_as_far_as_they_fit(shared_gateway: GatewayProcess, worker: Plugin) -> None:
    """However much the calls brought, a list of them is an answer that can be held; each call by itself is whole."""
    size = 20_000_000
    ids = [
        shared_gateway.invoke(tool, args, session_key="heavy")["request_id"]
        for tool, args in [("worker.effect", {}), ("worker.blob", {"size": size}), ("worker.blob", {"size": size})]
    ]
    newest, second, small = shared_gateway.get("/v1/calls?session_key=heavy")["calls"]
    assert [newest["id"], second["id"], small["id"]] == ids[::-1]
    assert len(newest["result"]) == size and newest["args"] == {"size": size}
    assert "result" not in second and "args" not in second and second["state"] == "ok"
    assert small["result"]["call"] == ids[0]
    assert len(record(shared_gateway, ids[1])["result"]) == size
    bare = shared_gateway.get("/v1/calls?session_key=heavy&bodies=0")["calls"]
    assert [call["id"] for call in bare] == ids[::-1] and not any({"args", "result"} & call.keys() for call in bare)


def test_pages_have_every_call_once_however_long_each_took(shared_gateway: GatewayProcess) -> None:
    """A read-only call is written down at its end, so behind those that were made after it."""
    extras = {"features": ["tools"], "tools": [{"name": "paged.look", "read_only": True}, {"name": "paged.act"}]}

    def pages(size: int) -> list[list[str]]:
        found: list[list[str]] = []
        while not found or found[-1]:
            before = f"&before={found[-1][-1]}" if found else ""
            listed = shared_gateway.get(f"/v1/calls?session_key=paged&limit={size}{before}")["calls"]
            found.append([call["id"] for call in listed])
        return found[:-1]

    async def scenario() -> tuple[list[str], list[list[str]], list[list[str]]]:
        async with PlainNode.connect(shared_gateway, "paged", hello=False) as node:
            await node.send(hello_frame("paged", ["paged"], farhand=extras))
            await node.receive("gateway_welcome")

            async def made(tool: str) -> tuple[asyncio.Task[Any], Any]:
                call = asyncio.create_task(shared_gateway.ainvoke(tool, {}, session_key="paged"))
                return call, await node.receive("tool_request")

            slow, question = await made("paged.look")
            ids = [question["request_id"]]
            for _ in range(5):
                quick, request = await made("paged.act")
                await node.answer(request, None)
                ids.append((await quick)["request_id"])
            meanwhile = await asyncio.to_thread(pages, 2)
            await node.answer(question, None)
            await slow
            return ids[::-1], meanwhile, await asyncio.to_thread(pages, 2)

    newest, meanwhile, afterwards = asyncio.run(scenario())
    assert meanwhile == afterwards == [newest[:2], newest[2:4], newest[4:]]


@pytest.mark.parametrize(
    "query",
    [
        "session_key=filter&state=error",
        "session_key=filter&tool=worker.denied",
        "state=error&node_id=worker&tool=worker.denied&session_key=filter",
    ],
)
def test_calls_are_filtered(shared_gateway: GatewayProcess, worker: Plugin, query: str) -> None:
    shared_gateway.invoke("worker.effect", {}, session_key="filter")
    denied = shared_gateway.invoke("worker.denied", {}, session_key="filter")["request_id"]
    calls = shared_gateway.get(f"/v1/calls?{query}")["calls"]
    assert calls[0]["id"] == denied
    assert {call["tool"] for call in calls} == {"worker.denied"}


@pytest.mark.parametrize(
    "query", ["state=nonsense", "limit=0", "limit=x", "limit=1001", "limit=-1", "limit=--1", "limit=²"]
)
def test_filter_that_cannot_be_is_400(shared_gateway: GatewayProcess, query: str) -> None:
    from urllib.parse import quote

    answer = shared_gateway.request("GET", f"/v1/calls?{quote(query, safe='=')}")
    assert answer.status == 400 and query.partition("=")[0] in answer.json()["error"]["message"]


# -- a plain node is lost --------------------------------------------------------------------------------------------


def test_plain_node_lost_mid_call_ends_it_at_once_as_unknown(shared_gateway: GatewayProcess) -> None:
    async def scenario() -> tuple[Any, float]:
        async with PlainNode.connect(shared_gateway, "fragile", ["fragile"]) as node:
            task = asyncio.create_task(shared_gateway.ainvoke("fragile.x"))
            await node.receive("tool_request")
            began = time.monotonic()
        return await task, time.monotonic() - began

    envelope, seconds = asyncio.run(scenario())
    assert envelope["error"]["kind"] == "failed" and envelope["error"]["message"].startswith(UNKNOWN)
    assert seconds < 10
    assert record(shared_gateway, envelope["request_id"])["state"] == "unknown"


def test_plain_node_open_when_the_gateway_is_killed_is_unknown(gateway: GatewayProcess) -> None:
    async def scenario() -> str:
        async with PlainNode.connect(gateway, "fragile", ["fragile"]) as node:
            call_id = await asyncio.to_thread(in_background, gateway, "fragile.x", {})
            await node.receive("tool_request")
            await asyncio.to_thread(gateway.kill)
            return call_id

    call_id = asyncio.run(scenario())
    gateway.start()
    found = ended(gateway, call_id)
    assert found["state"] == "unknown" and found["error"]["message"].startswith(UNKNOWN)


# -- a node that can resume is lost ------------------------------------------------------------------------------------


@pytest.fixture
def proxied(
    shared_gateway: GatewayProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Proxy, Plugin]]:
    """A plug-in whose link goes through a proxy."""
    node_id = f"far{abs(hash(request.node.name)) % 10**8}"
    with Proxy(shared_gateway.port) as proxy, Plugin(shared_gateway, tmp_path, node_id, url=proxy.url) as plugin:
        yield proxy, plugin


def test_call_survives_a_lost_link(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    proxy, plugin = proxied
    waiting = threads.submit(shared_gateway.invoke, f"{plugin.node_id}.hold", {"until": "go"})
    call_id = plugin.started(1)[0]
    proxy.cut()
    assert still_open(waiting)
    shared_gateway.wait_for_node(plugin.node_id)
    plugin.release("go")
    assert waiting.result(60)["result"] == {"call": call_id, "until": "go"}
    assert plugin.steps(call_id) == ["start", "end"]


def test_result_finished_while_the_link_was_down_is_delivered(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    proxy, plugin = proxied
    waiting = threads.submit(shared_gateway.invoke, f"{plugin.node_id}.hold", {"until": "go"})
    call_id = plugin.started(1)[0]
    proxy.cut(refuse=True)
    shared_gateway.wait_for_node(plugin.node_id, online=False)
    plugin.release("go")
    wait_until(lambda: "end" in plugin.steps(call_id), 10, "the end of the work")
    assert still_open(waiting)
    proxy.admit()
    assert waiting.result(60)["result"]["call"] == call_id
    assert plugin.steps(call_id) == ["start", "end"]


def test_request_that_never_arrived_is_sent_again_and_runs_once(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    proxy, plugin = proxied
    proxy.freeze()
    waiting = threads.submit(shared_gateway.invoke, f"{plugin.node_id}.effect", {"text": "x"})
    assert still_open(waiting)
    assert plugin.started() == []
    proxy.cut()
    proxy.thaw()
    envelope = waiting.result(60)
    assert envelope["ok"] is True
    assert plugin.steps(envelope["request_id"]) == ["start", "end"]


def test_call_cancelled_before_it_arrived_never_runs(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    proxy, plugin = proxied
    proxy.freeze()
    call_id = in_background(shared_gateway, f"{plugin.node_id}.effect", {"text": "x"})
    stopping = threads.submit(shared_gateway.request, "DELETE", f"/v1/calls/{call_id}")
    assert still_open(stopping), "the node has a moment to confirm"
    proxy.cut()
    proxy.thaw()
    assert stopping.result(60).json()["state"] == "cancelled"
    shared_gateway.wait_for_node(plugin.node_id)
    assert shared_gateway.invoke(f"{plugin.node_id}.effect", {})["ok"] is True
    assert plugin.steps(call_id) == []


def test_cancel_while_the_node_is_away_reaches_it_when_it_returns(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin]
) -> None:
    proxy, plugin = proxied
    call_id = in_background(shared_gateway, f"{plugin.node_id}.hold", {"until": "never"})
    started(plugin, call_id)
    proxy.cut(refuse=True)
    shared_gateway.wait_for_node(plugin.node_id, online=False)
    assert shared_gateway.request("DELETE", f"/v1/calls/{call_id}").json()["state"] == "cancelled"
    assert plugin.steps(call_id) == ["start"]
    proxy.admit()
    wait_until(lambda: plugin.steps(call_id) == ["start", "cancel"], 15, "the cancel")
    assert record(shared_gateway, call_id)["state"] == "cancelled"


def test_deadline_with_the_node_away_is_unknown(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    proxy, plugin = proxied
    waiting = threads.submit(shared_gateway.invoke, f"{plugin.node_id}.hold", {"until": "go"}, timeout_ms=2000)
    call_id = plugin.started(1)[0]
    proxy.cut(refuse=True)
    envelope = waiting.result(60)
    assert envelope["error"]["kind"] == "failed" and envelope["error"]["message"].startswith(UNKNOWN)
    assert envelope["duration_ms"] >= 1900
    assert record(shared_gateway, call_id)["state"] == "unknown"


def test_stopped_node_is_waited_for(
    shared_gateway: GatewayProcess, proxied: tuple[Proxy, Plugin], threads: ThreadPoolExecutor
) -> None:
    """A node frozen by SIGSTOP, its link broken meanwhile, goes on where it was."""
    proxy, plugin = proxied
    assert plugin.process is not None
    waiting = threads.submit(shared_gateway.invoke, f"{plugin.node_id}.hold", {"until": "go"})
    call_id = plugin.started(1)[0]
    plugin.process.send_signal(signal.SIGSTOP)
    try:
        proxy.cut()
        shared_gateway.wait_for_node(plugin.node_id, online=False)
        plugin.release("go")
        assert still_open(waiting)
    finally:
        plugin.process.send_signal(signal.SIGCONT)
    assert waiting.result(60)["result"]["call"] == call_id


def test_node_killed_mid_call_and_started_again_is_unknown(
    shared_gateway: GatewayProcess, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    with Plugin(shared_gateway, tmp_path, "mortal") as plugin:
        waiting = threads.submit(shared_gateway.invoke, "mortal.hold", {"until": "go"})
        call_id = plugin.started(1)[0]
        plugin.stop(signal.SIGKILL)
        shared_gateway.wait_for_node("mortal", online=False)
        assert still_open(waiting)
        plugin.start()
        envelope = waiting.result(60)
    assert envelope["error"]["message"].startswith(UNKNOWN) and "restarted" in envelope["error"]["message"]
    assert record(shared_gateway, call_id)["state"] == "unknown"
    assert plugin.steps(call_id) == ["start"]


def test_node_killed_mid_call_that_never_returns_is_unknown_at_the_deadline(
    shared_gateway: GatewayProcess, tmp_path: Path
) -> None:
    with Plugin(shared_gateway, tmp_path, "gone") as plugin:
        call_id = in_background(shared_gateway, "gone.hold", {"until": "go"}, timeout_ms=5000)
        started(plugin, call_id)
        plugin.stop(signal.SIGKILL)
    found = ended(shared_gateway, call_id)
    assert found["state"] == "unknown" and found["error"]["message"].startswith(UNKNOWN)
    assert "did not come back before the deadline" in found["error"]["message"]


# -- the gateway is lost -------------------------------------------------------------------------------------------


def test_gateway_killed_mid_call_takes_it_up_again(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w") as plugin:
        call_id = in_background(gateway, "w.hold", {"until": "go"})
        started(plugin, call_id)
        gateway.kill()
        gateway.start()
        assert record(gateway, call_id)["state"] == "running"
        gateway.wait_for_node("w")
        assert record(gateway, call_id)["state"] == "running"
        plugin.release("go")
        found = ended(gateway, call_id)
        assert found["state"] == "ok" and found["result"]["call"] == call_id
        assert plugin.steps(call_id) == ["start", "end"]


def test_result_finished_while_the_gateway_was_dead_is_delivered(gateway: GatewayProcess, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "patience"}
    with Plugin(gateway, tmp_path, "w") as plugin:
        with contextlib.suppress(OSError), ThreadPoolExecutor() as pool:
            waiting = pool.submit(gateway.invoke, "w.hold", {"until": "go"}, headers=key)
            call_id = plugin.started(1)[0]
            gateway.kill()
            waiting.result(60)
        plugin.release("go")
        wait_until(lambda: "end" in plugin.steps(call_id), 10, "the end of the work")
        gateway.start()
        envelope = gateway.invoke("w.hold", {"until": "go"}, headers=key)
        assert envelope["request_id"] == call_id and envelope["result"]["call"] == call_id
        assert plugin.steps(call_id) == ["start", "end"]


def test_deadline_passes_while_the_gateway_is_dead(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w") as plugin:
        call_id = in_background(gateway, "w.hold", {"until": "go"}, timeout_ms=800)
        started(plugin, call_id)
        gateway.kill()
        plugin.stop(signal.SIGKILL)
    time.sleep(0.8)
    gateway.start()
    found = ended(gateway, call_id, 45)  # its node is given some time to come back first
    assert found["state"] == "unknown" and found["error"]["message"].startswith(UNKNOWN)


def test_a_stopping_gateway_lets_open_calls_finish(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w") as plugin, ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.invoke, "w.hold", {"until": "go"})
        call_id = plugin.started(1)[0]
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        assert still_open(waiting)
        plugin.release("go")
        assert waiting.result(60)["result"]["call"] == call_id
        assert gateway.process.wait(60) == 0


def test_call_to_a_gateway_that_is_stopping_did_not_run(gateway: GatewayProcess, tmp_path: Path) -> None:
    with Plugin(gateway, tmp_path, "w") as plugin, ThreadPoolExecutor() as pool:
        waiting = pool.submit(gateway.invoke, "w.hold", {"until": "go"})
        plugin.started(1)
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        assert still_open(waiting)
        refused = gateway.invoke("w.effect", {})
        assert refused["ok"] is False and "did not run" in refused["error"]["message"]
        assert plugin.steps(refused["request_id"]) == []
        plugin.release("go")
        assert waiting.result(60)["ok"] is True
