"""What the store on PostgreSQL promises beyond the contract of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from farhand.store.history.verify import verify_journal
from farhand.store.journal.events import append_event, events_after
from farhand.store.ports import EngineError, StoreError, Tx
from farhand.store.postgres.store import PostgresStore, shown_url
from tests.support.fleet_servers import PostgresServer, running_postgres
from tests.support.harness import Proxy

KEY = b"k" * 32


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A server that the tests of this module may stop."""
    with running_postgres() as server:
        yield server


def test_a_wrong_password_is_one_line_without_the_password(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError) as caught:
        PostgresStore.open(postgres.url("postgres", "wrong-secret"), KEY)
    said = str(caught.value)
    assert "password authentication failed" in said
    assert "wrong-secret" not in said and "\n" not in said


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@127.0.0.1:1/x",
        "postgresql://u:s3cret@127.0.0.1:notaport/x",
        "postgresql://u:s3cret@[::1/x",
        "postgresql://u:s3cret@nowhere.invalid/x",
        "postgresql://u:s3cret@127.0.0.1:1/x?nosuchoption=1",
    ],
)
def test_an_address_that_does_not_work_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        PostgresStore.open(url, KEY)
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_password_is_left_out_of_a_shown_url() -> None:
    assert shown_url("postgresql://u:p%40ss@h:1/db?x=1") == "postgresql://u@h:1/db?x=1"
    assert shown_url("postgresql://h/db") == "postgresql://h/db"


def test_a_gateway_with_another_key_is_refused(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore.open(url, KEY).shut()
    with pytest.raises(StoreError, match=r"journal\.key"):
        PostgresStore.open(url, b"x" * 32)
    PostgresStore.open(url, KEY).shut()


def test_two_gateways_write_one_journal(postgres: PostgresServer) -> None:
    """Their groups follow one another: no id twice, no gap, and every seal matches."""
    url = postgres.new_database()

    async def run() -> None:
        stores = [PostgresStore.open(url, KEY) for _ in range(3)]

        def note(tx: Tx) -> int:
            return append_event(tx, 1, "test", "x", {})

        ids = await asyncio.gather(*(store.write(note, durable=n % 2 == 0) for n in range(200) for store in stores))
        assert sorted(ids) == list(range(1, 601))
        found = await stores[0].read(lambda tx: events_after(tx, 0, 1000))
        assert [event.id for event in found] == list(range(1, 601))
        report = await stores[1].read(lambda tx: verify_journal(tx, stores[1].sealer, None))
        assert report.faults == [] and report.checked == 600
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_a_restart_of_the_server_loses_and_repeats_nothing(own_postgres: PostgresServer) -> None:
    url = own_postgres.new_database()

    async def run() -> None:
        store = PostgresStore.open(url, KEY)
        written: set[str] = set()
        refused: set[str] = set()
        stop = asyncio.Event()

        async def writer(name: str) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                subject = f"{name}:{number}"
                try:
                    await store.write(lambda tx: append_event(tx, 1, "test", subject, {}))  # noqa: B023
                    written.add(subject)
                except EngineError:
                    refused.add(subject)
                    await asyncio.sleep(0.01)

        writers = [asyncio.ensure_future(writer(name)) for name in "abcd"]
        for _ in range(3):
            before = len(written)
            while len(written) < before + 50:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_postgres.stop)
            assert (await asyncio.gather(store.write(lambda _: None), return_exceptions=True))[0] is not None
            with pytest.raises(StoreError):
                await store.read(lambda tx: events_after(tx, 0, 1))
            assert not store.healthy
            await asyncio.to_thread(own_postgres.start)
            async with asyncio.timeout(60):
                while not store.healthy:
                    await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*writers)
        found = [event.subject for event in await store.read(lambda tx: events_after(tx, 0, 1_000_000))]
        assert len(found) == len(set(found))
        assert written == set(found), "written means stored, refused means not stored"
        assert refused
        await store.close()

    asyncio.run(run())


def test_the_connections_of_readers_are_replaced(postgres: PostgresServer) -> None:
    url = postgres.new_database()

    async def run() -> None:
        store = PostgresStore.open(url, KEY)
        pids = {await store.read(lambda tx: tx.execute("SELECT pg_backend_pid()").fetchall()[0][0]) for _ in range(8)}
        with psycopg.connect(url) as connection:
            for pid in pids:
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        results = await asyncio.gather(*(store.read(lambda _: 1) for _ in range(8)), return_exceptions=True)
        assert set(await asyncio.gather(*(store.read(lambda _: 1) for _ in range(4)))) == {1}
        assert all(result == 1 or isinstance(result, StoreError) for result in results)
        await store.close()

    asyncio.run(run())


def test_a_server_lost_during_the_commit_of_a_query_is_an_error(postgres: PostgresServer) -> None:
    """A gateway that starts makes queries before its writer runs: it must fail, not wait forever."""
    with Proxy(postgres.port) as relay:
        store = PostgresStore.open(postgres.new_database().replace(f":{postgres.port}/", f":{relay.port}/"), KEY)
        with pytest.raises(EngineError, match="not available"):
            store.query(lambda _: relay.cut(refuse=True))  # the commit is all that is left
        store.shut()
