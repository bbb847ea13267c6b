"""The gate with a store that can fail and a node at the other end of a link, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id
from farhand.gateway.nodes.registry import Connection, NodeRegistry
from farhand.protocol.calls import ToolCall, ToolFailure, ToolSpec
from farhand.protocol.messages import (
    FEATURES,
    NodeExtras,
    NodeHello,
    NodeInfo,
    Resume,
    ToolAck,
    ToolRequest,
    ToolResponse,
    decode,
)
from farhand.store.journal.events import events_after
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import calls
from farhand.store.tables.calls import CallState

SPECS = [ToolSpec("Look", read_only=True, capability="x.look"), ToolSpec("Act", capability="x.act")]


class FarEnd:
    """The node's end of a link; keeps the frames that it receives, decoded."""

    congested = False

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.connection: Connection

    def send(self, frame: bytes) -> None:
        self.frames.append(decode(frame))

    def close(self, code: int, reason: str) -> None:
        self.frames.append((code, reason))

    def requests(self) -> list[str]:
        return [frame.request_id for frame in self.frames if isinstance(frame, ToolRequest)]

    def acknowledged(self) -> list[str]:
        return [call_id for frame in self.frames if isinstance(frame, ToolAck) for call_id in frame.request_ids]


class Bench:
    def __init__(self, path: Path) -> None:
        self.database = SqliteStore.open(path / "x.db")
        self.node_registry = NodeRegistry()
        self.gate = Gate(self.database, self.node_registry, Catalog(self.node_registry))

    def join(self, boot: str | None = "life", **resume: Any) -> FarEnd:
        end = FarEnd()
        extras = NodeExtras(
            features=list(FEATURES) if boot else [], tools=SPECS, resume=Resume(boot, **resume) if boot else None
        )
        hello = NodeHello(node=NodeInfo("far", "far", "test", "1"), capabilities=["x"], farhand=extras)
        end.connection, _ = self.node_registry.join(self.node_registry.examine(hello, None), hello, end)
        self.gate.node_calls.joined(end.connection)
        return end

    async def begin(self, tool: str = "far__Act", credential: Credential = OWNER, **options: Any) -> Any:
        call = ToolCall(new_call_id(), tool, msgspec.Raw(b"{}"))
        return await self.gate.begin(call, principal=Principal(credential), **options)

    def recorded(self, call_id: str) -> Any:
        return self.database.query(lambda store: calls.find(store, call_id))


def on_bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            bench = Bench(tmp_path)
            await bench.gate.recover()
            try:
                await test(bench)
            finally:
                bench.gate.close()
                await bench.database.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


def answer(end: FarEnd, gate: Gate, call_id: str) -> None:
    gate.node_calls.answered(end.connection, ToolResponse(call_id, True, result=msgspec.Raw(b'"done"')))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class FullStore:
    """While entered, the store has no room for large values."""

    def __init__(self, bench: Bench) -> None:
        self._store = bench.database._connection
        self._room = self._store.pragma("max_page_count")

    def __enter__(self) -> None:
        self._store.pragma("max_page_count", self._store.pragma("page_count"))

    def __exit__(self, *_: object) -> None:
        self._store.pragma("max_page_count", self._room)


BIG = msgspec.Raw(b'"' + b"r" * 100_000 + b'"')


@on_bench
async def test_an_end_that_cannot_be_stored_is_not_acknowledged_until_it_is(bench: Bench) -> None:
    end = bench.join()
    opened = await bench.begin()
    with FullStore(bench):
        bench.gate.node_calls.answered(end.connection, ToolResponse(opened.record.id, True, result=BIG))
        notified = await bench.gate.wait(opened)
        assert notified.state is CallState.UNKNOWN and "could not be recorded" in (notified.error_message or "")
        answer(end, bench.gate, opened.record.id)  # the node sends it again; it is not stored, so not acknowledged
        await asyncio.sleep(0.2)
        assert end.acknowledged() == [] and bench.recorded(opened.record.id).state is CallState.RUNNING
    await until(lambda: end.acknowledged() == [opened.record.id])
    record = bench.recorded(opened.record.id)
    assert record.state is CallState.OK and bytes(record.result) == bytes(BIG)


@on_bench
async def test_an_end_of_a_plain_node_that_cannot_be_stored_is_unknown(bench: Bench) -> None:
    end = bench.join(boot=None)
    opened = await bench.begin()
    with FullStore(bench):
        bench.gate.node_calls.answered(end.connection, ToolResponse(opened.record.id, True, result=BIG))
        reported = await bench.gate.wait(opened)
        assert reported.state is CallState.UNKNOWN and "could not be recorded" in (reported.error_message or "")
    await until(lambda: bench.recorded(opened.record.id).state is CallState.OK)


@on_bench
async def test_the_end_of_a_plain_nodes_call_is_visible_only_once_it_is_stored(bench: Bench) -> None:
    end = bench.join(boot=None)
    opened = await bench.begin()
    answer(end, bench.gate, opened.record.id)
    found = await bench.gate.find(opened.record.id)
    assert found is not None and found.state is CallState.RUNNING
    assert (await bench.gate.wait(opened)).state is CallState.OK
    found = await bench.gate.find(opened.record.id)
    assert found is not None and found.state is CallState.OK


@on_bench
async def test_a_caller_who_leaves_while_the_call_is_being_stored_leaves_no_open_call(bench: Bench) -> None:
    end = bench.join()
    for options in ({}, {"idempotency_key": "k"}, {"background": True}):
        beginning = asyncio.ensure_future(bench.begin(**options))
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
    await until(lambda: bench.gate.open_count == 0)
    found = bench.database.query(lambda store: calls.search(store, {}, limit=9))
    assert len(found) == 3 and {record.state for record in found} == {CallState.CANCELLED}
    assert end.requests() == []
    again = await bench.begin(idempotency_key="k")
    assert end.requests() == [again.record.id], "the first did not run, so its key is free"


@on_bench
async def test_a_refusal_does_not_use_up_an_idempotency_key(bench: Bench) -> None:
    refused = await bench.begin(idempotency_key="k")
    assert refused.over and refused.record.error_kind == "not_found"
    end = bench.join()
    opened = await bench.begin(idempotency_key="k")
    answer(end, bench.gate, opened.record.id)
    assert (await bench.gate.wait(opened)).state is CallState.OK
    bench.node_registry.leave(end.connection)
    again = await bench.begin(idempotency_key="k")  # the node is gone, the first result stands
    assert again.over and again.repeated and again.record.id == opened.record.id
    assert end.requests() == [opened.record.id]


@on_bench
async def test_scopes_decide_which_tools_a_credential_reaches(bench: Bench) -> None:
    end = bench.join()
    reader = Credential("reader", frozenset({"tools.read"}))
    denied = await bench.begin("far__Act", reader)
    assert denied.over and denied.record.state is CallState.DENIED
    assert denied.record.error_kind == "not_allowed" and "tools.exec" in (denied.record.error_message or "")
    opened = await bench.begin("far__Look", reader)
    assert isinstance(opened, OpenCall)
    answer(end, bench.gate, opened.record.id)
    assert (await bench.gate.wait(opened)).state is CallState.OK
    assert end.requests() == [opened.record.id]


@on_bench
async def test_a_read_only_call_is_stored_before_it_is_answered(bench: Bench) -> None:
    end = bench.join()
    opened = await bench.begin("far__Look")
    assert bench.recorded(opened.record.id) is None
    answer(end, bench.gate, opened.record.id)
    assert (await bench.gate.wait(opened)).state is CallState.OK
    assert bench.recorded(opened.record.id).state is CallState.OK
    found = await bench.gate.find(opened.record.id)
    assert found is not None and found.state is CallState.OK


@on_bench
async def test_a_call_that_never_reached_a_returning_node_is_sent_once_more(bench: Bench) -> None:
    first = bench.join()
    opened = await bench.begin()
    bench.node_registry.leave(first.connection)
    bench.gate.node_calls.left(first.connection)
    second = bench.join()
    assert second.requests() == [opened.record.id]
    answer(second, bench.gate, opened.record.id)
    assert (await bench.gate.wait(opened)).state is CallState.OK


@on_bench
async def test_an_open_call_of_a_restarted_node_is_unknown(bench: Bench) -> None:
    first = bench.join("one")
    opened = await bench.begin()
    bench.node_registry.leave(first.connection)
    second = bench.join("two")
    record = await bench.gate.wait(opened)
    assert record.state is CallState.UNKNOWN and (record.error_message or "").startswith("outcome unknown:")
    assert second.requests() == []


@on_bench
async def test_a_call_that_an_earlier_process_accepted_is_sent_again_without_a_waiting_caller(bench: Bench) -> None:
    first = bench.join()
    opened = await bench.begin()
    bench.node_registry.leave(first.connection)
    opened.waiters = 0
    second = bench.join(earlier=[opened.record.id, "long-settled"])
    assert second.requests() == [opened.record.id]
    await until(lambda: second.acknowledged() == ["long-settled"])


@on_bench
async def test_counters_return_to_zero(bench: Bench) -> None:
    end = bench.join()
    node = bench.node_registry.nodes["far"]
    opened = [await bench.begin() for _ in range(20)]
    assert node.running == 20
    for each in opened[:10]:
        answer(end, bench.gate, each.record.id)
    for each in opened[10:]:
        bench.gate.abandon(each)
    bench.node_registry.leave(end.connection)
    bench.join("another life")
    for each in opened:
        await bench.gate.wait(each)
    assert node.running == 0 and bench.gate.open_records() == []


async def left_behind(bench: Bench, first: FarEnd, key: str) -> asyncio.Task[Any]:
    """Begin a call whose node leaves after it was admitted and before it is sent."""
    beginning = asyncio.create_task(bench.begin(idempotency_key=key))
    await asyncio.sleep(0)  # it is admitted, and is about to be stored
    assert bench.gate.open_count == 1 and first.requests() == []
    bench.node_registry.leave(first.connection)
    bench.gate.node_calls.left(first.connection)
    return beginning


@on_bench
async def test_a_call_whose_node_leaves_before_it_is_sent_waits_for_it(bench: Bench) -> None:
    for boot in ("life", "another life"):  # nothing of the call has left, so any process of the node may run it
        beginning = await left_behind(bench, bench.join(), boot)
        opened = await beginning
        assert not opened.over
        second = bench.join(boot)
        assert second.requests() == [opened.record.id]
        third = bench.join(boot)
        assert third.requests() == [opened.record.id], "it may not have arrived; the node runs an id once"
        answer(third, bench.gate, opened.record.id)
        assert (await bench.gate.wait(opened)).state is CallState.OK
        await until(lambda call_id=opened.record.id: bench.recorded(call_id) is not None)
        bench.node_registry.leave(third.connection)


@on_bench
async def test_a_plain_node_that_leaves_before_a_call_is_sent_is_not_waited_for(bench: Bench) -> None:
    beginning = await left_behind(bench, bench.join(None), "again")
    record = await bench.gate.wait(await beginning)
    assert record.state is CallState.ERROR and (record.error_message or "").endswith("it did not run")
    end = bench.join(None)
    again = await bench.begin(idempotency_key="again")
    assert end.requests() == [again.record.id], "the first did not run, so its key is free"


@on_bench
async def test_a_call_that_a_busy_node_sends_back_leaves_its_key_free(bench: Bench) -> None:
    busy = ToolFailure("failed", "busy: 1 calls are running and 64 waiting; it did not run, try again later")
    for boot, key in (("life", "a"), (None, "b")):
        end = bench.join(boot)
        opened = await bench.begin(idempotency_key=key)
        bench.gate.node_calls.answered(end.connection, ToolResponse(opened.record.id, False, error=busy))
        assert (await bench.gate.wait(opened)).error_message == busy.message
        again = await bench.begin(idempotency_key=key)
        assert end.requests() == [opened.record.id, again.record.id]
        answer(end, bench.gate, again.record.id)
        done = await bench.gate.wait(again)
        assert done.state is CallState.OK
        assert (await bench.begin(idempotency_key=key)).record == done, "now it is used up"
        bench.node_registry.leave(end.connection)


@on_bench
async def test_an_answer_that_is_too_late_is_in_the_journal(bench: Bench) -> None:
    def reported() -> list[Any]:
        reported = bench.database.query(lambda store: events_after(store, 0, 100))
        return [event for event in reported if event.kind == "call.late"]

    first = bench.join()
    opened = await bench.begin()
    bench.node_registry.leave(first.connection)
    bench.gate._lifecycle.expire(opened)
    assert (await bench.gate.wait(opened)).state is CallState.UNKNOWN
    end = bench.join(finished=[opened.record.id])
    answer(end, bench.gate, opened.record.id)
    await until(lambda: end.acknowledged() == [opened.record.id])
    assert [(event.subject, msgspec.json.decode(event.data)) for event in reported()] == [
        (opened.record.id, {"tool": "far__Act", "node_id": "far", "ok": True, "result": "done"})
    ]
    assert bench.recorded(opened.record.id).state is CallState.UNKNOWN, "an answer that was given is not changed"
    for _ in range(100):
        answer(end, bench.gate, opened.record.id)
    await until(lambda: len(end.acknowledged()) == 101)
    assert len(reported()) == 1, "repeating it does not fill the journal"
    done = await bench.begin()
    for _ in range(2):
        answer(end, bench.gate, done.record.id)
        await until(lambda: bench.gate.open_count == 0)
    await until(lambda: end.acknowledged().count(done.record.id) == 2)
    assert len(reported()) == 1, "an answer to an open call is not late"
