"""A transaction on PostgreSQL, for operations that are written in the common subset of both engines' SQL."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, Final

import psycopg
from psycopg import errors
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.numeric import Int8Dumper, NumericBinaryLoader

from farhand.store.journal.seal import SealedJournal
from farhand.store.ports import EngineError, IntegrityError, Rows, StoreError

Connection = psycopg.Connection[tuple[Any, ...]]

# PostgreSQL stores no character 0 in text. It is written as _MARK and `0`, and _MARK itself as _MARK and `1`.
_MARK: Final = "\U0010fffd"

_CONSTRAINTS: Final = (errors.IntegrityError, errors.DataError)
# These concern one operation; any other error of the engine fails the whole group.
_OF_ONE_OPERATION: Final = (errors.ProgrammingError, errors.NotSupportedError)

_PLACEHOLDER: Final = re.compile(r"'(?:[^']|'')*'|\?(\d*)")


class _TextLoader(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        text = bytes(data).decode()
        return text.replace(_MARK + "0", "\0").replace(_MARK + "1", _MARK) if _MARK in text else text


class _NumberLoader(NumericBinaryLoader):
    """Loads sums, which PostgreSQL computes as `numeric`."""

    def load(self, data: Buffer) -> Any:
        value: Decimal = super().load(data)
        return int(value) if value == value.to_integral_value() else float(value)


def adapt(context: AdaptContext) -> None:
    """Register how values are sent and read."""
    adapters = context.adapters
    assert adapters is not None
    adapters.register_dumper(int, Int8Dumper)
    adapters.register_loader("text", _TextLoader)
    adapters.register_loader("numeric", _NumberLoader)


@functools.lru_cache(maxsize=4096)
def translated_sql(sql: str) -> str:
    """Return a statement with `$1` in the place of `?` and `?1`."""
    count = 0

    def place(match: re.Match[str]) -> str:
        nonlocal count
        if not match[0].startswith("?"):
            return match[0]
        count += 1
        return f"${match[1] or count}"

    return _PLACEHOLDER.sub(place, sql)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        if "\0" in value or _MARK in value:
            return value.replace(_MARK, _MARK + "1").replace("\0", _MARK + "0")
        return value if type(value) is str else str(value)
    return int(value) if value is True or value is False else value


def translated(error: psycopg.Error) -> StoreError:
    said = first_line(error)
    if isinstance(error, _CONSTRAINTS):
        return IntegrityError(said)
    kind = StoreError if isinstance(error, _OF_ONE_OPERATION) else EngineError
    return kind(f"the store failed: {said}")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class PostgresTx:
    __slots__ = ("_connection", "_cursor", "_journal")

    def __init__(self, connection: Connection, journal: SealedJournal | None = None) -> None:
        self._connection = connection
        self._journal = journal
        self._cursor: psycopg.RawCursor[tuple[Any, ...]] | None = None

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Rows:
        cursor = self._cursor = psycopg.RawCursor(self._connection)
        try:
            cursor.execute(translated_sql(sql), [_plain(value) for value in values], binary=True)
        except psycopg.Error as error:
            raise translated(error) from error
        return cursor if cursor.description is not None else _NO_ROWS

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        cursor = self._cursor = psycopg.RawCursor(self._connection)
        values = [[_plain(value) for value in row] for row in rows]
        try:
            cursor.executemany(translated_sql(sql), values)
        except psycopg.Error as error:
            raise translated(error) from error
        return self.changes()

    def changes(self) -> int:
        return 0 if self._cursor is None else max(0, self._cursor.rowcount)

    def used_bytes(self) -> int:
        found = self.execute("SELECT pg_database_size(current_database())").fetchall()
        return int(found[0][0])

    @property
    def journal(self) -> SealedJournal:
        if self._journal is None:
            raise StoreError("a query cannot append to the journal; use `write`")
        return self._journal


class _NoRows:
    """The result of a statement that returns no rows, from which a cursor refuses to fetch."""

    def __iter__(self) -> Any:
        return iter(())

    def fetchall(self) -> list[tuple[Any, ...]]:
        return []

    def fetchone(self) -> None:
        return None


_NO_ROWS: Final = _NoRows()
