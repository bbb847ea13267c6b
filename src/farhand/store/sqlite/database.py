"""SQLite with one writer, group commit, and numbered migrations.

Statements run on the event loop's thread, all that one turn of the loop gathered in one transaction; they only
reach the page cache there, some ten microseconds. The wait for the disk is a separate thread's: it syncs the
write-ahead log and wakes whoever asked for durability, one sync for everything committed before it began.
What must be on disk at once and can be said in a few bytes goes ahead of the tables, into the log of intents.
(A thread that ran the statements as well would fight the loop for the interpreter; see docs/decisions.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from farhand.machine.files.private_files import create_private
from farhand.protocol.errors import FarhandError
from farhand.store.history.seal_coverage import mind_head, seal_old_rows
from farhand.store.journal.seal import Chain, JournalConnection, Sealer
from farhand.store.sqlite.ahead import Ahead, Keeper, open_ahead
from farhand.store.sqlite.blocks import QUICK_SECONDS
from farhand.store.sqlite.migrations import MIGRATIONS, SEALED
from farhand.store.tables.metrics import Durations

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[apsw.Connection], Any]
# Told the value of an operation once it is kept, or why it is not.
Settle = Callable[[Any, Exception | None], None]

# A file to sync, and who waits for it.
_Sync = tuple[int, list[tuple[Settle, Any]]]

# Older versions can corrupt a write-ahead log when it is reset under two connections.
SAFE_SQLITE = (3, 51, 3)

CHECKPOINT_PAGES = 4000
SYNC_BEHIND_SECONDS = 0.2
HOLD_SECONDS = 1.0
# What nobody waits for is written with the next thing somebody does, or after this.
GATHER_SECONDS = 0.005
# A quick disk is waited for on the loop while few write at once: waking a thread and being woken by it takes about as
# long again (measured for one writer: 16 + 190 µs, 367 µs through the thread). Larger groups go to the thread, so that
# the loop can gather the next one meanwhile.
INLINE_OPERATIONS = 16


class StoreError(FarhandError):
    """The store could not keep something; nothing of that write is there."""


DAMAGE = (apsw.CorruptError, apsw.NotADBError)


def damage_in(path: Path, seconds: float | None = None) -> str | None:
    """What is damaged in a store, or None; with `seconds`, as far as that time allows to look."""
    end = None if seconds is None else time.monotonic() + seconds
    try:
        connection = apsw.Connection(str(path))
        try:
            connection.set_busy_timeout(2000)
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            if end is not None:
                connection.set_progress_handler(lambda: time.monotonic() > end, 20_000)
            found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        finally:
            connection.close()
    except apsw.InterruptError:
        return None
    except DAMAGE as error:
        return str(error)
    except apsw.Error as error:
        log.warning("%s could not be looked through: %s", path, error)
        return None
    return None if found == ["ok"] else "; ".join(found)[:300]


def sqlite_version() -> tuple[int, ...]:
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


class Database:
    """Opened by `Database.open`; whoever opened it calls `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_private(path)  # SQLite gives the files beside it the same mode
        self._connection = JournalConnection(str(path))
        _set_up(self._connection)
        self._chain = self._connection.chain = Chain(path.parent)
        self._reader = threading.Lock()
        self._read_connection: apsw.Connection | None = None
        self._pending: list[tuple[Operation, Settle, bool]] = []
        # How many of them went ahead, and are written before the others.
        self._firsts = 0
        self._scheduled = False
        self._gathering: asyncio.TimerHandle | None = None
        self._sync_soon = False
        self._syncs_under_way = 0
        self._sync_seconds = 0.0
        self._log = -1
        self._log_pages = 0
        # Why nothing more is taken.
        self.broken: StoreError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_sync: queue.SimpleQueue[_Sync | None] = queue.SimpleQueue()
        self._ahead: Ahead | None = None
        # Something else is to be written, and what went ahead goes first.
        self._in_order = False
        # The log is being folded back, to its end: commits wait for that moment.
        self._held = False
        self._syncer: threading.Thread | None = None
        self._connection.set_wal_hook(self._log_grew)
        # How many groups were committed.
        self.commits = 0
        # Waits for the disk, in microseconds.
        self.syncs = Durations()
        self._watchers: list[asyncio.Event] = []

    @classmethod
    def open(cls, path: Path, *, restored: bool = False) -> Database:
        """Open, bring the tables up to date. Raises StoreError when that cannot be done.

        `restored`: an earlier copy was put here, so the journal need not go as far as it went.
        """
        if sqlite_version() < SAFE_SQLITE:
            raise StoreError(f"SQLite {apsw.sqlite_lib_version()} can damage the store; install a newer apsw")
        try:
            database = cls(path)
            fresh = database._migrate() or restored
            database._take_up_journal(fresh)
        except apsw.Error as error:
            raise StoreError(f"cannot open the store {path}: {error}") from None
        except OSError as error:
            raise StoreError(f"cannot open what belongs to the store {path}: {error}") from None
        return database

    # -- writing ----------------------------------------------------------------------------------------

    def write(
        self, operation: Callable[[apsw.Connection], T], *, durable: bool = True, at_once: bool = False
    ) -> asyncio.Future[T]:
        """Run `operation` in the next transaction; the future has its value once that is committed.

        With `durable` it waits until the disk has it; without, the disk has it soon. An operation that raises must
        do so before it changed anything: the others of its group are committed. `at_once`: do not wait for others to
        share the transaction with; unless the disk is slow, the future is then done when this returns.
        """
        future: asyncio.Future[T] = (self._loop or self._start()).create_future()

        def settle(value: T, error: Exception | None) -> None:
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        self.write_then(operation, settle, durable=durable, at_once=at_once)
        return future

    def write_then(self, operation: Operation, settle: Settle, *, durable: bool = True, at_once: bool = False) -> None:
        """`write` for a caller who needs no future: `settle` is called, perhaps before this returns."""
        loop = self._loop or self._start()
        if self.broken is not None:
            settle(None, self.broken)
            return
        self._pending.append((operation, settle, durable))
        self._in_order = True
        if at_once:
            self._commit()
        else:
            self._schedule(loop)

    def write_behind(self, operation: Operation, settle: Settle) -> None:
        """Write what nobody waits for; the disk has it soon."""
        if self.broken is not None or self._scheduled:
            self.write_then(operation, settle, durable=False)
            return
        self._pending.append((operation, settle, False))
        self._in_order = True
        if self._gathering is None:
            self._gathering = (self._loop or self._start()).call_later(GATHER_SECONDS, self._commit_gathered)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._scheduled:
            self._scheduled = True
            # Two turns of the loop: what the first one's sockets bring goes into the same transaction.
            loop.call_soon(loop.call_soon, self._commit_gathered)

    def _commit_gathered(self) -> None:
        self._scheduled = False
        self._gathering = None
        self.commit()

    def _commit(self) -> None:
        if self._held:
            return
        if self._in_order:
            self._catch_up()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        pending, self._pending, self._firsts = self._pending, [], 0
        connection, chain = self._connection, self._chain
        done: list[tuple[Settle, Any]] = []
        failed: list[tuple[Settle, Exception]] = []
        waits = False
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation, settle, durable in pending:
                told = len(chain.pending)
                try:
                    value = operation(connection)
                except apsw.Error as error:
                    if not isinstance(error, apsw.ConstraintError | apsw.MismatchError):
                        raise  # the store's own trouble: nothing of the group can be kept
                    failed.append((settle, error))
                    chain.drop(told)
                except Exception as error:
                    failed.append((settle, error))
                    chain.drop(told)
                else:
                    done.append((settle, value))
                    waits = waits or durable
            chain.write(connection)
            connection.execute("COMMIT")
        except apsw.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            chain.rolled_back()
            failure = StoreError(f"the store could not be written: {error}")
            if isinstance(error, DAMAGE):
                self.broken = StoreError(f"the store is damaged: {error}; the next start brings the last copy back")
                log.error("%s", self.broken)
            if self._ahead is not None:
                self._ahead.retire()
            for _, settle, _ in pending:
                _tell(settle, None, failure)
            return
        chain.committed()
        self.commits += 1
        self.wake()
        for settle, mistake in failed:
            _tell(settle, None, mistake)
        if waits:
            self.sync(self._log, done, len(done))
            return
        self._settle(done, None, self._sync_seconds)
        if not self._sync_soon and self._loop is not None:
            self._sync_soon = True
            self._loop.call_later(SYNC_BEHIND_SECONDS, self._sync_behind)

    def sync(self, file: int, done: list[tuple[Settle, Any]], waiting: int) -> None:
        """Wait for the disk here when that is quick and few are `waiting` for it, else elsewhere; then tell them."""
        small = waiting <= INLINE_OPERATIONS and self._syncs_under_way == 0
        if small and self._sync_seconds < QUICK_SECONDS:
            self._settle(done, *self._sync(file))
        else:
            self._syncs_under_way += 1
            self._to_sync.put((file, done))

    def _sync_behind(self) -> None:
        self._sync_soon = False
        self._syncs_under_way += 1
        self._to_sync.put((self._log, []))

    def _sync(self, file: int) -> tuple[StoreError | None, float]:
        """Wait for the disk; how that went, and how long it took."""
        began = time.perf_counter()
        try:
            os.fdatasync(file)
        except OSError as error:
            self.lose_trust(error)
        took = time.perf_counter() - began
        self.syncs.add(took * 1_000_000)
        return self.broken, took

    def lose_trust(self, error: OSError) -> None:
        # What the kernel failed to write once it may report as written later: trust nothing from here on.
        self.broken = StoreError(f"the disk did not take a write: {error}")

    def _settle(self, done: list[tuple[Settle, Any]], failure: StoreError | None, took: float) -> None:
        self._sync_seconds += (took - self._sync_seconds) / 8
        for settle, value in done:
            _tell(settle, value, failure)

    def _settle_group(
        self, done: list[tuple[Settle, Any]], groups: int, failure: StoreError | None, took: float
    ) -> None:
        self._syncs_under_way -= groups
        self._settle(done, failure, took)

    def _start(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._log = os.open(f"{self.path}-wal", os.O_RDONLY)
        self._syncer = threading.Thread(target=self._sync_forever, name="farhand-sync", daemon=True)
        self._syncer.start()
        return self._loop

    def _sync_forever(self) -> None:
        assert self._loop is not None
        checkpointer = _connect(self.path)
        tried = 0
        try:
            while (first := self._to_sync.get()) is not None:
                waiting = {first[0]: list(first[1])}
                groups = 1
                while not self._to_sync.empty():
                    more = self._to_sync.get()
                    if more is None:
                        self._to_sync.put(None)
                        break
                    waiting.setdefault(more[0], []).extend(more[1])
                    groups += 1
                # What was promised first: its callers wait, and it is the smaller write.
                for file in sorted(waiting, key=lambda file: file == self._log):
                    self._loop.call_soon_threadsafe(self._settle_group, waiting[file], groups, *self._sync(file))
                    groups = 0
                if self._log_pages < tried:
                    tried = 0
                if self._log_pages - tried > CHECKPOINT_PAGES:
                    tried = self._log_pages
                    self._fold(checkpointer)
        finally:
            checkpointer.close()

    def _fold(self, checkpointer: apsw.Connection) -> None:
        """Fold the log back into the store, in the syncer's thread.

        Commits go on meanwhile, so something is left over. That little is folded while they wait: only a log that is
        folded to its end is written from its beginning again, else it grows for as long as there is traffic.
        """
        assert self._loop is not None
        try:
            checkpointer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            held = threading.Event()
            self._loop.call_soon_threadsafe(self._hold, held)
            try:
                if held.wait(HOLD_SECONDS):
                    checkpointer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            finally:
                self._loop.call_soon_threadsafe(self._release)
        except apsw.Error as error:  # everything is still in the log; tried again when that has grown
            log.warning("the log could not be folded back into the store: %s", error)

    def _hold(self, held: threading.Event) -> None:
        self._held = True
        held.set()

    def _release(self) -> None:
        self._held = False
        self.commit()

    def _log_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._log_pages = pages
        return 0

    # -- ahead of the tables ----------------------------------------------------------------------------

    def open_intents(self, keeper: Keeper) -> list[bytes]:
        """From here on, `ahead` takes what `keeper` promises. Returns what the last run left, to be taken up and then
        `forget`ten. Only one process may do this. Raises StoreError."""
        try:
            self._ahead, found = open_ahead(self, keeper)
        except OSError as error:
            raise StoreError(f"cannot open {error.filename}: {error.strerror}") from None
        return found

    @property
    def ahead(self) -> Ahead:
        assert self._ahead is not None, "`open_intents` comes first"
        return self._ahead

    def forget_intents(self) -> None:
        """The tables have all that was found, on disk."""
        self.ahead.clear()

    def write_first(self, operation: Operation, settle: Settle) -> None:
        """Write what went ahead, before all that waits; the disk has it soon."""
        self._pending.insert(self._firsts, (operation, settle, False))
        self._firsts += 1

    def commit(self) -> None:
        """Commit what waits, now."""
        if self._pending:
            self._commit()

    def _catch_up(self) -> None:
        """What went ahead goes into the next transaction, before all that waits for it."""
        self._in_order = False
        if self._ahead is not None:
            self._ahead.catch_up()

    def query(self, query: Callable[[apsw.Connection], T]) -> T:
        """Run `query` here and now, on the writer's connection: for start-up, before anything is served."""
        try:
            with self._connection:
                value = query(self._connection)
                self._chain.write(self._connection)
        except BaseException:
            self._chain.rolled_back()
            raise
        self._chain.committed()
        return value

    # -- reading ----------------------------------------------------------------------------------------

    async def read(self, query: Callable[[apsw.Connection], T]) -> T:
        """Run `query` on a second connection, beside the loop; it sees all that was written before."""
        if self._held:
            await self.write(lambda _: None, durable=False)
        self._catch_up()
        self.commit()
        return await asyncio.to_thread(self._read, query)

    def _read(self, query: Callable[[apsw.Connection], T]) -> T:
        with self._reader:
            if self._read_connection is None:
                self._read_connection = _connect(self.path)
            return query(self._read_connection)

    def watch(self) -> asyncio.Event:
        """An event set after each commit, until `unwatch`."""
        event = asyncio.Event()
        self._watchers.append(event)
        return event

    def wake(self) -> None:
        """Set the watchers' events without a commit: something else they should look at has changed."""
        for event in self._watchers:
            event.set()

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.remove(event)

    # -- life -------------------------------------------------------------------------------------------

    @property
    def sealer(self) -> Sealer:
        """Makes and checks the seals of this store's journal."""
        return self._chain.sealer

    @property
    def waiting(self) -> int:
        """Writes that wait for their transaction."""
        return len(self._pending)

    @property
    def syncing(self) -> int:
        """Groups that wait for the disk."""
        return self._syncs_under_way

    @property
    def healthy(self) -> bool:
        return self.broken is None

    @property
    def watched(self) -> bool:
        """Somebody looks at what is committed as it comes."""
        return bool(self._watchers)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop or self._start()

    def flush(self) -> asyncio.Future[None]:
        """Done once everything the tables have so far is on disk."""
        in_order = self._in_order
        future = self.write(lambda _: None)
        self._in_order = in_order  # nothing has happened that would have to stand behind something
        return future

    def flush_all(self) -> asyncio.Future[None]:
        """Done once the tables have everything, on disk."""
        self._catch_up()
        return self.flush()

    async def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        if self._syncer is not None:
            if self.broken is None:
                await self.flush_all()
            self._to_sync.put(None)
            await asyncio.to_thread(self._syncer.join)
            os.close(self._log)
        if self._ahead is not None:
            self._ahead.close()
        with self._reader:
            if self._read_connection is not None:
                self._read_connection.close()
        self.shut()

    def shut(self) -> None:
        """`close` for one who only asked queries."""
        self._connection.close()
        self._chain.close()

    def _take_up_journal(self, fresh: bool) -> None:
        now, home = time.time_ns() // 1_000_000, self.path.parent
        self.query(lambda store: mind_head(store, home, now, fresh=fresh))
        self._chain.opened()

    def _migrate(self) -> bool:
        """Whether the journal had no seals before."""
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
            seal_old_rows(connection, time.time_ns() // 1_000_000)
            self._chain.write(connection)
        self._chain.load(connection)
        connection.execute("COMMIT")
        return done < sealed


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    _set_up(connection)
    return connection


def _set_up(connection: apsw.Connection) -> None:
    connection.set_busy_timeout(2000)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "normal")  # the syncer adds the sync that `full` would do, once per group
    connection.pragma("wal_autocheckpoint", 0)
    connection.pragma("foreign_keys", True)


def _tell(settle: Settle, value: Any, error: Exception | None) -> None:
    """One who cannot bear the news keeps it from nobody else."""
    try:
        settle(value, error)
    except Exception:
        log.exception("what follows a write failed")
