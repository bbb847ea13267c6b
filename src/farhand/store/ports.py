"""The contracts of the store and the bus. One suite in `tests/contract` runs against every implementation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from farhand.protocol.errors import FarhandError

T = TypeVar("T")


class StoreError(FarhandError):
    """The store failed; nothing of the failed operation is stored."""


class EngineError(StoreError):
    """The engine failed, so that every operation of the group did."""


class IntegrityError(StoreError):
    """An operation broke a constraint of the tables; the other operations of its group are not affected."""


class Rows(Protocol):
    """The rows of one statement."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...

    def fetchall(self) -> list[tuple[Any, ...]]: ...

    def fetchone(self) -> tuple[Any, ...] | None: ...


# A row of the journal (id, at, kind, subject, data), and the packed record that its seal covers beside it.
JournalRow = tuple[tuple[int, int, str, str, bytes], bytes]


class Seals(Protocol):
    """Hashes rows of the journal with one key."""

    # The hash before the first row.
    beginning: bytes

    def hash(self, before: bytes, rows: Iterable[JournalRow]) -> bytes:
        """Return the seal of rows that were committed together, after those with the seal `before`."""
        ...


class Journal(Protocol):
    """The end of the journal, the rows of the current transaction included."""

    id: int
    hash: bytes
    sealer: Seals

    def append(self, at: int, kind: str, subject: str, data: bytes, covered: bytes = b"", skip: int = 1) -> int:
        """Add a row to the current transaction and return its id; see `append_event`."""
        ...


class Tx(Protocol):
    """One transaction, valid until the operation or query that received it returns."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Rows: ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run a statement for each row; return how many rows were inserted, changed or deleted.

        A statement with `VALUES (?, …)` may be run for several rows at once.
        """
        ...

    def changes(self) -> int:
        """Return how many rows the last statement inserted, changed or deleted."""
        ...

    def used_bytes(self) -> int:
        """Return about how much the store takes on its disk."""
        ...

    @property
    def journal(self) -> Journal:
        """The journal that the transaction appends to. Raises StoreError in a query."""
        ...


Operation = Callable[[Tx], T]


def log_failure(written: asyncio.Future[Any], logger: logging.Logger, what: str) -> None:
    """Log if a write fails that no caller waits for; `what` completes "failed to"."""

    def done(future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("failed to %s: %s", what, error)

    written.add_done_callback(done)


class Store(Protocol):
    """Tables and a sealed journal.

    Operations and queries run in threads of the store. They are pure functions over `Tx`: they use only values that
    they were made with, change no object of the caller, and return what the caller needs. An operation may be run a
    second time when another one of its group fails.
    """

    def write(self, operation: Operation[T], *, durable: bool = True) -> asyncio.Future[T]:
        """Run `operation` with others in one transaction; the future has its value once that is committed.

        With `durable`, the commit is on disk when the future is done. Without, it survives the end of the process,
        and reaches the disk with the next durable commit. An operation that raises leaves nothing behind, and its
        exception is the future's; StoreError when the store fails. Operations run in the order of the calls.
        """
        ...

    async def read(self, query: Operation[T]) -> T:
        """Run `query` on a snapshot that holds everything written before this call. Raises StoreError."""
        ...

    def query(self, operation: Operation[T]) -> T:
        """Run `operation` and block until it is committed: for start-up, before requests are served."""
        ...

    def watch(self) -> asyncio.Event:
        """Return an event that is set after each commit, until `unwatch`."""
        ...

    def unwatch(self, event: asyncio.Event) -> None: ...

    @property
    def healthy(self) -> bool:
        """Whether the store accepts writes."""
        ...

    @property
    def sealer(self) -> Seals:
        """Makes and checks the seals of this store's journal."""
        ...

    async def close(self) -> None:
        """Commit what is queued, durably, and close."""
        ...


class NoResponder(FarhandError):
    """Nothing serves the subject; the request was not delivered."""


class ReplyUnknown(FarhandError):
    """No reply arrived in time, or the handler failed; the request may have been carried out."""


# Receives the body of a message; what it returns is the reply to `ask`.
Handler = Callable[[bytes], Awaitable[bytes]]


class Subscription(Protocol):
    def close(self) -> None:
        """Stop serving. Requests that are being handled are still answered."""
        ...


class Bus(Protocol):
    """Live messages between gateways. Nothing is stored; a message without a subscriber is lost."""

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        """Return the reply of one subscriber. Raises NoResponder, ReplyUnknown."""
        ...

    def publish(self, subject: str, body: bytes) -> None:
        """Send to every subscriber, without waiting."""
        ...

    def serve(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` for each message to a subject. The caller closes the subscription."""
        ...
