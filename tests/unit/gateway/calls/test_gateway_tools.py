"""Calls of the gateway's own tools pass the same gate as calls of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from farhand.gateway.access.credentials import OWNER, Credential
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Catalog, SwitchedOff
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id, result_of
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import NotFound
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import calls
from farhand.store.tables.calls import CallState
from farhand.tools.tool import CallContext, tool


def look(name: str, times: int = 1) -> dict[str, str]:
    """Look at something."""
    if name == "nothing":
        raise NotFound("there is nothing")
    return {"seen": name * times}


class Acting:
    def __init__(self) -> None:
        self.contexts: list[CallContext] = []
        self.cancelled = 0

    async def act(self, context: CallContext, seconds: float = 0) -> dict[str, str]:
        """Do something."""
        self.contexts.append(context)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if seconds < 0:
            raise RuntimeError("broken")
        return {"done": context.call_id}


class House:
    def __init__(self, path: Path, *, continues: bool = False) -> None:
        self.acting = Acting()
        self.database = SqliteStore.open(path / "x.db")
        self.disabled: list[str] = []
        self.catalog = Catalog(NodeRegistry(), lambda: self.disabled)
        act = tool(self.acting.act, name="gsv__Act", continues=continues)
        self.catalog.serve([tool(look, read_only=True), act])
        self.gate = Gate(self.database, NodeRegistry(), self.catalog)

    async def call(self, named: str, credential: Credential = OWNER, timeout_ms: int | None = None, **args: Any) -> Any:
        opened = await self.open(named, credential, timeout_ms, **args)
        record = await self.gate.wait(opened)
        return SimpleNamespace(record=record, result=result_of(record), raised=opened.raised)

    async def open(self, named: str, credential: Credential = OWNER, timeout_ms: int | None = None, **args: Any) -> Any:
        call = ToolCall(
            new_call_id(), named, msgspec.Raw(msgspec.json.encode(args)), "main", "helper", timeout_ms=timeout_ms
        )
        return await self.gate.begin(call, principal=Principal(credential))


def run(path: Path, test: Callable[[House], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        house = House(path, **options)
        await house.gate.recover()
        try:
            await test(house)
        finally:
            house.gate.close()
            await house.database.close()

    asyncio.run(whole())


def test_a_call_of_a_gateway_tool_is_checked_run_and_recorded(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        outcome = await house.call("look", name="ab", times=2)
        assert msgspec.json.decode(outcome.result.result) == {"seen": "abab"}
        assert (outcome.record.route, outcome.record.node_id) == ("local", None)
        acted = await house.call("gsv__Act")
        assert (acted.record.route, acted.record.state) == ("native", CallState.OK)
        context = house.acting.contexts[0]
        assert (context.call_id, context.session_key, context.agent_id) == (acted.record.id, "main", "helper")
        recorded = house.database.query(lambda store: calls.find(store, acted.record.id))
        assert recorded is not None and recorded.state is CallState.OK

    run(tmp_path, test)


def test_failures_keep_their_kind(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        said = [
            (await house.call(tool, **args)).result.error
            for tool, args in [
                ("look", {}),
                ("look", {"name": 3}),
                ("look", {"name": "nothing"}),
                ("gsv__Act", {"seconds": -1}),
                ("gsv__Other", {}),
            ]
        ]
        assert [error.kind for error in said] == ["invalid_args", "invalid_args", "not_found", "failed", "not_found"]
        assert "'name'" in said[1].message and "broken" in said[3].message and "gsv__Other" in said[4].message

    run(tmp_path, test)


def test_scopes_apply_to_gateway_tools(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        reader = Credential("r", frozenset({"tools.read"}))
        assert (await house.call("look", reader, name="x")).result.ok
        denied = await house.call("gsv__Act", reader)
        assert denied.record.state is CallState.DENIED and house.acting.contexts == []

    run(tmp_path, test)


def test_a_tool_that_is_not_offered_has_no_public_name(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        kept = tool(look, name="kept", read_only=True)
        house.catalog.serve([kept], offered=False)
        assert "kept" not in {offer.name for offer in house.catalog.offers()}
        assert (await house.call("kept", name="x")).result.error.kind == "not_found"
        call = ToolCall(new_call_id(), "kept", msgspec.Raw(b'{"name":"nothing"}'))
        opened = await house.gate.begin(call, principal=Principal(OWNER), own=kept)
        record = await house.gate.wait(opened)
        assert (record.tool, record.route) == ("kept", "local")
        assert isinstance(opened.raised, NotFound)

    run(tmp_path, test)


def test_a_tool_that_is_switched_off_is_neither_offered_nor_run(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.disabled.append("look")
        assert [offer.name for offer in house.catalog.offers()] == ["gsv__Act"]
        refused = await house.call("look", name="x")
        assert (refused.record.state, refused.result.error.kind) == (CallState.DENIED, "not_allowed")
        assert isinstance(refused.raised, SwitchedOff)
        house.disabled.clear()
        assert (await house.call("look", name="x")).result.ok

    run(tmp_path, test)


def test_cancel_timeout_and_hang_up_end_the_tool(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        opened: OpenCall = await house.open("gsv__Act", seconds=60)
        await asyncio.sleep(0)
        cancelled = await house.gate.cancel(opened.record.id)
        assert cancelled is not None and cancelled.state is CallState.CANCELLED
        late = await house.call("gsv__Act", timeout_ms=500, seconds=60)
        assert (late.record.state, late.result.error.kind) == (CallState.TIMEOUT, "timeout")
        left: OpenCall = await house.open("gsv__Act", seconds=60)
        await asyncio.sleep(0)
        house.gate.abandon(left)
        assert (await left.ended()).state is CallState.CANCELLED
        assert house.acting.cancelled == 3

    run(tmp_path, test)


def test_a_tool_that_continues_takes_up_a_call_after_a_restart(tmp_path: Path) -> None:
    async def left_open(house: House) -> None:
        await house.open("gsv__Act", seconds=0.05)
        await asyncio.sleep(0)

    async def taken_up(house: House) -> None:
        assert await house.gate.recover() == 1
        (record,) = house.gate.open_records()
        ended = await house.gate.end_of(record.id)
        assert ended is not None and ended.state is CallState.OK
        assert house.acting.contexts[0].call_id == record.id

    run(tmp_path, left_open)
    run(tmp_path, taken_up, continues=True)


def test_a_call_of_any_other_tool_is_unknown_after_a_restart(tmp_path: Path) -> None:
    async def left_open(house: House) -> None:
        await house.open("gsv__Act", seconds=60)

    async def unknown(house: House) -> None:
        await house.gate.recover()
        (record,) = house.database.query(lambda store: calls.search(store, {}, limit=9))
        assert record.state is CallState.UNKNOWN and "'gsv__Act'" in (record.error_message or "")
        assert house.acting.contexts == []

    run(tmp_path, left_open)
    run(tmp_path, unknown)
