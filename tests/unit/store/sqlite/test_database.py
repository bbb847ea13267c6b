"""The store: one writer, group commit, durability, migrations, and what happens when the disk says no."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from farhand.store.journal.events import append_event, events_after, last_event
from farhand.store.sqlite.database import SAFE_SQLITE, Database, StoreError, sqlite_version
from farhand.store.sqlite.migrations import MIGRATIONS


def note(subject: str) -> Any:
    return lambda store: append_event(store, 1, "test", subject, {})


def subjects(store: apsw.Connection) -> list[str]:
    return [event.subject for event in events_after(store, 0, 100_000)]


def test_the_bundled_sqlite_is_one_without_the_log_reset_bug() -> None:
    assert sqlite_version() >= SAFE_SQLITE


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        await database.write(note("first"))
        await database.write(note("second"), durable=False)
        await database.close()
        again = Database.open(tmp_path / "x.db")
        assert again.query(subjects) == ["first", "second"]
        await again.close()

    asyncio.run(run())


def test_writers_of_one_turn_share_one_commit_and_keep_their_order(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        await asyncio.gather(*(database.write(note(str(number))) for number in range(500)))
        assert database.commits == 1
        assert await database.read(subjects) == [str(number) for number in range(500)]
        await database.close()

    asyncio.run(run())


def test_what_went_ahead_keeps_its_order_while_the_log_is_folded(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        await database.write(note("before"))
        database._hold(threading.Event())
        others = [database.write(note("other 1"))]
        for number in range(3):
            database.write_first(note(f"ahead {number}"), lambda *_: None)
            database.commit()
        others.append(database.write(note("other 2")))
        database._release()
        await asyncio.gather(*others)
        database.write_first(note("later"), lambda *_: None)
        await database.write(note("last"))
        ahead = [f"ahead {number}" for number in range(3)]
        assert database.query(subjects) == ["before", *ahead, "other 1", "other 2", "later", "last"]
        await database.close()

    asyncio.run(run())


def test_an_operation_that_fails_does_not_take_its_group_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")

        def bad(_store: apsw.Connection) -> None:
            raise ValueError("no")

        results = await asyncio.gather(
            database.write(note("before")), database.write(bad), database.write(note("after")), return_exceptions=True
        )
        assert isinstance(results[1], ValueError)
        assert await database.read(subjects) == ["before", "after"]
        await database.close()

    asyncio.run(run())


def test_a_value_comes_back_from_the_operation(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        await database.write(note("one"))
        assert await database.write(last_event) == 1
        await database.close()

    asyncio.run(run())


def test_watchers_are_woken_by_a_commit(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        woken = database.watch()
        assert not woken.is_set()
        await database.write(note("x"), durable=False)
        assert woken.is_set()
        database.unwatch(woken)
        await database.close()

    asyncio.run(run())


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    asyncio.run(Database.open(path).close())
    connection = apsw.Connection(str(path))
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(StoreError, match="newer Farhand"):
        Database.open(path)


def test_a_file_that_is_no_database_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"this is not a database, " * 100)
    with pytest.raises(StoreError, match=r"x\.db"):
        Database.open(path)
    assert path.read_bytes().startswith(b"this is not")


def test_every_migration_is_applied_once(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "x.db")
    assert database.query(lambda store: store.pragma("user_version")) == len(MIGRATIONS)
    asyncio.run(database.close())
    asyncio.run(Database.open(tmp_path / "x.db").close())


def test_a_disk_that_loses_a_write_is_not_trusted_again(tmp_path: Path) -> None:
    """After a failed sync the kernel may call lost pages clean, so a later success would be a lie."""

    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        await database.write(note("kept"))
        os.close(database._log)  # the next sync fails as a broken disk's would: with an OSError
        with pytest.raises(StoreError, match="did not take a write"):
            await database.write(note("lost"))
        assert not database.healthy
        with pytest.raises(StoreError):
            await database.write(note("later"))
        database._log = os.open(os.devnull, os.O_RDONLY)  # for close
        await database.close()

    asyncio.run(run())


def test_a_full_disk_is_an_error_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:

        async def run() -> None:
            database = Database.open(mount / "x.db")
            acknowledged = 0
            with pytest.raises(StoreError, match="could not be written"):
                for _ in range(1000):
                    await database.write(lambda store: append_event(store, 1, "test", "x" * 5000, {}))
                    acknowledged += 1
            assert acknowledged
            assert len(await database.read(subjects)) == acknowledged
            await database.close()

        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(mount)], check=True)


KILLED = """
import asyncio, sys
from pathlib import Path
from farhand.store.sqlite.database import Database
from farhand.store.journal.events import append_event

async def run():
    database = Database.open(Path(sys.argv[1]))
    async def writer(name):
        number = 0
        while True:
            await database.write(lambda store: append_event(store, 1, "test", f"{name}:{number}", {}))
            print(f"{name}:{number}", flush=True)
            number += 1
    await asyncio.gather(*(writer(name) for name in "abcd"))

asyncio.run(run())
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    acknowledged: set[str] = set()
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        seen = [writer.stdout.readline().strip() for _ in range(200)]
        writer.send_signal(signal.SIGKILL)
        acknowledged |= set(seen)
        writer.wait()
        writer.stdout.close()
        database = Database.open(path)
        assert acknowledged <= set(database.query(subjects))
        assert database.query(lambda store: store.pragma("quick_check")) == "ok"
        asyncio.run(database.close())


def test_the_log_is_folded_back_so_that_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    async def run() -> None:
        database = Database.open(tmp_path / "x.db")
        for _ in range(60):
            await asyncio.gather(
                *(database.write(lambda store: append_event(store, 1, "test", "x" * 20_000, {})) for _ in range(50))
            )
        size = (tmp_path / "x.db").stat().st_size
        assert size > 20_000_000, "nothing was moved from the log into the database"
        await database.close()

    asyncio.run(run())
