"""Copies of the store while it is in use, and recovery of a damaged store.

A copy is complete, checked and has a digest beside it, or it does not exist. A damaged store is never repaired in
place: it is set aside, and the newest good copy replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import apsw
import msgspec

from farhand.machine.files.private_files import create_private, open_private, write_private
from farhand.store.history.seal_coverage import other_key
from farhand.store.journal.events import append_event
from farhand.store.journal.seal import KeptHead, forget_head, journal_end
from farhand.store.ports import StoreError, Tx
from farhand.store.sqlite.store import SqliteStore, damage_in
from farhand.store.tables import calls

log = logging.getLogger(__name__)

STORE_FILE = "farhand.db"
BACKUPS_FOLDER = "backups"
DAMAGED_FOLDER = "damaged"
REVOKED_FILE = "revoked-tokens"
# Exists while a home is being restored. Half of it may be old, and what the store holds as open may have ended.
RESTORING_FILE = "restoring"
# The same, while a copy takes the place of a damaged store.
RECOVERING_FILE = "recovering"
_STAMP = "%Y%m%dT%H%M%S%fZ"
# The time limit of the check at start-up; the rest of a larger store is checked with the next copy.
START_CHECK_SECONDS = 1.5
# Events since the copy are lost, but clients have seen their ids: new events skip these ids.
EVENT_GAP = 1_000_000
LOST = "outcome unknown: the store was restored from an earlier copy, and what happened since is not recorded"


class Snapshot(msgspec.Struct, frozen=True):
    """A verified copy of the store."""

    path: Path
    taken_at: int
    size: int


class Recovery(msgspec.Struct, frozen=True):
    """A store that was set aside, and the copy that replaced it; without `backup_at`, an empty store."""

    reason: str
    set_aside: str
    backup: str | None
    backup_at: int | None


def copy_store(source: Path, target: Path) -> str:
    """Copy a store, which may be in use, to the new file `target`; return its digest.

    The copy holds everything committed before the call. Raises StoreError, and leaves no target then.
    """
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with (
            contextlib.closing(apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READWRITE)) as origin,
            contextlib.closing(apsw.Connection(str(part))) as copy,
        ):
            origin.set_busy_timeout(5000)
            with copy.backup("main", origin, "main") as backup:
                while not backup.done:
                    backup.step(-1)
            copy.pragma("journal_mode", "delete")  # one file, complete in itself
        damage = damage_in(part)
        if damage is not None:
            raise StoreError(f"the copy of {source} is damaged: {damage}")
        return settle_file(part, target)
    except (apsw.Error, OSError) as error:
        raise StoreError(f"{source} could not be copied: {error}") from None
    finally:
        for left in (part, Path(f"{part}-journal")):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)


def settle_file(part: Path, target: Path) -> str:
    """Sync a complete file, rename it to `target`, and return its digest."""
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    part.replace(target)
    sync_folder(target.parent)
    return digest


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Snapshots:
    """The copies in one folder, newest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Snapshot]:
        for path in sorted(self._folder.glob("farhand-*.db"), reverse=True):
            with contextlib.suppress(OSError, ValueError):
                at = datetime.strptime(path.stem.removeprefix("farhand-"), _STAMP).replace(tzinfo=UTC)
                yield Snapshot(path, round(at.timestamp() * 1000), path.stat().st_size)

    def take(self, source: Path) -> Snapshot:
        """Copy `source`. Raises StoreError."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            free, needed = shutil.disk_usage(self._folder).free, source.stat().st_size
        except OSError as error:
            raise StoreError(f"no copy of the store can be kept in {self._folder}: {error.strerror}") from None
        if free < 2 * needed:
            raise StoreError(f"no copy of the store was taken: it has {needed} bytes, and only {free} are free")
        now = datetime.now(UTC)
        path = self._folder / f"farhand-{now.strftime(_STAMP)}.db"
        digest = copy_store(source, path)
        write_private(_digest_file(path), f"{digest}\n".encode())
        return Snapshot(path, round(now.timestamp() * 1000), path.stat().st_size)

    def rotate(self, keep: int) -> None:
        """Remove all but the newest `keep`."""
        for snapshot in list(self)[keep:]:
            snapshot.path.unlink(missing_ok=True)
            _digest_file(snapshot.path).unlink(missing_ok=True)

    def newest_good(self) -> Snapshot | None:
        """Return the newest copy that matches its digest and is not damaged."""
        for snapshot in self:
            if self._good(snapshot):
                return snapshot
            log.error("the copy %s of the store is damaged as well; trying an older one", snapshot.path)
        return None

    def _good(self, snapshot: Snapshot) -> bool:
        try:
            with snapshot.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return digest == _digest_file(snapshot.path).read_text().strip() and damage_in(snapshot.path) is None
        except OSError:
            return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def open_store(home: Path, now: int) -> tuple[SqliteStore, Recovery | None]:
    """Open the store of a home, replacing a damaged one by its newest good copy. Raises StoreError."""
    path = home / STORE_FILE
    if (home / RESTORING_FILE).exists():
        raise StoreError(f"restoring {home} was interrupted; run `farhand restore FILE` again")
    snapshots = Snapshots(home / BACKUPS_FOLDER)
    recovering = home / RECOVERING_FILE
    reason = "its recovery was interrupted" if recovering.exists() else None
    reason = reason or _damage(path, has_copies=any(True for _ in snapshots))
    if reason is None:
        return SqliteStore.open(path), None
    log.error("the store %s is damaged: %s", path, reason)
    backup = snapshots.newest_good()
    create_private(recovering)
    aside = set_aside(home, DAMAGED_FOLDER)
    if backup is not None:
        put_in_place(backup.path, path)
    kept = forget_head(home)
    database = SqliteStore.open(path, restored=True)
    recovery = Recovery(reason, str(aside), backup.path.name if backup else None, backup.taken_at if backup else None)
    facts = msgspec.to_builtins(recovery)
    database.query(lambda store: _settle_restored(store, now, "store.recovered", facts, kept))
    recovering.unlink()
    what = f"the copy {backup.path.name} took its place" if backup else "there is no good copy, so it begins empty"
    log.error("the damaged store was set aside in %s; %s", aside, what)
    return database, recovery


def _damage(path: Path, *, has_copies: bool) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is missing, though there are copies of it" if has_copies else None
    except OSError:
        return None  # opening it says what is the matter
    if size == 0:
        return "it is empty, though there are copies of it" if has_copies else None
    return damage_in(path, START_CHECK_SECONDS)


def set_aside(home: Path, name: str) -> Path:
    """Move the files of the store to a new folder in `<home>/<name>`."""
    folder = home / name / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    while folder.exists():
        folder = folder.with_name(f"{folder.name}-again")
    folder.mkdir(mode=0o700, parents=True)
    for suffix in ("", "-wal", "-shm", "-journal"):
        part = home / f"{STORE_FILE}{suffix}"
        if part.exists():
            part.replace(folder / part.name)
    sync_folder(folder)
    sync_folder(home)
    return folder


def put_in_place(copy: Path, path: Path) -> None:
    """Replace the store by a copy, which stays where it is. Raises StoreError."""
    part = path.with_name(f".{path.name}.part")
    try:
        create_private(part)
        shutil.copyfile(copy, part)
        settle_file(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"{copy} could not be put in the store's place: {error}") from None


def settle_restored(home: Path, now: int) -> None:
    """End what an older store that was restored holds as open. Raises StoreError."""
    kept = forget_head(home)
    database = SqliteStore.open(home / STORE_FILE, restored=True)
    try:
        database.query(lambda store: _settle_restored(store, now, "store.restored", {}, kept))
    finally:
        database.shut()


def _settle_restored(store: Tx, now: int, kind: str, data: dict[str, object], kept: KeptHead | None) -> None:
    """End everything that the copy holds as open, since it may have continued after the copy was taken.

    An event records the head of the copy's journal and the head before.
    """
    end, foreign = journal_end(store), other_key(store)
    for record in calls.open_calls(store):
        unknown = msgspec.structs.replace(
            record, state=calls.CallState.UNKNOWN, ended_at=now, error_kind="failed", error_message=LOST
        )
        calls.finish_unbegun(store, unknown)
    store.execute(
        "UPDATE transfers SET state = 'error', ended_at = ?, error_kind = 'failed', error_message = ? "
        "WHERE ended_at IS NULL",
        (now, LOST),
    )
    store.execute(
        "UPDATE runs SET state = 'failed', ended_at = ?, error_kind = 'failed', error_message = ? "
        "WHERE ended_at IS NULL",
        (now, LOST),
    )
    store.execute(
        "UPDATE cron_slots SET status = 'unknown', ended_at = ?, error = ? WHERE status IN ('waiting', 'running')",
        (now, LOST),
    )
    store.execute("UPDATE cron_jobs SET cursor = max(cursor, ?1), floor = max(floor, ?1)", (now,))
    journal = {
        "head": str(end),
        "head_before": None if kept is None else str(kept.head),
        "other_key": foreign,
    }
    append_event(store, now, "store.gap", "store", {}, skip=EVENT_GAP)
    append_event(store, now, kind, "store", {**data, "journal": journal})


# -- revoked tokens, which an older copy of the store must not restore ----------------------


def note_revoked(home: Path, token_id: str) -> None:
    with open_private(home / REVOKED_FILE, "a") as file:
        file.write(token_id + "\n")
        file.flush()
        os.fsync(file.fileno())


def revoked_tokens(home: Path) -> frozenset[str]:
    try:
        return frozenset((home / REVOKED_FILE).read_text().split())
    except FileNotFoundError:
        return frozenset()
