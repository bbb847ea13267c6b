"""The client against a gateway that keeps results: work outlives a link, and nothing runs twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from farhand.protocol.calls import ToolSpec
from farhand.sdk import Cancelled, NodeClient, Shutdown, ToolContext, ToolRegistry
from farhand.sdk.accepted_calls import AcceptedCallsFile
from tests.unit.sdk.wire import PLAIN, RESUMING, FakeGateway, Peer, asynchronous, serving


async def echo(ctx: ToolContext, args: Any) -> Any:
    """Give the arguments back."""
    return args


class Held:
    """A tool that waits until let go, and counts its runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.cancelled: list[str] = []
        self.started = asyncio.Event()
        self.go = asyncio.Event()

    async def call(self, ctx: ToolContext, args: Any) -> Any:
        self.runs.append(ctx.request_id)
        self.started.set()
        going = asyncio.ensure_future(self.go.wait())
        stopped = asyncio.ensure_future(ctx.cancel.cancelled())
        try:
            await asyncio.wait({going, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            going.cancel()
            stopped.cancel()
        if ctx.cancel.is_cancelled():
            self.cancelled.append(ctx.request_id)
            raise Cancelled(f"stopped: {ctx.cancel.reason}")
        return args


def known(peer: Peer) -> dict[str, Any]:
    """What the node's hello says it still knows."""
    resume = dict(peer.hello["farhand"]["resume"])
    resume.pop("boot")
    return resume


async def ack(peer: Peer, *request_ids: str) -> None:
    await peer.send({"type": "tool_ack", "request_ids": list(request_ids)})
    await peer.round_trip()


@asynchronous
async def test_work_continues_through_a_lost_link() -> None:
    held = Held()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.held", held)):
        peer = await gateway.accept(RESUMING)
        assert known(peer) == {}
        boot = peer.hello["farhand"]["resume"]["boot"]
        await peer.request("r1", "test.held", {"x": 1})
        await held.started.wait()
        peer.cut()
        again = await gateway.accept(RESUMING)
        assert again.hello["farhand"]["resume"]["boot"] == boot
        assert known(again) == {"running": ["r1"]}
        assert held.cancelled == []
        held.go.set()
        assert await again.receive("tool_response") == {
            "type": "tool_response",
            "request_id": "r1",
            "ok": True,
            "result": {"x": 1},
        }
        assert held.runs == ["r1"]


@asynchronous
async def test_a_call_that_waits_for_its_turn_is_also_carried_over() -> None:
    held = Held()
    registry = ToolRegistry().register("test.held", held)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held", 1)
        await peer.request("r2", "test.held", 2)
        await peer.round_trip()
        peer.cut()
        again = await gateway.accept(RESUMING)
        assert known(again) == {"running": ["r1", "r2"]}
        held.go.set()
        answers = [await again.receive("tool_response") for _ in range(2)]
        assert [(answer["request_id"], answer["result"]) for answer in answers] == [("r1", 1), ("r2", 2)]


@asynchronous
async def test_a_result_that_came_while_the_link_was_down_is_delivered() -> None:
    held = Held()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.held", held)):
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held", 5)
        await held.started.wait()
        peer.cut()
        again = await gateway.accept(welcome=None)  # the hello is out, the welcome is not
        assert known(again) == {"running": ["r1"]}
        held.go.set()
        await asyncio.sleep(0.05)
        await again.send(RESUMING)
        assert (await again.receive("tool_response"))["result"] == 5


@asynchronous
async def test_unacknowledged_results_are_sent_again_until_acknowledged() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.echo", echo)):
        peer = await gateway.accept(RESUMING)
        first = await peer.call("test.echo", 1, "r1")
        second = await peer.call("test.echo", 2, "r2")
        for _ in range(2):
            peer.cut()
            peer = await gateway.accept(RESUMING)
            assert known(peer) == {"finished": ["r1", "r2"]}
            assert await peer.receive("tool_response") == first
            assert await peer.receive("tool_response") == second
        await ack(peer, "r1", "nonsense")
        peer.cut()
        peer = await gateway.accept(RESUMING)
        assert known(peer) == {"finished": ["r2"]}
        assert await peer.receive("tool_response") == second
        await ack(peer, "r2", "r2")
        peer.cut()
        peer = await gateway.accept(RESUMING)
        assert known(peer) == {}
        assert await peer.quiet() == []


@asynchronous
async def test_a_result_made_for_a_gateway_that_takes_more_is_cut_for_one_that_takes_less() -> None:
    async def give(ctx: ToolContext, args: Any) -> Any:
        return "x" * 5000

    def taking(limit: int) -> dict[str, Any]:
        return {**RESUMING, "farhand": {**RESUMING["farhand"], "max_response_bytes": limit}}

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.give", give)):
        peer = await gateway.accept(taking(10_000))
        assert (await peer.call("test.give", None, "r1"))["result"] == "x" * 5000
        peer.cut()
        peer = await gateway.accept(taking(1000))
        cut = await peer.receive("tool_response")
        assert len(json.dumps(cut, separators=(",", ":"))) <= 1000
        assert cut["request_id"] == "r1"
        assert cut["result"]["_original_bytes"] == 5002
        assert cut["result"]["partial"].startswith('"xxx')
        assert await peer.call("test.give", None, "r1") == cut
        await ack(peer, "r1")


@asynchronous
async def test_failures_are_kept_like_results() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.echo", echo)):
        peer = await gateway.accept(RESUMING)
        failure = await peer.call("test.nothing", None, "r1")
        peer.cut()
        peer = await gateway.accept(RESUMING)
        assert known(peer) == {"finished": ["r1"]}
        assert await peer.receive("tool_response") == failure


@pytest.mark.parametrize("when", ["running", "waiting", "finished", "acknowledged"])
@asynchronous
async def test_a_duplicate_request_never_runs_twice(when: str) -> None:
    held = Held()
    registry = ToolRegistry().register("test.held", held)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
        peer = await gateway.accept(RESUMING)
        if when == "waiting":
            await peer.request("before", "test.held")
        await peer.request("r1", "test.held", 1)
        if when in ("finished", "acknowledged"):
            held.go.set()
            first = await peer.receive("tool_response")
            if when == "acknowledged":
                await ack(peer, "r1")
        await peer.request("r1", "test.held", "something else")
        if when == "finished":
            assert await peer.receive("tool_response") == first, "the kept result answers it"
        assert await peer.quiet() == []
        held.go.set()
        if when in ("running", "waiting"):
            answers = [await peer.receive("tool_response") for _ in range(1 if when == "running" else 2)]
            assert answers[-1]["request_id"] == "r1"
            assert answers[-1]["result"] == 1
        assert await peer.quiet() == []
        assert held.runs.count("r1") == 1


@asynchronous
async def test_a_duplicate_after_a_new_connection_does_not_run_either() -> None:
    held = Held()
    held_registry = ToolRegistry().register("test.held", held)
    async with FakeGateway() as gateway, serving(gateway.url, held_registry):
        peer = await gateway.accept(RESUMING)
        await peer.request("running", "test.held")
        await held.started.wait()
        peer.cut()
        peer = await gateway.accept(RESUMING)
        await peer.request("running", "test.held")
        await peer.round_trip()
        held.go.set()
        assert (await peer.receive("tool_response"))["request_id"] == "running"
        await ack(peer, "running")
        peer.cut()
        peer = await gateway.accept(RESUMING)
        await peer.request("running", "test.held")
        assert await peer.quiet() == []
        assert held.runs == ["running"]


@asynchronous
async def test_many_links_and_many_calls_each_once() -> None:
    runs: dict[str, int] = {}

    async def count(ctx: ToolContext, args: Any) -> Any:
        runs[ctx.request_id] = runs.get(ctx.request_id, 0) + 1
        await asyncio.sleep(0.001)
        return args

    results: dict[str, Any] = {}
    wanted = [f"r{number}" for number in range(200)]
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.count", count)):
        while len(results) < len(wanted):
            peer = await gateway.accept(RESUMING)
            await peer.send({"type": "tool_ack", "request_ids": list(results)})  # late: only on the next link
            for request_id in [each for each in wanted if each not in results][:40]:
                await peer.request(request_id, "test.count", request_id)
            enough = min(len(results) + 25, len(wanted))
            while len(results) < enough:
                answer = await peer.receive("tool_response")
                assert answer["ok"], answer
                results[answer["request_id"]] = answer["result"]
            peer.cut()
        await gateway.accept(RESUMING)
    assert results == {request_id: request_id for request_id in wanted}
    assert set(runs.values()) == {1}


@asynchronous
async def test_cancel_reaches_the_tool() -> None:
    held = Held()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.held", held)):
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held")
        await peer.request("r2", "test.held", 2)
        await peer.round_trip()
        await peer.send({"type": "tool_cancel", "request_id": "r1", "reason": "the caller hung up"})
        answer = await peer.receive("tool_response")
        assert answer["request_id"] == "r1"
        assert answer["error"] == {"kind": "cancelled", "message": "stopped: the caller hung up"}
        assert held.cancelled == ["r1"]
        held.go.set()
        assert (await peer.receive("tool_response"))["result"] == 2


@asynchronous
async def test_cancel_of_a_call_that_waits_means_it_never_starts() -> None:
    held = Held()
    registry = ToolRegistry().register("test.held", held)
    async with FakeGateway() as gateway, serving(gateway.url, registry, max_concurrent_tools=1):
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held", 1)
        await peer.request("r2", "test.held", 2)
        await peer.send({"type": "tool_cancel", "request_id": "r2"})
        answer = await peer.receive("tool_response")
        assert (answer["request_id"], answer["error"]["kind"]) == ("r2", "cancelled")
        held.go.set()
        assert (await peer.receive("tool_response"))["request_id"] == "r1"
        assert await peer.quiet() == []
        assert held.runs == ["r1"]


@asynchronous
async def test_cancel_of_an_unknown_or_finished_call_changes_nothing() -> None:
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.echo", echo)):
        peer = await gateway.accept(RESUMING)
        await peer.call("test.echo", 1, "r1")
        await peer.send({"type": "tool_cancel", "request_id": "r1"})
        await peer.send({"type": "tool_cancel", "request_id": "never seen"})
        await peer.send({"type": "tool_ack", "request_ids": ["never seen"]})
        assert await peer.quiet() == []
        assert (await peer.call("test.echo", 2, "r2"))["result"] == 2


@asynchronous
async def test_cancel_stops_even_a_tool_that_does_not_listen() -> None:
    started = asyncio.Event()

    async def deaf(ctx: ToolContext, args: Any) -> Any:
        started.set()
        await asyncio.sleep(1000)

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.deaf", deaf)):
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.deaf")
        await started.wait()
        await peer.send({"type": "tool_cancel", "request_id": "r1", "reason": "enough"})
        answer = await peer.receive("tool_response")
        assert answer["error"] == {"kind": "cancelled", "message": "enough"}


@asynchronous
async def test_the_deadline_reaches_the_context() -> None:
    seen: list[int | None] = []

    async def look(ctx: ToolContext, args: Any) -> Any:
        seen.append(ctx.timeout_ms)

    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.look", look)):
        peer = await gateway.accept(RESUMING)
        await peer.call("test.look", None, "r1", timeout_ms=1500)
        await peer.call("test.look", None, "r2")
    assert seen == [1500, None]


@asynchronous
async def test_a_tool_registered_late_is_announced() -> None:
    registry = ToolRegistry().register("test.echo", echo)
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(RESUMING)
        await peer.round_trip()
        registry.register("other.tool", echo)
        update = await peer.receive("tools_update")
        assert update["capabilities"] == ["other", "test"]
        assert [tool["name"] for tool in update["tools"]] == ["other.tool", "test.echo"]
        assert (await peer.call("other.tool", 1))["result"] == 1


@asynchronous
async def test_a_tool_registered_between_hello_and_welcome_is_announced() -> None:
    registry = ToolRegistry().register("test.echo", echo)
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(welcome=None)
        registry.register("other.tool", echo)
        await peer.send(RESUMING)
        update = await peer.receive("tools_update")
        assert [tool["name"] for tool in update["tools"]] == ["other.tool", "test.echo"]


@asynchronous
async def test_nothing_of_ours_is_sent_to_a_plain_gateway() -> None:
    registry = ToolRegistry().register("test.echo", echo)
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(PLAIN)
        registry.register("other.tool", echo)
        first = await peer.call("test.echo", 1, "r1")
        assert first["result"] == 1
        assert await peer.quiet() == [], "no tools_update"
        peer.cut()
        again = await gateway.accept(PLAIN)
        assert known(again) == {}
        assert again.hello["capabilities"] == ["other", "test"], "the next hello tells of it"
        assert await again.quiet() == [], "no result is sent again"


@asynchronous
async def test_a_gateway_that_forgot_how_to_resume_is_served_plainly() -> None:
    held = Held()
    registry = ToolRegistry().register("test.echo", echo).register("test.held", held)
    async with FakeGateway() as gateway, serving(gateway.url, registry):
        peer = await gateway.accept(RESUMING)
        await peer.call("test.echo", 1, "kept")
        peer.cut()
        peer = await gateway.accept(PLAIN)
        assert known(peer) == {"finished": ["kept"]}
        assert await peer.quiet() == []
        peer.cut()
        assert known(await gateway.accept(RESUMING)) == {}


@asynchronous
async def test_shutdown_tells_a_resuming_gateway_what_was_cancelled() -> None:
    held = Held()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.held", held)) as node:
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held")
        await held.started.wait()
        node.shutdown.set()
        answer = await peer.receive("tool_response")
        assert (answer["request_id"], answer["error"]["kind"]) == ("r1", "cancelled")
        assert isinstance(await node.ending(), Shutdown)
        assert held.cancelled == ["r1"]


@asynchronous
async def test_shutdown_while_the_link_is_down_cancels_what_still_runs() -> None:
    held = Held()
    async with FakeGateway() as gateway, serving(gateway.url, ToolRegistry().register("test.held", held)) as node:
        peer = await gateway.accept(RESUMING)
        await peer.request("r1", "test.held")
        await held.started.wait()
        peer.cut()
        await gateway.accept(welcome=None)
        node.shutdown.set()
        assert isinstance(await node.ending(), Shutdown)
        assert held.cancelled == ["r1"]


@asynchronous
async def test_each_life_of_a_node_has_its_own_boot() -> None:
    boots = set()
    async with FakeGateway() as gateway:
        for _ in range(2):
            async with serving(gateway.url, ToolRegistry().register("test.echo", echo)):
                boots.add((await gateway.accept(RESUMING)).hello["farhand"]["resume"]["boot"])
    assert len(boots) == 2


# -- queries beside the calls -----------------------------------------------------------------------------


@asynchronous
async def test_a_query_is_answered_and_a_broken_one_says_so() -> None:
    async def length(params: Any) -> int:
        return len(bytes(params))

    async def broken(params: Any) -> None:
        raise OSError(2, "no such file", "caf\udce9.txt")

    queries = {"length": length, "broken": broken}
    async with (
        FakeGateway() as gateway,
        serving(gateway.url, ToolRegistry().register("test.echo", echo), queries=queries),
    ):
        peer = await gateway.accept(RESUMING)
        assert {"query.length", "query.broken"} <= set(peer.hello["farhand"]["features"])
        await peer.send({"type": "node_query", "query_id": 1, "kind": "length", "params": [1]})
        assert await peer.receive("node_answer") == {"type": "node_answer", "query_id": 1, "result": 3}
        await peer.send({"type": "node_query", "query_id": 2, "kind": "broken"})
        assert (await peer.receive("node_answer"))["error"]["kind"] == "failed"
        await peer.send({"type": "node_query", "query_id": 3, "kind": "unheard of"})
        assert (await peer.receive("node_answer"))["error"]["kind"] == "not_found"


# -- a node that was killed -------------------------------------------------------------------------------


def test_a_call_accepted_by_an_earlier_process_does_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    runs: list[str] = []

    async def act(ctx: ToolContext, args: Any) -> Any:
        runs.append(ctx.request_id)
        if ctx.request_id == "open":
            await asyncio.sleep(1000)
        return args

    registry = ToolRegistry().register("test.act", act)

    @asynchronous
    async def first_life() -> None:
        ledger = AcceptedCallsFile(path, "machine-1")
        async with FakeGateway() as gateway:
            client = NodeClient(gateway.url, node_id="probe1", ledger=ledger)
            task = client.spawn(registry)
            peer = await gateway.accept(RESUMING)
            await peer.call("test.act", 1, "settled")
            await ack(peer, "settled")
            await peer.request("open", "test.act")
            await peer.round_trip()
            written = path.read_bytes()
            task.cancel()
            await asyncio.wait({task})
        ledger.close()
        path.write_bytes(written)  # as a kill at that moment would have left it

    @asynchronous
    async def second_life() -> None:
        ledger = AcceptedCallsFile(path, "machine-1")
        async with FakeGateway() as gateway, serving(gateway.url, registry, ledger=ledger):
            peer = await gateway.accept(RESUMING)
            assert known(peer) == {"earlier": ["open"]}
            refused = await peer.call("test.act", None, "open")
            assert refused["error"]["kind"] == "failed"
            assert refused["error"]["message"].startswith("outcome unknown:")
            await ack(peer, "open")
            assert (await peer.call("test.act", 3, "new"))["result"] == 3
        ledger.close()

    first_life()
    second_life()
    assert runs == ["settled", "open", "new"]


def test_a_ledger_survives_lives_but_not_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = AcceptedCallsFile(path, "machine-1")
    for request_id in ("a", "b", "c"):
        first.accept(request_id)
    first.settle("b")
    first.close()
    second = AcceptedCallsFile(path, "machine-1")
    assert (second.boot, second.earlier) == (first.boot, {"a", "c"})
    second.settle("a")
    second.close()
    third = AcceptedCallsFile(path, "machine-1")
    assert (third.boot, third.earlier) == (first.boot, {"c"})
    third.close()
    rebooted = AcceptedCallsFile(path, "machine-2")
    assert rebooted.earlier == set()
    assert rebooted.boot != first.boot
    rebooted.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"boot", b"boot machine-1 ", b"\xff\xfe", b"boot machine-1 b1\n+half"])
def test_a_damaged_ledger_does_not_keep_the_node_from_starting(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(content)
    ledger = AcceptedCallsFile(path, "machine-1")
    assert ledger.boot
    ledger.accept("x")
    ledger.close()
    again = AcceptedCallsFile(path, "machine-1")
    assert "x" in again.earlier
    again.close()


def test_the_tools_of_the_hello_carry_their_specification() -> None:
    registry = ToolRegistry()

    @registry.tool("test.search", read_only=True, timeout_ms=100)
    async def search(ctx: ToolContext, query: str) -> None:
        """Search."""

    @asynchronous
    async def run() -> None:
        async with FakeGateway() as gateway, serving(gateway.url, registry):
            peer = await gateway.accept(RESUMING)
            assert peer.hello["farhand"]["tools"] == [
                {
                    "name": "test.search",
                    "description": "Search.",
                    "parameters": {
                        "type": "object",
                        "properties": {"query": {"type": "string"}},
                        "required": ["query"],
                        "additionalProperties": False,
                    },
                    "read_only": True,
                    "timeout_ms": 100,
                }
            ]

    run()
    assert registry.specs() == [
        ToolSpec(
            "test.search",
            "Search.",
            {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
                "additionalProperties": False,
            },
            read_only=True,
            timeout_ms=100,
        )
    ]
