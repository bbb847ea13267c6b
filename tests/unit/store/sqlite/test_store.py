"""What is particular to SQLite: versions, syncs, checkpoints, failing disks, and logs of earlier versions."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from farhand.store.journal.events import append_event, events_after
from farhand.store.ports import StoreError, Tx
from farhand.store.sqlite.migrations import MIGRATIONS
from farhand.store.sqlite.store import SAFE_SQLITE, SYNC_SECONDS, SqliteStore, sqlite_version


def note(subject: str) -> Callable[[Tx], int]:
    return lambda tx: append_event(tx, 1, "test", subject, {})


def subjects(tx: Tx) -> list[str]:
    return [event.subject for event in events_after(tx, 0, 100_000)]


def nothing(_: Tx) -> None:
    pass


class CountedFile(apsw.VFSFile):
    def __init__(self, disk: CountedDisk, name: str, flags: list[int]) -> None:
        super().__init__("unix", name, flags)  # type: ignore[arg-type]
        self._disk = disk

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._disk.broken:
            error = apsw.IOError("injected")
            error.extendedresult = apsw.SQLITE_IOERR_FSYNC  # type: ignore[attr-defined]
            raise error
        self._disk.syncs += 1
        super().xSync(flags)


class CountedDisk(apsw.VFS):
    """Counts the syncs of every file, and fails them once it is `broken`."""

    def __init__(self) -> None:
        super().__init__("counted", "unix", makedefault=True)
        self.syncs = 0
        self.broken = False

    def xOpen(self, name: str, flags: list[int]) -> CountedFile:  # type: ignore[override]  # noqa: N802
        return CountedFile(self, name, flags)


@pytest.fixture
def disk() -> Iterator[CountedDisk]:
    disk = CountedDisk()
    yield disk
    disk.unregister()


def test_the_bundled_sqlite_is_one_without_the_log_reset_bug() -> None:
    assert sqlite_version() >= SAFE_SQLITE


def test_writes_that_are_queued_together_share_one_commit(tmp_path: Path) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")
        await store.write(nothing)
        before = store.commits
        await asyncio.gather(*(store.write(note(str(number))) for number in range(500)))
        assert store.commits - before <= 10
        await store.close()

    asyncio.run(run())


def test_durable_commits_are_synced_and_others_soon_after(tmp_path: Path, disk: CountedDisk) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")

        async def synced(write: Callable[[Tx], object], *, durable: bool) -> int:
            before = disk.syncs
            await store.write(write, durable=durable)
            return disk.syncs - before

        await store.write(note("first"))
        for _ in range(3):
            assert await synced(note("durable"), durable=True) == 1
        assert await synced(note("not durable"), durable=False) == 0
        assert await synced(nothing, durable=True) == 1, "nothing new, but the commit before is not on disk yet"
        assert await synced(nothing, durable=True) == 0, "everything is on disk"
        before = disk.syncs
        await store.write(note("left alone"), durable=False)
        await asyncio.sleep(3 * SYNC_SECONDS)
        assert disk.syncs == before + 1
        await store.close()

    asyncio.run(run())


def test_a_disk_that_loses_a_write_is_not_trusted_again(tmp_path: Path, disk: CountedDisk) -> None:
    """After a failed sync the kernel may report lost pages as written, so a later success proves nothing."""

    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")
        await store.write(note("kept"))
        disk.broken = True
        with pytest.raises(StoreError, match="a write to the disk failed"):
            await store.write(note("lost"))
        disk.broken = False
        assert not store.healthy
        with pytest.raises(StoreError):
            await store.write(note("later"))
        assert "kept" in await store.read(subjects)
        await store.close()

    asyncio.run(run())


def test_a_full_disk_is_an_error_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:

        async def run() -> None:
            store = SqliteStore.open(mount / "x.db")
            acknowledged = 0
            with pytest.raises(StoreError, match="could not be written"):
                for _ in range(1000):
                    await store.write(note("x" * 5000))
                    acknowledged += 1
            assert acknowledged
            assert len(await store.read(subjects)) == acknowledged
            await store.close()

        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_file_that_is_not_a_database_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"this is not a database, " * 100)
    with pytest.raises(StoreError, match=r"x\.db"):
        SqliteStore.open(path)
    assert path.read_bytes().startswith(b"this is not")


def test_every_migration_is_applied_once(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "x.db")
    assert store.query(lambda tx: tx.execute("PRAGMA user_version").fetchall()) == [(len(MIGRATIONS),)]
    asyncio.run(store.close())
    asyncio.run(SqliteStore.open(tmp_path / "x.db").close())


def test_the_log_is_copied_back_so_that_it_does_not_grow_without_end(tmp_path: Path) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")
        for _ in range(60):
            await asyncio.gather(*(store.write(note("x" * 20_000)) for _ in range(50)))
        assert (tmp_path / "x.db").stat().st_size > 20_000_000
        assert (tmp_path / "x.db-wal").stat().st_size < 40_000_000
        await store.close()

    asyncio.run(run())


def test_events_of_another_process_are_kept_and_continued(tmp_path: Path) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "x.db")
        assert await store.write(note("ours")) == 1
        other = apsw.Connection(str(tmp_path / "x.db"))
        other.execute("INSERT INTO events (id, at, kind, subject, data) VALUES (2, 1, 'test', 'theirs', x'7b7d')")
        other.close()
        assert await asyncio.gather(store.write(note("next")), store.write(note("last"))) == [3, 4]
        assert await store.read(subjects) == ["ours", "theirs", "next", "last"]
        await store.close()

    asyncio.run(run())
