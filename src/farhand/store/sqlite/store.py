"""The store on SQLite: one writer thread, group commit, numbered migrations.

The writer thread takes everything that is queued as one group: one transaction, one seal of the journal, one commit.
The commit is the promise: `synchronous` is FULL for a group with a durable operation and NORMAL for any other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import apsw

from farhand.machine.files.private_files import create_private
from farhand.store.group_commit import AnyFuture, GroupCommit, Result, Write
from farhand.store.history.seal_coverage import check_head
from farhand.store.journal.seal import HEAD_FILE, SealedJournal, load_key
from farhand.store.ports import EngineError, IntegrityError, Operation, Rows, Seals, StoreError, Tx
from farhand.store.sqlite.migrations import MIGRATIONS, SEALED

log = logging.getLogger(__name__)

T = TypeVar("T")

# Older versions can corrupt the write-ahead log when it is reset while two connections are open.
SAFE_SQLITE: Final = (3, 51, 3)
# The write-ahead log is copied into the database when it has more pages.
CHECKPOINT_PAGES: Final = 4000
# The most rows that one statement takes.
MOST_ROWS: Final = 32
# Commits that are not durable reach the disk after this time at the latest.
SYNC_SECONDS: Final = 0.2

DAMAGE: Final = (apsw.CorruptError, apsw.NotADBError)
# These concern one operation; any other error of the engine fails the whole group.
_OF_ONE_OPERATION: Final = (apsw.SQLError, apsw.RangeError)
_CONSTRAINTS: Final = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)


def translated(error: apsw.Error, path: Path | None = None) -> StoreError:
    """Return the StoreError for an error of the engine."""
    if isinstance(error, _CONSTRAINTS):
        return IntegrityError(str(error))
    kind = StoreError if isinstance(error, _OF_ONE_OPERATION) else EngineError
    return kind(f"the store {path} failed: {error}" if path else f"the store failed: {error}")


class SqliteTx:
    """A transaction on a connection of the store."""

    __slots__ = ("_connection", "_execute", "_executemany", "_journal", "changes")

    def __init__(self, connection: apsw.Connection, journal: SealedJournal | None = None) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._executemany = connection.executemany
        self.changes: Callable[[], int] = connection.changes
        self._journal = journal

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Rows:
        try:
            return cast(Rows, self._execute(sql, values))
        except apsw.Error as error:
            raise translated(error) from error

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        before = self._connection.total_changes()
        try:
            if _ONE_ROW.search(sql) is None:
                self._executemany(sql, rows)
            else:
                self._execute_sets(sql, list(rows))
        except apsw.Error as error:
            raise translated(error) from error
        return self._connection.total_changes() - before

    def _execute_sets(self, sql: str, rows: list[Sequence[Any]]) -> None:
        """Run a statement with VALUES for many rows at once: each run gives the interpreter lock away and has to wait
        for it again. There is a statement for each power of two, so that few are compiled.
        """
        start = 0
        while start < len(rows):
            count = min(MOST_ROWS, 1 << (len(rows) - start).bit_length() - 1)
            part = rows[start : start + count]
            self._execute(_for_rows(sql, count), [value for row in part for value in row])
            start += count

    def used_bytes(self) -> int:
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (int(self._connection.pragma(name)) for name in names)
        return (pages - free) * size

    @property
    def journal(self) -> SealedJournal:
        if self._journal is None:
            raise StoreError("a query cannot append to the journal; use `write`")
        return self._journal


# The values of one row.
_ONE_ROW: Final = re.compile(r"VALUES (\(\?(?:, \?)*\))")


@functools.lru_cache(maxsize=256)
def _for_rows(sql: str, count: int) -> str:
    """Return a statement for one row as one for `count` rows."""
    return _ONE_ROW.sub(lambda found: "VALUES " + ", ".join([found[1]] * count), sql)


def damage_in(path: Path, seconds: float | None = None) -> str | None:
    """Return what is damaged in a database file, or None; with `seconds`, check only as much as that time allows."""
    end = None if seconds is None else time.monotonic() + seconds
    try:
        with contextlib.closing(apsw.Connection(str(path))) as connection:
            connection.set_busy_timeout(2000)
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            if end is not None:
                connection.set_progress_handler(lambda: time.monotonic() > end, 20_000)
            found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    except apsw.InterruptError:
        return None
    except DAMAGE as error:
        return str(error)
    except apsw.Error as error:
        log.warning("failed to check %s for damage: %s", path, error)
        return None
    return None if found == ["ok"] else "; ".join(found)[:300]


def sqlite_version() -> tuple[int, ...]:
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


@contextlib.contextmanager
def open_readonly(path: Path) -> Iterator[Tx]:
    """Open one snapshot of a store that may be in use. Raises StoreError."""
    try:
        with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
            connection.set_busy_timeout(2000)
            connection.execute("BEGIN")
            yield SqliteTx(connection)
    except apsw.Error as error:
        raise StoreError(f"cannot read the store {path}: {error}") from None


class SqliteStore(GroupCommit):
    """The `Store` on SQLite. Open it with `SqliteStore.open`; the caller closes it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        create_private(path)  # SQLite gives the files beside it the same mode
        self._connection = _connect(path)
        self._journal = SealedJournal(load_key(path.parent, make=True), path.with_name(HEAD_FILE))
        self._tx = SqliteTx(self._connection, self._journal)
        self._full_sync = False
        # There are commits that may not be on disk.
        self._unsynced = False
        self._log_pages = 0
        self._connection.set_wal_hook(self._log_grew)
        self._readers = threading.local()
        self._read_connections: list[apsw.Connection] = []

    @classmethod
    def open(cls, path: Path, *, restored: bool = False) -> SqliteStore:
        """Open a store and migrate its tables. Raises StoreError.

        `restored`: an earlier copy was put here, so that the journal may end before the recorded head.
        """
        if sqlite_version() < SAFE_SQLITE:
            raise StoreError(
                f"SQLite {apsw.sqlite_lib_version()} can damage the store: "
                f"{'.'.join(map(str, SAFE_SQLITE))} or newer is needed; install a current apsw"
            )
        try:
            store = cls(path)
            fresh = store._migrate() or restored
            store._check_journal(fresh)
        except (apsw.Error, EngineError) as error:
            raise StoreError(f"cannot open the store {path}: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot open {error.filename or path}: {error.strerror}") from None
        return store

    # -- writing ----------------------------------------------------------------------------------------

    @property
    def files(self) -> dict[str, Path]:
        return {"store": self.path, "log": self.path.with_name(f"{self.path.name}-wal")}

    @property
    def _pause(self) -> float | None:
        return SYNC_SECONDS if self._unsynced else None

    def _after_group(self) -> None:
        if self._log_pages > CHECKPOINT_PAGES:
            self._checkpoint()

    def _commit(self, group: list[Write]) -> list[Result]:
        """Run the operations of a group and commit; a failing one leaves nothing behind."""
        if self.broken is not None:
            return [(future, None, self.broken) for _, future, _ in group]
        durable = not group or any(wanted for _, _, wanted in group)
        began = time.perf_counter()
        try:
            try:
                # Most groups have no failing operation, so savepoints are only made in a second attempt.
                results = self._attempt(group, durable, isolated=False)
            except Exception as error:
                self._roll_back()
                if isinstance(_store_error(error), EngineError):
                    raise
                results = self._attempt(group, durable, isolated=True)
        except Exception as error:
            self._roll_back()
            failure = self._failure(error)
            return [(future, None, failure) for _, future, _ in group]
        self._journal.committed()
        self.commits += 1
        self._unsynced = not durable
        if durable:
            self.commit_times.add((time.perf_counter() - began) * 1_000_000)
        return results

    def _attempt(self, group: list[Write], durable: bool, *, isolated: bool) -> list[Result]:
        connection, tx = self._connection, self._tx
        if durable != self._full_sync:
            self._full_sync = durable
            # Takes effect while it is compiled, so a compiled statement from the cache would do nothing.
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}", can_cache=False)
        connection.execute("BEGIN IMMEDIATE")
        changes = connection.total_changes()
        if isolated:
            self._journal.load(tx)  # another process may have appended to it
            results = [self._isolated(operation, future) for operation, future, _ in group]
        else:
            results = [(future, operation(tx), None) for operation, future, _ in group]
        self._journal.write(tx)
        if durable and self._unsynced and connection.total_changes() == changes:
            # Only a transaction that writes something is synced, and the log is synced as a whole.
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}", can_cache=False)
        connection.execute("COMMIT")
        return results

    def _isolated(self, operation: Operation[Any], future: AnyFuture) -> Result:
        connection, journal = self._connection, self._journal
        events = journal.pending
        connection.execute("SAVEPOINT operation")
        try:
            value = operation(self._tx)
        except Exception as error:
            failure = _store_error(error)
            if isinstance(failure, EngineError):
                raise
            connection.execute("ROLLBACK TO operation")
            journal.drop(events)
            result: Result = (future, None, failure)
        else:
            result = (future, value, None)
        connection.execute("RELEASE operation")
        return result

    def _roll_back(self) -> None:
        with contextlib.suppress(apsw.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        self._journal.rolled_back()

    def _failure(self, error: Exception) -> StoreError:
        """Return what the operations of a failed group raise; stop writing where the disk cannot be trusted."""
        cause = error.__cause__ if isinstance(error, StoreError) else error
        if isinstance(cause, DAMAGE):
            self.broken = EngineError(f"the store is damaged: {cause}; the next start restores the last copy")
            log.error("%s", self.broken)
        elif isinstance(cause, apsw.IOError) and getattr(cause, "extendedresult", 0) == apsw.SQLITE_IOERR_FSYNC:
            # Pages that the kernel failed to write may be reported as written later.
            self.broken = EngineError(f"a write to the disk failed: {cause}; restart the gateway")
            log.error("%s", self.broken)
        return self.broken or EngineError(f"the store could not be written: {cause or error}")

    def _log_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._log_pages = pages
        return 0

    def _checkpoint(self) -> None:
        """Copy the write-ahead log into the database; without readers, it is then written from its beginning again."""
        self._log_pages = 0
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error as error:  # everything is still in the log; tried again after the next commit
            log.warning("failed to checkpoint %s: %s", self.path, self._failure(error))

    # -- reading ----------------------------------------------------------------------------------------

    def _read(self, query: Operation[T]) -> T:
        try:
            connection: apsw.Connection | None = getattr(self._readers, "connection", None)
            if connection is None:
                connection = self._readers.connection = _connect(self.path)
                self._read_connections.append(connection)
            connection.execute("BEGIN")
            try:
                return query(SqliteTx(connection))
            finally:
                connection.execute("COMMIT")
        except apsw.Error as error:
            raise translated(error, self.path) from None

    # -- life cycle -------------------------------------------------------------------------------------

    @property
    def sealer(self) -> Seals:
        return self._journal.sealer

    def shut(self) -> None:
        """Close a store on which only `query` was used."""
        for connection in (*self._read_connections, self._connection):
            connection.close()
        self._journal.close()

    def _check_journal(self, fresh: bool) -> None:
        now, home = time.time_ns() // 1_000_000, self.path.parent
        self.query(lambda tx: check_head(tx, home, now, fresh=fresh))
        self._journal.opened()

    def _migrate(self) -> bool:
        """Bring the tables up to date; return whether the store is new. Raises StoreError."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        done = int(connection.pragma("user_version") or 0)
        if done > len(MIGRATIONS):
            connection.execute("ROLLBACK")
            raise StoreError(
                f"{self.path} was written by a newer Farhand (its tables are at {done}, this one knows "
                f"{len(MIGRATIONS)}); nothing was changed"
            )
        if 0 < done <= MIGRATIONS.index(SEALED):
            connection.execute("ROLLBACK")
            raise StoreError(
                f"{self.path} was written by a version before 0.2.0, whose journal has no seals; nothing was changed: "
                "choose another home, or move the file away"
            )
        for number, statements in enumerate(MIGRATIONS[done:], done + 1):
            connection.execute(statements)
            connection.execute(f"PRAGMA user_version = {number}")
        self._journal.load(self._tx)
        connection.execute("COMMIT")
        return done == 0


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(2000)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "normal")
    connection.pragma("wal_autocheckpoint", 0)
    connection.pragma("foreign_keys", True)
    return connection


def _store_error(error: Exception) -> Exception:
    return translated(error) if isinstance(error, apsw.Error) else error
