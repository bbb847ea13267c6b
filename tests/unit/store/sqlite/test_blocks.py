"""Blocks that go to the disk past the page cache: all of them or a reason, and a way out where that cannot be had."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from farhand.machine.files.direct_writes import BLOCK
from farhand.store.sqlite.ahead import PROMISES_SUFFIX
from farhand.store.sqlite.blocks import MOST_REGIONS, BlockWriter, Region, unable
from farhand.store.sqlite.database import Database
from farhand.store.sqlite.intents import HALF, IntentLog
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, intent_of

SIZE = 16 * BLOCK


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, SIZE) as memory:
        yield memory


@pytest.fixture
def writer(tmp_path: Path, memory: mmap.mmap) -> Iterator[BlockWriter]:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    try:
        writer = BlockWriter(path, memory)
    except OSError as error:
        pytest.skip(f"not to be had here: {error}")
    yield writer
    writer.close()


async def written(writer: BlockWriter, regions: list[Region]) -> OSError | None:
    told: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert writer.write(regions, told.set_result)
    assert not told.done(), "the loop goes on meanwhile"
    return await told


def test_regions_are_in_the_file_when_that_is_told(writer: BlockWriter, memory: mmap.mmap, tmp_path: Path) -> None:
    async def run() -> None:
        for turn in range(50):
            memory[:] = bytes([turn]) * SIZE
            first = turn % 8 * BLOCK
            regions = [(first, first + BLOCK), (10 * BLOCK, 13 * BLOCK)]
            assert await written(writer, regions) is None
            content = (tmp_path / "file").read_bytes()
            assert all(content[start:end] == memory[start:end] for start, end in regions)
            assert writer.took > 0
        assert writer.seconds > 0

    asyncio.run(run())


def test_one_who_wants_to_wait_is_told_before_it_goes_on(
    writer: BlockWriter, memory: mmap.mmap, tmp_path: Path
) -> None:
    memory[BLOCK : 2 * BLOCK] = b"x" * BLOCK
    told: list[OSError | None] = []
    writer.write_now([(BLOCK, 2 * BLOCK)], told.append)
    assert told == [None]
    assert (tmp_path / "file").read_bytes() == bytes(BLOCK) + b"x" * BLOCK + bytes(SIZE - 2 * BLOCK)


def test_what_the_kernel_will_not_write_is_told_and_the_next_is_written(writer: BlockWriter) -> None:
    async def run() -> None:
        refused: list[OSError | None] = []
        writer.write_now([(1, BLOCK)], refused.append)
        assert refused[0] is not None and unable(refused[0])
        told: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        if writer.write([(1, BLOCK)], told.set_result):
            error = await told
            assert error is not None and unable(error)
        assert await written(writer, [(0, BLOCK)]) is None

    asyncio.run(run())


def test_more_regions_than_go_at_once_are_not_begun(writer: BlockWriter) -> None:
    regions = [(number * BLOCK, (number + 1) * BLOCK) for number in range(MOST_REGIONS + 1)]
    assert not writer.write(regions, lambda _: pytest.fail("nothing was written"))


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, memory: mmap.mmap) -> None:
    with pytest.raises(FileNotFoundError):
        BlockWriter(tmp_path / "none", memory)


def test_a_program_of_32_bits_makes_no_system_calls_by_number(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    with pytest.raises(OSError, match="no asynchronous writes here"):
        BlockWriter(tmp_path / "file", memory)


def test_closing_waits_for_what_is_on_its_way_and_leaves_nothing_open(tmp_path: Path, memory: mmap.mmap) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))

    async def run() -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            writer = BlockWriter(tmp_path / "file", memory)
            memory[:] = os.urandom(SIZE)
            assert writer.write([(0, SIZE)], lambda _: pytest.fail("nobody is told"))
            writer.close()
            await asyncio.sleep(0)
            assert (tmp_path / "file").read_bytes() == memory[:]
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(run())


def test_each_group_of_intents_has_blocks_of_its_own(tmp_path: Path) -> None:
    log, _ = IntentLog.open(tmp_path / "log")
    assert log.take() == []
    log.add(b"x")
    log.add(b"y")
    assert log.take() == [(0, BLOCK)]
    log.add(b"z" * (BLOCK + 1))
    assert log.take() == [(BLOCK, 3 * BLOCK)]
    assert log.take() == []
    log.add(b"left behind")
    while log.add(bytes(HALF // 16)):
        pass
    log.turn()
    log.add(b"in the other half")
    left, other = log.take()
    assert left[0] == 3 * BLOCK and other == (HALF, HALF + BLOCK)
    log.close()


class Records:
    def __init__(self) -> None:
        self.promised_ids: list[str] = []
        self.errors: list[Exception | None] = []

    def promised(self, items: list[CallRecord], error: Exception | None) -> None:
        self.promised_ids += [item.id for item in items]
        self.errors.append(error)

    def write(self, store: apsw.Connection, items: list[CallRecord]) -> None:
        calls.begin_all(store, [(item, False) for item in items])

    def kept(self, items: list[CallRecord], error: Exception | None) -> None:
        pass


async def promise_many(database: Database, keeper: Records, count: int, at_once: bool) -> list[str]:
    ids = [f"call {number}" for number in range(count)]
    for number, name in enumerate(ids):
        one = CallRecord(id=name, tool="t", credential="owner", route="node", created_at=1, deadline_at=2)
        database.ahead.promise(intent_of(one), one, at_once=at_once)
        if number % 7 == 0:
            await asyncio.sleep(0)
    while len(keeper.promised_ids) < count:
        await asyncio.sleep(0.001)
    return ids


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("machine", [platform.machine(), "a machine nobody knows"])
def test_promises_are_in_the_log_when_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, at_once: bool
) -> None:
    """Past the page cache where that is to be had, else with a sync."""
    monkeypatch.setattr(platform, "machine", lambda: machine)

    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        database.open_intents(keeper)
        ids = await promise_many(database, keeper, 100, at_once)
        assert keeper.promised_ids == ids and set(keeper.errors) == {None}
        log, found = IntentLog.open(tmp_path / f"x.db{PROMISES_SUFFIX}")
        log.close()
        assert [name for name in ids if not any(b'"%s"' % name.encode() in intent for intent in found)] == []
        assert sum(database.syncs.counts) > 0
        await database.close()

    asyncio.run(run())


@pytest.mark.parametrize("flaw", ["refused at once", "refused later"])
def test_where_blocks_turn_out_not_to_work_promises_are_synced(tmp_path: Path, flaw: str) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        keeper = Records()
        database.open_intents(keeper)
        writer = database.ahead._writer
        if writer is None:
            pytest.skip("not to be had here")
        if flaw == "refused later":
            writer._address += 1
        else:
            reading, writing = os.pipe()
            os.dup2(reading, writer._file)
            os.close(reading)
            os.close(writing)
        ids = await promise_many(database, keeper, 20, at_once=False)
        assert keeper.promised_ids == ids and set(keeper.errors) == {None}
        await database.close()

    asyncio.run(run())
