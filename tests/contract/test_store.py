"""What every engine of the store promises. A new engine adds itself to `ENGINES`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import psycopg
import pytest

from farhand.gateway.sessions.old_chats import move_old_chats
from farhand.protocol.errors import NotFound
from farhand.store.journal.events import append_event, events_after, last_event
from farhand.store.ports import IntegrityError, Store, StoreError, Tx
from farhand.store.postgres.store import PostgresStore
from farhand.store.sqlite.migrations import MIGRATIONS
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables import chats
from farhand.store.tables.sessions import find_session, newest_entries
from tests.support.fleet_servers import PostgresServer

TOKENS = "INSERT INTO meta (key, value) VALUES (?, ?)"


class Engine(NamedTuple):
    # Opens the store of a folder.
    open: Callable[[Path], Store]
    # The same as source text, for another process: `open(folder)`.
    source: str
    # Makes a closed store look like one of a newer version.
    age: Callable[[Path], None]


def newer_sqlite(folder: Path) -> None:
    connection = apsw.Connection(str(folder / "x.db"))
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()


SQLITE = """
from farhand.store.sqlite.store import SqliteStore
def open(folder):
    return SqliteStore.open(folder / "x.db")
"""
POSTGRES = """
from farhand.store.postgres.store import PostgresStore
def open(folder):
    return PostgresStore.open({url!r}, b"k" * 32)
"""


def sqlite_engine(_: pytest.FixtureRequest) -> Engine:
    return Engine(lambda folder: SqliteStore.open(folder / "x.db"), SQLITE, newer_sqlite)


def postgres_engine(request: pytest.FixtureRequest) -> Engine:
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.new_database()

    def newer(_: Path) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE schema_steps SET done = done + 1 WHERE part = 'tables'")

    return Engine(lambda _: PostgresStore.open(url, b"k" * 32), POSTGRES.format(url=url), newer)


ENGINES = {"sqlite": sqlite_engine, "postgres": postgres_engine}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param](request)


@pytest.fixture
def on_store(engine: Engine, tmp_path: Path) -> Callable[[Callable[[Store], Coroutine[Any, Any, None]]], None]:
    def run(test: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            store = engine.open(tmp_path)
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(main())

    return run


OnStore = Callable[[Callable[[Store], Coroutine[Any, Any, None]]], None]


def note(subject: str) -> Callable[[Tx], int]:
    return lambda tx: append_event(tx, 1, "test", subject, {})


def subjects(tx: Tx) -> list[str]:
    return [event.subject for event in events_after(tx, 0, 100_000)]


def settings(tx: Tx) -> dict[str, str]:
    return dict(tx.execute("SELECT key, value FROM meta WHERE key LIKE 'k%'").fetchall())


def test_an_operation_returns_its_value(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        assert await store.write(note("one")) == 1
        assert await store.write(last_event) == 1

    on_store(test)


def test_operations_run_in_the_order_of_the_calls(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        writes = [store.write(note(str(number)), durable=number % 3 == 0) for number in range(500)]
        assert await asyncio.gather(*writes) == list(range(1, 501))
        assert await store.read(subjects) == [str(number) for number in range(500)]

    on_store(test)


def test_a_read_sees_everything_written_before_it(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        for number in range(50):
            store.write(note(str(number)), durable=False)
            assert len(await store.read(subjects)) == number + 1

    on_store(test)


def test_a_read_sees_one_moment(on_store: OnStore) -> None:
    started, go_on = threading.Event(), threading.Event()

    def twice(tx: Tx) -> tuple[int, int]:
        first = last_event(tx)
        started.set()
        assert go_on.wait(10)
        return first, last_event(tx)

    async def test(store: Store) -> None:
        await store.write(note("one"))
        reading = asyncio.ensure_future(store.read(twice))
        await asyncio.to_thread(started.wait, 10)
        await store.write(note("two"))
        go_on.set()
        assert await reading == (1, 1)

    on_store(test)


def test_a_failing_operation_leaves_nothing_and_does_not_affect_others(on_store: OnStore) -> None:
    def half_done(tx: Tx) -> None:
        tx.execute(TOKENS, ("k-half", "1"))
        append_event(tx, 1, "test", "half", {})
        raise NotFound("no such thing")

    async def test(store: Store) -> None:
        results = await asyncio.gather(
            store.write(note("before")), store.write(half_done), store.write(note("after")), return_exceptions=True
        )
        assert results[0] == 1 and results[2] == 2, "a failing operation uses no id of the journal"
        assert isinstance(results[1], NotFound)
        assert await store.read(subjects) == ["before", "after"]
        assert await store.read(settings) == {}

    on_store(test)


def test_a_broken_constraint_is_an_integrity_error_of_its_own_operation(on_store: OnStore) -> None:
    def twice(tx: Tx) -> None:
        tx.execute(TOKENS, ("k", "first"))
        tx.executemany(TOKENS, [("k2", "second"), ("k", "third")])

    async def test(store: Store) -> None:
        results = await asyncio.gather(store.write(note("a")), store.write(twice), return_exceptions=True)
        assert results[0] == 1 and isinstance(results[1], IntegrityError)
        assert await store.read(settings) == {}
        with pytest.raises(IntegrityError):
            await store.write(twice)

    on_store(test)


def test_errors_of_the_engine_are_store_errors(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(StoreError):
            await store.write(lambda tx: tx.execute("SELECT * FROM nowhere").fetchall())
        with pytest.raises(StoreError):
            await store.read(lambda tx: tx.execute("SELECT * FROM nowhere").fetchall())
        with pytest.raises(StoreError):
            await store.read(note("a query cannot write"))
        assert await store.write(note("on")) == 1

    on_store(test)


def test_statements_tell_how_many_rows_they_changed(on_store: OnStore) -> None:
    def change(tx: Tx) -> list[int]:
        tx.executemany(TOKENS, [("k1", "a"), ("k2", "a"), ("k3", "b")])
        tx.execute("UPDATE meta SET value = 'c' WHERE key LIKE 'k%' AND value = 'a'")
        updated = tx.changes()
        tx.execute("DELETE FROM meta WHERE key = 'none'")
        return [updated, tx.changes()]

    async def test(store: Store) -> None:
        assert await store.write(change) == [2, 0]

    on_store(test)


def test_any_text_and_bytes_come_back(on_store: OnStore) -> None:
    texts = ["", "a\0b", "\U0010fffd0", "\U0010fffd\0", "é\U0001f600", "%s $1 ?"]

    def keep(tx: Tx) -> list[str]:
        tx.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", [(f"k{n}", text) for n, text in enumerate(texts)])
        append_event(tx, 1, "test", "a\0b", {})
        rows = tx.execute("SELECT value FROM meta WHERE key LIKE 'k%' AND value <> '?' ORDER BY key")
        return [row[0] for row in rows]

    async def test(store: Store) -> None:
        assert await store.write(keep) == texts
        assert await store.read(subjects) == ["a\0b"]

    on_store(test)


def test_the_loop_continues_while_an_operation_runs(on_store: OnStore) -> None:
    go_on = threading.Event()

    async def test(store: Store) -> None:
        writing = store.write(lambda _: go_on.wait(10))
        await asyncio.sleep(0.05)
        assert not writing.done()
        go_on.set()
        assert await writing

    on_store(test)


def test_a_caller_who_leaves_does_not_stop_the_write(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        store.write(note("left")).cancel()
        assert await store.write(note("stayed")) == 2

    on_store(test)


def test_watchers_are_woken_by_a_commit(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        woken = store.watch()
        assert not woken.is_set()
        await store.write(note("x"), durable=False)
        assert woken.is_set()
        woken.clear()
        store.unwatch(woken)
        await store.write(note("y"))
        assert not woken.is_set()

    on_store(test)


def test_a_query_waits_for_its_commit_before_and_after_the_first_write(on_store: OnStore) -> None:
    async def test(store: Store) -> None:
        assert store.query(note("first")) == 1
        store.write(note("second"), durable=False)
        assert store.query(note("third")) == 3
        with pytest.raises(ZeroDivisionError):
            store.query(lambda _: 1 // 0)
        assert await store.read(subjects) == ["first", "second", "third"]

    on_store(test)


def test_written_rows_exist_after_reopening(engine: Engine, tmp_path: Path) -> None:
    async def run() -> None:
        store = engine.open(tmp_path)
        await store.write(note("first"))
        store.write(note("second"), durable=False)
        await store.close()
        again = engine.open(tmp_path)
        assert again.query(subjects) == ["first", "second"]
        await again.close()

    asyncio.run(run())


def test_a_store_of_a_newer_version_is_refused_and_left_alone(engine: Engine, tmp_path: Path) -> None:
    asyncio.run(engine.open(tmp_path).close())
    engine.age(tmp_path)
    with pytest.raises(StoreError, match="newer Farhand"):
        engine.open(tmp_path)


KILLED = """
import asyncio, sys
from pathlib import Path
from farhand.store.journal.events import append_event

async def run():
    store = open(Path(sys.argv[1]))
    async def writer(name, durable):
        number = 0
        while True:
            def note(tx):
                return append_event(tx, 1, "test", f"{name}:{number}", {})
            await store.write(note, durable=durable)
            print(f"{name}:{number}", flush=True)
            number += 1
    await asyncio.gather(*(writer(name, name < "c") for name in "abcd"))

asyncio.run(run())
"""


def test_acknowledged_writes_survive_a_kill(engine: Engine, tmp_path: Path) -> None:
    """Durable or not: a kill of the process takes neither; the journal has no gap and no row twice."""
    acknowledged: set[str] = set()
    for _ in range(5):
        command = [sys.executable, "-c", engine.source + KILLED, str(tmp_path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        acknowledged |= {writer.stdout.readline().strip() for _ in range(200)}
        writer.send_signal(signal.SIGKILL)
        acknowledged |= set(writer.stdout.read().split("\n")[:-1])
        writer.wait()
        writer.stdout.close()
        store = engine.open(tmp_path)
        events = store.query(lambda tx: events_after(tx, 0, 1_000_000))
        assert acknowledged <= {event.subject for event in events}
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        asyncio.run(store.close())


def test_chats_of_earlier_versions_become_sessions(on_store: OnStore) -> None:
    def earlier(tx: Tx) -> None:
        for number in (1, 2):
            columns = "seq, id, session_id, user_id, channel, name, created_at"
            values = (number, f"chat-{number}", "s", f"u{number}", "console", "hello", 5)
            tx.execute(f"INSERT INTO chats ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            for role, text, at in (("system", "be brief", 5), ("user", "hello", 6), ("assistant", f"hi {number}", 7)):
                tx.execute(
                    "INSERT INTO chat_messages (chat, role, text, at) VALUES (?, ?, ?, ?)", (number, role, text, at)
                )

    async def test(store: Store) -> None:
        await store.write(earlier)
        for _ in range(2):
            await move_old_chats(store)
        assert await store.read(lambda tx: tx.execute("SELECT count(*) FROM chat_messages").fetchall()) == [(0,)]
        for number in (1, 2):
            chat = await store.read(lambda tx, number=number: chats.find(tx, f"chat-{number}"))
            assert chat is not None and chat.made_by == "owner"
            found = await store.read(lambda tx, chat=chat: list(newest_entries(tx, chat.session_key, chat.first_entry)))
            said = [json.loads(bytes(entry.message)) for entry in reversed(found)]
            assert [one["content"] for one in said] == ["be brief", "hello", f"hi {number}"]
            session = await store.read(lambda tx, chat=chat: find_session(tx, chat.session_key))
            assert session is not None and session.previous_ids == (chat.id,) and session.messages == 0
            assert {entry.session_id for entry in found} == {chat.id} and found[0].at == session.updated_at == 7
        listed = await store.read(lambda tx: chats.chats(tx, {"user_id": "u2"}, 9))
        assert [(one.id, one.updated_at) for one in listed] == [("chat-2", 7)]

    on_store(test)
