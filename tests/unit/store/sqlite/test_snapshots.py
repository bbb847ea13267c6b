"""Copies of a store in use, and archives that are not what they say."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import tarfile
import zlib
from functools import partial
from pathlib import Path

import apsw
import pytest

from farhand.protocol.errors import FarhandError
from farhand.store.journal.seal import KEY_FILE
from farhand.store.ports import StoreError
from farhand.store.sqlite.archive import MANIFEST, ArchiveError, pack, restore
from farhand.store.sqlite.snapshots import Snapshots, copy_store, open_store
from farhand.store.sqlite.store import SqliteStore, damage_in
from farhand.store.tables.access.tokens import set_meta


def make_store(path: Path, rows: int = 500) -> None:
    async def fill() -> None:
        database = SqliteStore.open(path)
        await database.write(lambda store: [set_meta(store, f"key{number}", "x" * 200) for number in range(rows)])
        await database.close()

    asyncio.run(fill())


def count(path: Path) -> int:
    connection = apsw.Connection(str(path))
    try:
        return int(connection.execute("SELECT count(*) FROM meta WHERE key LIKE 'key%'").fetchall()[0][0])
    finally:
        connection.close()


def spoil(path: Path) -> None:
    """Overwrite pages in the middle, as a failing disk would."""
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 12)


def test_a_copy_taken_under_writers_is_whole_and_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "farhand.db"

    async def scenario() -> list[tuple[int, Path]]:
        database = SqliteStore.open(path)
        taken = []
        done = 0
        stop = asyncio.Event()

        async def write() -> None:
            nonlocal done
            while not stop.is_set():
                await database.write(partial(set_meta, key=f"key{done}", value="y" * 300))
                done += 1

        writer = asyncio.create_task(write())
        for turn in range(8):
            while done < 50 * (turn + 1):
                await asyncio.sleep(0)
            before, target = done, tmp_path / f"copy{turn}.db"
            await asyncio.to_thread(copy_store, path, target)
            taken.append((before, target))
        stop.set()
        await writer
        await database.close()
        return taken

    taken = asyncio.run(scenario())
    for before, copy in taken:
        assert damage_in(copy) is None and count(copy) >= before
        assert copy.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*part*"))


def test_the_newest_copy_that_is_good_is_found_and_old_ones_go(tmp_path: Path) -> None:
    make_store(tmp_path / "farhand.db")
    snapshots = Snapshots(tmp_path / "backups")
    first, second, third, fourth = (snapshots.take(tmp_path / "farhand.db") for _ in range(4))
    assert [snapshot.path for snapshot in snapshots] == [one.path for one in (fourth, third, second, first)]
    spoil(fourth.path)
    third.path.write_bytes(b"")
    assert snapshots.newest_good() == second
    snapshots.rotate(2)
    assert {path.name for path in (tmp_path / "backups").iterdir()} == {
        name for one in (fourth, third) for name in (one.path.name, one.path.with_suffix(".sha256").name)
    }


def test_a_damaged_store_is_not_copied(tmp_path: Path) -> None:
    make_store(tmp_path / "farhand.db")
    spoil(tmp_path / "farhand.db")
    with pytest.raises(Exception, match=r"damaged|could not be copied"):
        copy_store(tmp_path / "farhand.db", tmp_path / "copy.db")
    assert sorted(path.name for path in tmp_path.iterdir() if "copy" in path.name) == []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / "agents" / "main").mkdir(parents=True)
    make_store(folder / "farhand.db")
    (folder / "token").write_text("fho_secret\n")
    (folder / "token").chmod(0o600)
    (folder / "agents" / "main" / "SOUL.md").write_text("kind")
    (folder / "agents" / "main" / "outside").symlink_to("/etc/passwd")
    (folder / "lock").touch()
    return folder


def test_a_home_comes_back_as_it_was(home: Path, tmp_path: Path) -> None:
    packed = pack(home, tmp_path / "b.tar.gz", "1")
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    assert packed.skipped == ["agents/main/outside"], "a link is not followed out of the home"
    (home / "agents" / "main" / "SOUL.md").write_text("changed")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for target in (home, elsewhere):
        restore(tmp_path / "b.tar.gz", target)
        assert (target / "agents/main/SOUL.md").read_text() == "kind" and count(target / "farhand.db") == 500
        assert (target / "token").read_text() == "fho_secret\n" and (target / "token").stat().st_mode & 0o777 == 0o600
    [replaced] = (home / "replaced").iterdir()
    assert (replaced / "agents/main/SOUL.md").read_text() == "changed" and (replaced / "farhand.db").exists()


def test_a_home_that_was_restored_halfway_is_not_used(home: Path, tmp_path: Path) -> None:
    """Its store is the old one, and what that holds as open has not been ended: it would be started again."""
    copy_store(home / "farhand.db", tmp_path / "copy.db")
    key = (home / KEY_FILE).read_bytes()
    (home / KEY_FILE).write_bytes(b"too short")  # the store is put in place, and then cannot be opened
    with pytest.raises(FarhandError):
        restore(tmp_path / "copy.db", home)
    (home / KEY_FILE).write_bytes(key)
    with pytest.raises(StoreError, match="interrupted"):
        open_store(home, 1)
    restore(tmp_path / "copy.db", home)
    database, _ = open_store(home, 1)
    database.shut()


def test_an_interrupted_recovery_begins_again(home: Path) -> None:
    Snapshots(home / "backups").take(home / "farhand.db")
    spoil(home / "farhand.db")
    key = (home / KEY_FILE).read_bytes()
    (home / KEY_FILE).write_bytes(b"too short")  # the copy is put in place, and then cannot be opened
    with pytest.raises(FarhandError):
        open_store(home, 1)
    (home / KEY_FILE).write_bytes(key)
    for again in (True, False):
        database, recovery = open_store(home, 1)
        database.shut()
        assert (recovery is not None) is again
    assert count(home / "farhand.db") == 500


@pytest.mark.parametrize("where", ["agents/main/notes", "agents/main", "agents"])
def test_a_restored_file_does_not_follow_a_link_of_an_agent(home: Path, tmp_path: Path, where: str) -> None:
    """A command in the workspace can replace a folder since the backup, but only within its sandbox."""
    (home / "agents/main/notes").mkdir()
    (home / "agents/main/notes/file").write_text("of the agent")
    pack(home, tmp_path / "b.tar.gz", "1")
    outside = tmp_path / "outside"
    beyond = outside / Path("agents/main/notes/file").relative_to(where)
    beyond.parent.mkdir(parents=True)
    beyond.write_text("of the owner")
    (home / where).rename(tmp_path / "gone")
    (home / where).symlink_to(outside)
    restore(tmp_path / "b.tar.gz", home)
    assert beyond.read_text() == "of the owner" and [one.name for one in beyond.parent.iterdir()] == ["file"]
    assert (home / "agents/main/notes/file").read_text() == "of the agent" and not (home / where).is_symlink()
    [replaced] = (home / "replaced").iterdir()
    assert (replaced / where).readlink() == outside


def test_no_file_of_an_agent_prevents_a_backup(home: Path, tmp_path: Path) -> None:
    folder = home / "agents/main"
    (folder / "not\udcffutf8").touch()
    (folder / "no-database.db").write_text("no database")
    (folder / "linked\udcff").symlink_to(tmp_path)
    packed = pack(home, tmp_path / "b.tar.gz", "1")
    assert sorted(packed.skipped)[1:] == ["agents/main/not\\udcffutf8", "agents/main/outside"]
    assert "agents/main/no-database.db" in restore(tmp_path / "b.tar.gz", home).files


def test_a_file_that_waits_in_the_place_of_a_backup_does_not_get_it(home: Path, tmp_path: Path) -> None:
    """Another user may have made it, in a folder of several users."""
    (tmp_path / ".b.tar.gz.part").touch()
    (tmp_path / ".b.tar.gz.part").chmod(0o666)
    (tmp_path / ".c.tar.gz.part").symlink_to(tmp_path / "caught")
    for name in ("b.tar.gz", "c.tar.gz"):
        pack(home, tmp_path / name, "1")
        assert (tmp_path / name).lstat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "caught").exists()


def test_a_backup_with_any_byte_changed_changes_nothing(home: Path, tmp_path: Path) -> None:
    pack(home, tmp_path / "b.tar.gz", "1")
    whole = (tmp_path / "b.tar.gz").read_bytes()
    (home / "agents/main/SOUL.md").write_text("changed")
    tried = 0
    places = [*range(10, len(whole), max(1, len(whole) // 40))]
    for place in places:
        changed = whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]
        with contextlib.suppress(OSError, EOFError, zlib.error):
            if gzip.decompress(changed) == gzip.decompress(whole):
                continue  # another way to say the same
        (tmp_path / "bad").write_bytes(changed)
        with pytest.raises(ArchiveError):
            restore(tmp_path / "bad", home)
        (tmp_path / "bad").write_bytes(whole[:place])
        with pytest.raises(ArchiveError):
            restore(tmp_path / "bad", home)
        tried += 2
    assert (home / "agents/main/SOUL.md").read_text() == "changed" and not (home / "replaced").exists()
    assert not list(home.glob(".restore-*"))
    print(f"damaged backups: {tried} tried, {tried} refused")


@pytest.mark.parametrize("name", ["../escape", "/abs", "a/../../b", "lock", "backups/x.db"])
def test_a_name_that_leads_elsewhere_is_refused(home: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 4
        archive.addfile(member, io.BytesIO(b"evil"))
        archive.addfile(tarfile.TarInfo(MANIFEST))
    with pytest.raises(ArchiveError, match="not part of a backup"):
        restore(tmp_path / "evil.tar.gz", home)
    assert not (tmp_path / "escape").exists() and not (home / "replaced").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_plain_files_come_out_of_a_backup(home: Path, tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("agents/main/x")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(ArchiveError, match="not part of a backup"):
        restore(tmp_path / "evil.tar.gz", home)
