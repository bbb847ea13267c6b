"""Each safeguard of a fleet works, and its check notices when the safeguard is disabled.

A safeguard that no test would miss may be lost unnoticed. So each scenario runs twice: as the code is, with
no violation, and with its guard replaced by nothing, with one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from farhand.protocol.messages import ToolRequest
from farhand.sdk import ToolContext, ToolRegistry
from farhand.sdk.accepted_calls import AcceptedCallsFile
from farhand.sdk.dispatcher import Dispatcher
from farhand.store.journal.events import append_event
from farhand.store.ports import StoreError
from farhand.store.postgres.store import PostgresStore
from farhand.store.tables import calls, fleet, waiting_calls
from farhand.store.tables.calls import CallRecord, CallState
from tests.support.fleet_servers import PostgresServer

KEY = b"k" * 32


class Pair:
    """Two gateways' stores on one database."""

    def __init__(self, url: str) -> None:
        self.one, self.two = PostgresStore.open(url, KEY), PostgresStore.open(url, KEY)
        self.one.join("one", "1", "s")
        self.two.join("two", "1", "s")

    def count(self, what: str, *values: object) -> int:
        rows = self.two.query(lambda tx: tx.execute(f"SELECT count(*) FROM {what}", values).fetchall())
        return int(rows[0][0])


@pytest.fixture
def pair(postgres: PostgresServer) -> Iterator[Pair]:
    found = Pair(postgres.new_database())
    yield found
    found.one.shut()
    found.two.shut()


def call(state: CallState = CallState.RUNNING, **more: object) -> CallRecord:
    record = CallRecord(
        id="call-1",
        tool="n__Bash",
        args=msgspec.Raw(b"{}"),
        credential="owner",
        route="node",
        node_id="n",
        created_at=1,
        deadline_at=2,
        state=state,
    )
    return msgspec.structs.replace(record, **more)


def old_connection(pair: Pair) -> list[str]:
    """A call is recorded for a connection that the node has left: its frame could still arrive there, unseen."""
    pair.one.query(lambda tx: fleet.link(tx, "n", "socket-1", "one"))
    pair.two.query(lambda tx: fleet.link(tx, "n", "socket-2", "two"))
    with suppress(fleet.LinkMoved):
        pair.one.query(lambda tx: fleet.begin_fenced(tx, [call()], ["socket-1"]))
    return ["recorded for a connection that is not the node's"] * pair.count("calls")


def lost_epoch(pair: Pair) -> list[str]:
    """A gateway that others took for dead writes once more."""
    pair.two.query(lambda tx: fleet.take_over(tx, "two", -60.0, 1))
    with suppress(StoreError):
        pair.one.query(lambda tx: append_event(tx, 1, "test.late", "one", {}))
    return ["a fenced gateway has written"] * pair.count("events WHERE kind = 'test.late'")


def second_end(pair: Pair) -> list[str]:
    """Two gateways record an end of the same call."""
    pair.one.query(lambda tx: calls.begin(tx, call()))
    for store, state in ((pair.one, CallState.OK), (pair.two, CallState.UNKNOWN)):
        ending = call(state, ended_at=2, duration_ms=1.0)
        store.query(lambda tx, ending=ending: calls.finish(tx, ending))  # type: ignore[misc]
    more = pair.count("events WHERE kind = 'call.ended'") - 1
    wrong = pair.count("calls WHERE state <> 'ok'")
    return ["a call has two ends"] * more + ["the first end did not count"] * wrong


def start_after_the_end(pair: Pair) -> list[str]:
    """A call that was refused while it waited is started by a gateway that did not hear of it."""
    row = waiting_calls.WaitingRow(
        call_id="call-1", why="approval", credential=msgspec.Raw(b"{}"), origins="http", timeout_ms=1
    )
    pair.one.query(lambda tx: waiting_calls.begin_waiting(tx, call(CallState.WAITING), row))
    refused = call(CallState.DENIED, ended_at=2, duration_ms=1.0)
    pair.two.query(lambda tx: waiting_calls.finish_waiting(tx, refused))
    started = pair.one.query(lambda tx: waiting_calls.start_waiting(tx, call(), 3))
    return ["a call that was reported not to have run may run"] * started


def unguarded(statement: str) -> str:
    return statement.replace(" AND state = 'waiting'", "").replace(" AND ended_at IS NULL", "")


MUTANTS: dict[str, tuple[Callable[[Pair], list[str]], Callable[[pytest.MonkeyPatch, Pair], None]]] = {
    "generation": (old_connection, lambda patch, _: patch.setattr(fleet, "check_link", lambda *_: None)),
    "epoch": (lost_epoch, lambda patch, pair: patch.setattr(pair.one, "_member", None)),
    "first end": (second_end, lambda patch, _: patch.setattr(calls, "FINISH", unguarded(calls.FINISH))),
    "forbidden call": (start_after_the_end, lambda patch, _: patch.setattr(calls, "START", unguarded(calls.START))),
}


@pytest.mark.siege
@pytest.mark.parametrize("guard", MUTANTS)
@pytest.mark.parametrize("mutated", [False, True], ids=["guarded", "mutant"])
def test_a_guard_of_the_store_is_missed_when_it_is_gone(
    pair: Pair, guard: str, mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, mutate = MUTANTS[guard]
    if mutated:
        mutate(monkeypatch, pair)
    assert bool(scenario(pair)) is mutated
    print(f"the guard {guard!r}, {'taken out' if mutated else 'in place'}, noticed as such: 1 tried, 1 held")


class Forgetful(AcceptedCallsFile):
    """A ledger that knows nothing of the node's earlier process."""

    def __init__(self, path: Path, machine_boot: str) -> None:
        super().__init__(path, machine_boot)
        self.earlier = set()


@pytest.mark.siege
@pytest.mark.parametrize(("ledger", "times"), [(AcceptedCallsFile, 1), (Forgetful, 2)], ids=["guarded", "mutant"])
def test_the_ledger_of_a_node_is_missed_when_it_is_gone(
    tmp_path: Path, ledger: type[AcceptedCallsFile], times: int
) -> None:
    """A call is sent to a node that was killed while it ran the call, and sent again to its next process."""
    ran: list[int] = []
    registry = ToolRegistry()

    @registry.tool
    async def act(_context: ToolContext) -> str:
        """Act."""
        ran.append(1)
        await asyncio.sleep(3600)
        return "done"

    async def live() -> None:
        calls_file = ledger(tmp_path / "calls", "boot")
        dispatcher = Dispatcher(
            registry, ledger=calls_file, max_concurrent=4, max_request_bytes=2**20, max_response_bytes=2**20
        )
        dispatcher.attach(lambda _: None, keeps=True, max_response_bytes=None)
        dispatcher.request(ToolRequest("call-1", "act"), 10)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task, _ in list(dispatcher._running.values()):
            task.cancel()  # killed: nothing is answered or settled
        calls_file.close()

    for _ in range(2):
        asyncio.run(live())
    assert len(ran) == times
    print(f"the ledger of a node, {'taken out' if times > 1 else 'in place'}, noticed as such: 1 tried, 1 held")
