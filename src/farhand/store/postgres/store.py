"""The store on PostgreSQL: one writer thread, group commit, numbered migrations.

The writer thread takes everything that is queued as one group, which is one transaction. It locks the head of the
journal first: the groups of all gateways that share the database follow one another, and the journal has one order.
While the database cannot be reached, writes are refused; the writer connects again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo

from farhand.store.group_commit import AnyFuture, GroupCommit, Result, Write
from farhand.store.journal.seal import KEY_FILE, SealedJournal
from farhand.store.ports import EngineError, Operation, Seals, StoreError
from farhand.store.postgres.migrations import PARTS
from farhand.store.postgres.transaction import Connection, PostgresTx, adapt, first_line, translated
from farhand.store.tables.fleet import join_fleet

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_SECONDS: Final = 5
RECONNECT_SECONDS: Final = 0.5
OLDEST_SERVER: Final = 140_000
# Gateways that start at the same time migrate one after the other.
MIGRATION_LOCK: Final = 0x66_61_72_68_61_6E_64
# A server that disappeared without closing its connections is noticed after about this time.
SILENCE_SECONDS: Final = 10
# A gateway of a fleet that stands still in the middle of a transaction loses it after this time.
IDLE_SECONDS: Final = 4
_OPTIONS: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": SILENCE_SECONDS * 1000,
    "keepalives_idle": 3,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}

_LOCK: Final = "SELECT id, hash FROM journal_head FOR UPDATE"
_NEWER_MARK: Final = "ON CONFLICT (writer) DO UPDATE SET mark = excluded.mark, at = excluded.at"
_STEPS_DONE: Final = "INSERT INTO schema_steps VALUES ($1, $2) ON CONFLICT (part) DO UPDATE SET done = excluded.done"
_MARK: Final = "SELECT mark FROM commit_marks WHERE writer = $1"


def shown_url(url: str) -> str:
    """Return a URL without its password."""
    scheme, _, rest = url.partition("://")
    who, at, place = rest.rpartition("@")
    return f"{scheme}://{who.partition(':')[0]}{at}{place}"


def connect(url: str) -> Connection:
    """Open a connection. Raises StoreError, without the password in its text."""
    try:
        info = conninfo.make_conninfo(url, **{"application_name": "farhand", **_OPTIONS, **_given(url)})
    except psycopg.ProgrammingError:
        raise StoreError(
            "[store] url is not the address of a PostgreSQL database: postgresql://USER@HOST/NAME"
        ) from None
    try:
        connection: Connection = psycopg.connect(info, autocommit=True)
    except (psycopg.Error, UnicodeError, OSError) as error:
        raise EngineError(f"cannot open the store {shown_url(url)}: {_reason(error, url)}") from None
    adapt(connection)
    return connection


def _given(url: str) -> dict[str, Any]:
    """Return the connection options that the URL sets itself."""
    found = conninfo.conninfo_to_dict(url)
    return {name: value for name, value in found.items() if name in _OPTIONS or name == "application_name"}


def _reason(error: Exception, url: str) -> str:
    password = conninfo.conninfo_to_dict(url).get("password")
    said = first_line(error)
    return said.replace(str(password), "***") if password else said


class PostgresStore(GroupCommit):
    """The `Store` on PostgreSQL. Open it with `PostgresStore.open`; the caller closes it."""

    def __init__(self, url: str, key: bytes) -> None:
        super().__init__()
        self.url = url
        self._connection = connect(url)
        self._journal = SealedJournal(key)
        self._tx = PostgresTx(self._connection, self._journal)
        self._readers = threading.local()
        self._read_connections: list[Connection] = []
        # Identifies this store in `commit_marks`, and the number of its transactions.
        self._name = secrets.token_hex(8)
        self._mark = 0
        # This gateway's id and epoch among those that share the store; without them, nothing is fenced.
        self._member: tuple[str, int] | None = None
        # Another gateway has taken over: nothing can be written until the gateway restarts.
        self.superseded = False
        # The results of a group that is being committed.
        self._committing: list[Result] | None = None
        # A group that may or may not have been committed: the results if it was, and if it was not.
        self._doubt: tuple[list[Result], list[Result]] | None = None

    @classmethod
    def open(cls, url: str, key: bytes) -> PostgresStore:
        """Open a store and migrate its tables. `key` seals the journal. Raises StoreError."""
        store = cls(url, key)
        try:
            store._check_server()
            store._migrate()
        except psycopg.Error as error:
            store.shut()
            raise StoreError(f"cannot open the store {shown_url(url)}: {_reason(error, url)}") from None
        except StoreError:
            store.shut()
            raise
        return store

    # -- writing ----------------------------------------------------------------------------------------

    @property
    def _pause(self) -> float | None:
        return None if self.broken is None else RECONNECT_SECONDS

    def _commit(self, group: list[Write]) -> list[Result]:
        if self.broken is not None:
            if group or not self._connect_again():
                return _failed(group, self.broken)
            return self._settled_doubt()
        durable = any(wanted for _, _, wanted in group)
        began = time.perf_counter()
        try:
            try:
                results = self._attempt(group, isolated=False)
            except Exception as error:
                if self._connection.closed or isinstance(_store_error(error), EngineError):
                    raise
                self._roll_back()
                results = self._attempt(group, isolated=True)
            self._committing = results
            self._end(durable)
        except Exception as error:
            return self._failure(group, _store_error(error))
        self._committing = None
        self._journal.committed()
        self.commits += 1
        if durable:
            self.commit_times.add((time.perf_counter() - began) * 1_000_000)
        return results

    def _failure(self, group: list[Write], error: Exception) -> list[Result]:
        """Return what the operations of a failed group raise; nothing yet if it is not known whether it was committed.

        `error` is raised by the engine: those of the operations themselves are results.
        """
        results, self._committing = self._committing, None
        self._roll_back()
        failure = EngineError(f"the store could not be written: {error}")
        if self._connection.closed:
            self.broken = EngineError(f"the database of the store is not available: {error}; try again later")
            log.error("%s", self.broken)
            if results is not None:
                self._doubt = results, _failed(group, failure)
                return []
            failure = self.broken
        return _failed(group, failure)

    def _begin(self) -> None:
        """Begin a transaction and take the head of the journal."""
        # In a statement of its own: it must see what was committed while the lock was awaited.
        epoch = "" if self._member is None else f"; SELECT epoch FROM replicas WHERE id = '{self._member[0]}'"  # noqa: S608
        cursor = self._connection.execute(f"BEGIN; {_LOCK}{epoch}")
        rows = []
        while True:
            if cursor.description is not None:
                rows.append(cursor.fetchone())
            if not cursor.nextset():
                break
        assert rows[0] is not None, "the journal has a head"
        self._journal.continue_after(int(rows[0][0]), bytes(rows[0][1]))
        if self._member is not None and (rows[1] is None or rows[1][0] != self._member[1]):
            self.superseded = True
            raise EngineError("this gateway was silent for too long, and others took over its work; it restarts")

    def _attempt(self, group: list[Write], *, isolated: bool) -> list[Result]:
        """Run the operations. Most groups have no failing one, so savepoints are only made in a second attempt."""
        self._begin()
        if isolated:
            results = [self._isolated(operation, future) for operation, future, _ in group]
        else:
            results = [(future, operation(self._tx), None) for operation, future, _ in group]
        self._journal.write(self._tx)
        return results

    def _isolated(self, operation: Operation[Any], future: AnyFuture) -> Result:
        events = self._journal.pending
        self._connection.execute("SAVEPOINT operation")
        try:
            value = operation(self._tx)
        except Exception as error:
            failure = translated(error) if isinstance(error, psycopg.Error) else error
            if isinstance(failure, EngineError):
                raise
            self._connection.execute("ROLLBACK TO SAVEPOINT operation; RELEASE SAVEPOINT operation")
            self._journal.drop(events)
            return future, None, failure
        self._connection.execute("RELEASE SAVEPOINT operation")
        return future, value, None

    def _end(self, durable: bool) -> None:
        """Commit. Every transaction changes a row, so that a durable commit also takes earlier ones to the disk.

        One with events is durable in any case: if the server lost it in a crash, gateways would have followed events,
        and reported ends to callers, that another gateway's events then replace.
        """
        self._mark += 1
        head = f"id = {self._journal.id:d}, hash = '\\x{self._journal.hash.hex()}'"
        mark = f"('{self._name}', {self._mark:d}, now())"
        if self._journal.moved:
            statements = [f"UPDATE journal_head SET {head}"]  # noqa: S608
        else:
            statements = [] if durable else ["SET LOCAL synchronous_commit = off"]
        statements.append(f"INSERT INTO commit_marks VALUES {mark} {_NEWER_MARK}")  # noqa: S608
        self._connection.execute("; ".join([*statements, "COMMIT"]))

    def _roll_back(self) -> None:
        self._journal.rolled_back()
        if not self._connection.closed:
            try:
                self._connection.execute("ROLLBACK")
            except psycopg.Error:
                self._connection.close()

    # -- connections ------------------------------------------------------------------------------------

    def _connect_again(self) -> bool:
        """Replace a lost connection; return whether that worked."""
        try:
            self._connection = connect(self.url)
        except StoreError as error:
            log.debug("%s", error)
            return False
        self._tx = PostgresTx(self._connection, self._journal)
        if self._member is not None:
            self._name_connection(self._member[0])
        self.broken = None
        log.info("the database of the store is available again")
        return True

    def join(self, replica: str, version: str, settings: str) -> int:
        """Become one of several gateways on this store, before the first write; return its epoch."""
        self._name_connection(replica)
        epoch = self.query(lambda tx: join_fleet(tx, replica, version, settings))
        self._member = replica, epoch
        return epoch

    def _name_connection(self, replica: str) -> None:
        """Let new rows carry their owner, and the server end a transaction of a gateway that stands still: it holds
        the lock that all gateways need.
        """
        psycopg.RawCursor(self._connection).execute(
            "SELECT set_config('farhand.replica', $1, false), "
            "set_config('idle_in_transaction_session_timeout', $2, false)",
            [replica, str(IDLE_SECONDS * 1000)],
        )

    def _settled_doubt(self) -> list[Result]:
        """Find out whether the group was committed during whose commit the connection was lost."""
        if self._doubt is None:
            return []
        done, failed = self._doubt
        try:
            with self._connection.transaction():
                # The lock is free once the server has ended the transaction of the lost connection.
                self._connection.execute(_LOCK)
                row = psycopg.RawCursor(self._connection).execute(_MARK, [self._name]).fetchone()
        except psycopg.Error as error:
            self._connection.close()
            self.broken = EngineError(
                f"the database of the store is not available: {first_line(error)}; try again later"
            )
            return []
        self._doubt = None
        return done if row is not None and row[0] == self._mark else failed

    # -- reading ----------------------------------------------------------------------------------------

    def _read(self, query: Operation[T]) -> T:
        connection: Connection | None = getattr(self._readers, "connection", None)
        try:
            if connection is None or connection.closed:
                connection = self._readers.connection = connect(self.url)
                self._read_connections.append(connection)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                return query(PostgresTx(connection))
            finally:
                if not connection.closed:
                    connection.execute("ROLLBACK")
        except psycopg.Error as error:
            if connection is not None and connection.closed and connection in self._read_connections:
                self._read_connections.remove(connection)
            raise translated(error) from None

    # -- life cycle -------------------------------------------------------------------------------------

    @property
    def sealer(self) -> Seals:
        return self._journal.sealer

    def _hang_up(self) -> None:
        for connection in (*self._read_connections, self._connection):
            # psycopg has no call for this that another thread may make.
            with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as peer:
                peer.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        if self._doubt is not None:
            for future, _, error in self._doubt[1]:
                if not future.done() and error is not None:
                    future.set_exception(error)
        for connection in (*self._read_connections, self._connection):
            connection.close()
        self._journal.close()

    def _check_server(self) -> None:
        if (version := self._connection.info.server_version) < OLDEST_SERVER:
            raise StoreError(
                f"PostgreSQL {version // 10_000} is too old for the store; {OLDEST_SERVER // 10_000} or newer is needed"
            )

    def _migrate(self) -> None:
        """Bring the tables up to date. Raises StoreError if a newer version has written them."""
        connection = self._connection
        with connection.transaction():
            connection.execute(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            connection.execute("CREATE TABLE IF NOT EXISTS schema_steps (part TEXT PRIMARY KEY, done BIGINT NOT NULL)")
            found: dict[str, int] = dict(connection.execute("SELECT part, done FROM schema_steps").fetchall())
            for part, steps in PARTS.items():
                done = found.pop(part, 0)
                if done > len(steps):
                    raise self._newer(f"its {part} are at step {done}, this one knows {len(steps)}")
                for step in steps[done:]:
                    connection.execute(step)
                if done < len(steps):
                    psycopg.RawCursor(connection).execute(_STEPS_DONE, [part, len(steps)])
            if found:
                raise self._newer(f"this one does not know its {', '.join(sorted(found))}")
            connection.execute("DELETE FROM commit_marks WHERE at < now() - interval '7 days'")
            beginning = self._journal.sealer.beginning
            psycopg.RawCursor(connection).execute(
                "INSERT INTO journal_head VALUES (1, 0, $1, $1) ON CONFLICT DO NOTHING", [beginning]
            )
            row = connection.execute("SELECT beginning FROM journal_head").fetchone()
            if row is None or row[0] != beginning:
                raise StoreError(
                    f"the journal in {shown_url(self.url)} is sealed with another key: copy the files token, "
                    f"{KEY_FILE} and secrets.key from the home of a gateway that uses this store"
                )

    def _newer(self, how: str) -> StoreError:
        return StoreError(
            f"the store {shown_url(self.url)} was written by a newer Farhand ({how}); nothing was changed"
        )


def _failed(group: list[Write], error: StoreError) -> list[Result]:
    return [(future, None, error) for _, future, _ in group]


def _store_error(error: Exception) -> Exception:
    return translated(error) if isinstance(error, psycopg.Error) else error
