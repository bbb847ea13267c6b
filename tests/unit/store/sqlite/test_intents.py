"""The log of intents: what was promised comes back, once and in order, whatever happened to the file's end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.store.sqlite.ahead import PROMISES_SUFFIX
from farhand.store.sqlite.database import Database, StoreError
from farhand.store.sqlite.intents import HALF, LARGEST, IntentLog
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState, intent_of


def record(name: str, **fields: object) -> CallRecord:
    return CallRecord(id=name, tool="t", credential="owner", route="node", created_at=1, deadline_at=2, **fields)  # type: ignore[arg-type]


def reopened(path: Path) -> list[bytes]:
    log, found = IntentLog.open(path)
    log.close()
    return found


@pytest.mark.parametrize("mapped", [False, True])
def test_what_was_written_is_found_in_order(tmp_path: Path, mapped: bool) -> None:
    log, found = IntentLog.open(tmp_path / "log", mapped=mapped)
    assert found == []
    for number in range(100):
        assert log.add(b"intent %d" % number)
        if number % 7 == 0:
            log.write(log.take())
    log.write(log.take())
    log.close()
    assert reopened(tmp_path / "log") == [b"intent %d" % number for number in range(100)]


def test_what_was_added_and_not_written_is_not_found(tmp_path: Path) -> None:
    log, _ = IntentLog.open(tmp_path / "log")
    log.add(b"first")
    log.write(log.take())
    log.add(b"second")
    log.close()
    assert reopened(tmp_path / "log") == [b"first"]


def test_a_full_half_is_left_for_the_other_which_must_be_free(tmp_path: Path) -> None:
    log, _ = IntentLog.open(tmp_path / "log")
    largest = bytes(LARGEST)

    def fill() -> int:
        count = 0
        while log.add(largest):
            count += 1
        return count

    assert fill() == HALF // (LARGEST + 16)
    assert log.turn() == 0
    log.add(b"in the second half")
    filled = fill()
    assert log.turn() is None, "the first half holds what the tables lack"
    log.free(0)
    assert log.turn() == 1
    assert log.add(b"in the first half again")
    log.write(log.take())
    log.close()
    found = reopened(tmp_path / "log")
    assert found[0] == b"in the second half" and found[-1] == b"in the first half again"
    assert largest in found and len(found) == filled + 2


def test_what_was_cleared_is_gone_and_its_remains_are_not_taken_for_new(tmp_path: Path) -> None:
    log, _ = IntentLog.open(tmp_path / "log")
    for _ in range(3):
        log.add(b"the same length")
    log.write(log.take())
    log.clear()
    assert reopened(tmp_path / "log") == []
    log.add(b"THE SAME LENGTH")
    log.write(log.take())
    log.close()
    assert reopened(tmp_path / "log") == [b"THE SAME LENGTH"]


@pytest.mark.parametrize("mapped", [False, True])
def test_what_a_run_that_stopped_in_order_left_behind_is_not_found_by_the_next(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "log"
    for count in (20, 2, 7):
        log, found = IntentLog.open(path, mapped=mapped)
        assert found == []
        for number in range(count):
            log.add(b"of a run with %03d, %03d" % (count, number))
            log.write(log.take()) if not mapped else None
        before = [b"of a run with %03d, %03d" % (count, number) for number in range(count)]
        assert reopened(path) == before, "and no more"
        log.clear()
        log.close()


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8), st.integers(0, 600), st.binary(max_size=4))
def test_a_torn_or_garbled_end_costs_only_what_it_touches(
    tmp_path_factory: pytest.TempPathFactory, intents: list[bytes], at: int, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "log"
    log, _ = IntentLog.open(path)
    whole = []
    end = 0
    for intent in intents:
        log.add(intent)
        end += 16 + len(intent)
        if end <= at:
            whole.append(intent)
    log.write(log.take())
    os.pwrite(log.file, garbage, at)
    log.close()
    found = reopened(path)
    assert (found[: len(whole)] == whole and found == intents[: len(found)]) or not garbage


class Records:
    """A keeper whose items are records, and which remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str], Exception | None]] = []
        self.full = False

    def promised(self, items: list[CallRecord], error: Exception | None) -> None:
        self.told.append(("promised", [item.id for item in items], error))

    def write(self, store: apsw.Connection, items: list[CallRecord]) -> None:
        if self.full:
            raise apsw.FullError("no room")
        calls.begin_all(store, [(item, False) for item in items])

    def kept(self, items: list[CallRecord], error: Exception | None) -> None:
        self.told.append(("kept", [item.id for item in items], error))


def test_promises_are_kept_by_the_tables_and_forgotten_by_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        assert database.open_intents(keeper) == []
        one = record("one")
        database.ahead.promise(intent_of(one), one, at_once=True)
        assert keeper.told == [("promised", ["one"], None)]
        found = await database.read(lambda store: calls.find(store, "one"))
        assert found == one and keeper.told == [("promised", ["one"], None), ("kept", ["one"], None)]
        await database.close()
        again = Database.open(tmp_path / "x.db")
        assert again.open_intents(keeper) == []
        await again.close()

    asyncio.run(run())


def test_more_than_the_log_holds_goes_through_both_halves(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        database.open_intents(keeper)
        for group in range(40):
            for number in range(20):
                large = record(f"{group}/{number}", args=b'"%s"' % (b"x" * 10_000))
                database.ahead.promise(intent_of(large), large)
            while sum(len(ids) for kind, ids, error in keeper.told if kind == "promised") < 20 * (group + 1):
                await asyncio.sleep(0)
        assert {error for _, _, error in keeper.told} == {None}
        assert len(await database.read(calls.open_calls)) == 800
        await database.close()

    asyncio.run(run())


def test_an_intent_is_taken_up_only_where_the_tables_lack_it(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        open_one, ended = record("a"), record("a", state=CallState.OK, ended_at=5, result=msgspec.Raw(b'{"n":1}'))
        failed = record("b", state=CallState.ERROR, ended_at=7, error_kind="failed", error_message="no")
        for intent in (open_one, open_one, ended, ended, open_one, failed):
            await database.write(lambda store, intent=intent: calls.take_up(store, intent_of(intent)))
        found = {name: await database.read(lambda store, name=name: calls.find(store, name)) for name in "ab"}
        assert found == {"a": ended, "b": failed}
        await database.close()

    asyncio.run(run())


def test_what_the_tables_would_not_take_is_kept_for_the_next_start(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        database.open_intents(keeper)
        one = record("one")
        keeper.full = True
        assert database.ahead.tell(intent_of(one), one), "the system has it"
        await database.read(lambda _: None)
        assert [(kind, ids) for kind, ids, _ in keeper.told] == [("kept", ["one"])]
        assert isinstance(keeper.told[0][2], StoreError)
        keeper.full = False
        two = record("two")
        assert not database.ahead.tell(intent_of(two), two), "nobody may be told before the tables have it"
        await database.read(lambda _: None)
        assert keeper.told[-1] == ("kept", ["two"], None)
        await database.close()
        again = Database.open(tmp_path / "x.db")
        assert again.open_intents(keeper) == [intent_of(one)]
        await again.close()

    asyncio.run(run())


def test_one_that_the_tables_will_not_take_is_told_alone(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        database.open_intents(keeper)
        for name in ("a", "b", "b", "c"):
            database.ahead.tell(intent_of(record(name)), record(name))
        found = await database.read(calls.open_calls)
        assert [call.id for call in found] == ["a", "b", "c"]
        (kind, ids, error), rest = keeper.told
        assert (kind, ids) == ("kept", ["b"]) and isinstance(error, apsw.ConstraintError)
        assert rest == ("kept", ["a", "b", "c"], None)
        starts = await database.read(lambda store: store.execute("SELECT subject FROM events").fetchall())
        assert [subject for (subject,) in starts] == ["a", "b", "c"]
        await database.close()

    asyncio.run(run())


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, intent_of
from farhand.store.sqlite.database import Database

class Records:
    def write(self, store, items):
        calls.begin_all(store, [(item, False) for item in items])

    def kept(self, items, error):
        pass

async def main():
    database = Database.open(Path(sys.argv[1]))
    database.open_intents(Records())
    for number in range(500):
        one = CallRecord(id=str(number), tool="t", credential="c", route="node", created_at=1, deadline_at=2)
        database.ahead.tell(intent_of(one), one)
        if number == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 50 == 0:
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize("last", [0, 57, 333])
def test_a_killed_process_leaves_everything_it_wrote(tmp_path: Path, last: int) -> None:
    path = tmp_path / "x.db"
    subprocess.run([sys.executable, "-c", KILLED, str(path), str(last)], check=False)

    async def run() -> None:
        database = Database.open(path)
        for intent in database.open_intents(Records()):
            await database.write(lambda store, intent=intent: calls.take_up(store, intent), durable=False)
        assert {call.id for call in await database.read(calls.open_calls)} == {str(n) for n in range(last + 1)}
        await database.close()

    asyncio.run(run())


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / f"x.db{PROMISES_SUFFIX}").mkdir()
    database = Database.open(tmp_path / "x.db")
    with pytest.raises(StoreError, match=r"x\.db-promises"):
        database.open_intents(Records())
