"""The store on SQLite: one writer thread, group commit, numbered migrations.

The writer thread takes everything that is queued as one group: one transaction, one seal of the journal, one commit.
The commit is the promise: `synchronous` is FULL for a group with a durable operation and NORMAL for any other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import apsw

from farhand.machine.files.private_files import create_private
from farhand.store.history.seal_coverage import check_head, seal_old_rows
from farhand.store.journal.seal import SealedJournal
from farhand.store.ports import EngineError, IntegrityError, Operation, Rows, Seals, StoreError, Tx
from farhand.store.sqlite.intent_log import INTENT_LOGS, store_intents
from farhand.store.sqlite.migrations import MIGRATIONS, SEALED
from farhand.store.tables.metrics import Durations

log = logging.getLogger(__name__)

T = TypeVar("T")

# Older versions can corrupt the write-ahead log when it is reset while two connections are open.
SAFE_SQLITE: Final = (3, 51, 3)
# The write-ahead log is copied into the database when it has more pages.
CHECKPOINT_PAGES: Final = 4000
# Commits that are not durable reach the disk after this time at the latest.
SYNC_SECONDS: Final = 0.2
READERS: Final = 2

DAMAGE: Final = (apsw.CorruptError, apsw.NotADBError)
# These concern one operation; any other error of the engine fails the whole group.
_OF_ONE_OPERATION: Final = (apsw.SQLError, apsw.RangeError)
_CONSTRAINTS: Final = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)


_AnyFuture = asyncio.Future[Any] | concurrent.futures.Future[Any]
_Write = tuple[Operation[Any], _AnyFuture, bool]
_Result = tuple[_AnyFuture, Any, Exception | None]


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

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        try:
            self._executemany(sql, rows)
        except apsw.Error as error:
            raise translated(error) from error

    @property
    def journal(self) -> SealedJournal:
        if self._journal is None:
            raise StoreError("a query cannot append to the journal; use `write`")
        return self._journal


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


class SqliteStore:
    """The `Store` on SQLite. Open it with `SqliteStore.open`; the caller closes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_private(path)  # SQLite gives the files beside it the same mode
        self._connection = _connect(path)
        self._journal = SealedJournal(path.parent)
        self._tx = SqliteTx(self._connection, self._journal)
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: threading.Thread | None = None
        # Writes whose futures are not done.
        self._unfinished = 0
        self._full_sync = False
        # There are commits that may not be on disk.
        self._unsynced = False
        self._log_pages = 0
        self._connection.set_wal_hook(self._log_grew)
        self._reading = concurrent.futures.ThreadPoolExecutor(READERS, "farhand-read")
        self._readers = threading.local()
        self._read_connections: list[apsw.Connection] = []
        self._watchers: list[asyncio.Event] = []
        # Why no write is accepted any more.
        self.broken: StoreError | None = None
        # The number of groups that were committed.
        self.commits = 0
        # The times that durable commits took, in microseconds.
        self.commit_times = Durations()

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
            store._take_over_intents()
        except (apsw.Error, EngineError) as error:
            raise StoreError(f"cannot open the store {path}: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot open {error.filename or path}: {error.strerror}") from None
        return store

    # -- writing ----------------------------------------------------------------------------------------

    def write(self, operation: Operation[T], *, durable: bool = True) -> asyncio.Future[T]:
        future: asyncio.Future[T] = (self._loop or self._start()).create_future()
        if self.broken is not None:
            future.set_exception(self.broken)
        else:
            self._unfinished += 1
            self._queue.put((operation, future, durable))
        return future

    def query(self, operation: Operation[T]) -> T:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._writer is None:
            _settle(self._commit([(operation, future, True)]))
        else:
            self._queue.put((operation, future, True))
        return future.result()

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._writer = threading.Thread(target=self._write_groups, name="farhand-write", daemon=True)
        self._writer.start()
        return self._loop

    def _write_groups(self) -> None:
        """Commit one group after the other, until None is queued."""
        assert self._loop is not None
        last = False
        while not last:
            group, last = self._next_group()
            results = self._commit(group) if group or self._unsynced else []
            _settle([result for result in results if isinstance(result[0], concurrent.futures.Future)])
            if results:
                with contextlib.suppress(RuntimeError):  # the loop was closed and the store was not
                    self._loop.call_soon_threadsafe(self._deliver, results)
            if self._log_pages > CHECKPOINT_PAGES:
                self._checkpoint()

    def _next_group(self) -> tuple[list[_Write], bool]:
        """Return everything that is queued, and whether it is the last; nothing when only a sync is due."""
        group: list[_Write] = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=SYNC_SECONDS if self._unsynced else None)
            while item is not None:
                group.append(item)
                item = self._queue.get_nowait()
            return group, True
        return group, False

    def _deliver(self, results: list[_Result]) -> None:
        self.wake()
        for future, value, error in results:
            if isinstance(future, asyncio.Future):
                self._unfinished -= 1
                if not future.done():
                    future.set_result(value) if error is None else future.set_exception(error)

    def _commit(self, group: list[_Write]) -> list[_Result]:
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

    def _attempt(self, group: list[_Write], durable: bool, *, isolated: bool) -> list[_Result]:
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

    def _isolated(self, operation: Operation[Any], future: _AnyFuture) -> _Result:
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
            result: _Result = (future, None, failure)
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
            self.broken = EngineError(f"the disk did not take a write: {cause}; restart the gateway")
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

    async def read(self, query: Operation[T]) -> T:
        if self._unfinished and self.broken is None:
            await self.write(_nothing, durable=False)
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, query)

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

    def watch(self) -> asyncio.Event:
        event = asyncio.Event()
        self._watchers.append(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.remove(event)

    def wake(self) -> None:
        """Set the watchers' events without a commit, for something else that they should look at."""
        for event in self._watchers:
            event.set()

    # -- life cycle -------------------------------------------------------------------------------------

    @property
    def sealer(self) -> Seals:
        return self._journal.sealer

    @property
    def waiting(self) -> int:
        """The number of writes that are not committed yet."""
        return self._unfinished

    @property
    def healthy(self) -> bool:
        return self.broken is None

    async def close(self) -> None:
        if self._writer is not None:
            if self.broken is None:
                await self.write(_nothing)
            self._queue.put(None)
            await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._reading.shutdown)
        self.shut()

    def shut(self) -> None:
        """Close a store on which only `query` was used."""
        for connection in (*self._read_connections, self._connection):
            connection.close()
        self._journal.close()

    def _check_journal(self, fresh: bool) -> None:
        now, home = time.time_ns() // 1_000_000, self.path.parent
        self.query(lambda tx: check_head(tx, home, now, fresh=fresh))
        self._journal.opened()

    def _take_over_intents(self) -> None:
        """Store the calls that a gateway of an earlier version had in its intent log when it was killed."""
        logs = [path for suffix in INTENT_LOGS if (path := self.path.with_name(f"{self.path.name}{suffix}")).exists()]
        if logs:
            self.query(lambda tx: store_intents(tx, logs))
            for path in logs:
                path.unlink()

    def _migrate(self) -> bool:
        """Bring the tables up to date; return whether the journal had no seals before. Raises StoreError."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        done = int(connection.pragma("user_version") or 0)
        if done > len(MIGRATIONS):
            connection.execute("ROLLBACK")
            raise StoreError(
                f"{self.path} was written by a newer Farhand (its tables are at {done}, this one knows "
                f"{len(MIGRATIONS)}); nothing was changed"
            )
        for number, statements in enumerate(MIGRATIONS[done:], done + 1):
            connection.execute(statements)
            connection.execute(f"PRAGMA user_version = {number}")
        sealed = MIGRATIONS.index(SEALED) + 1
        if done < sealed:
            seal_old_rows(self._tx, time.time_ns() // 1_000_000)
            self._journal.write(self._tx)
        self._journal.load(self._tx)
        connection.execute("COMMIT")
        return done < sealed


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


def _settle(results: list[_Result]) -> None:
    for future, value, error in results:
        future.set_result(value) if error is None else future.set_exception(error)


def _nothing(_: Tx) -> None:
    pass
