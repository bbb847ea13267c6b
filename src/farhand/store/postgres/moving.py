"""Copy the whole store of a home into a database, and back. The journal stays verifiable: rows are copied unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from farhand.store.group_commit import GroupCommit
from farhand.store.history.verify import verify_journal
from farhand.store.journal.events import last_event
from farhand.store.journal.seal import journal_end
from farhand.store.ports import StoreError, Tx

ROWS_AT_ONCE: Final = 500
# Names of tables and their columns.
Tables = list[tuple[str, list[str]]]

_SQLITE_TABLES: Final = (
    "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
)
_IDENTITIES: Final = """
    SELECT cast(table_name AS TEXT), cast(column_name AS TEXT) FROM information_schema.columns
    WHERE is_identity = 'YES' AND table_schema = current_schema()"""


def tables_of_sqlite(tx: Tx) -> Tables:
    """Return the tables of a store in a home; those of a database have the same columns, and some of their own."""
    names = [str(row[0]) for row in tx.execute(_SQLITE_TABLES).fetchall()]
    return [(name, [str(row[1]) for row in tx.execute(f"PRAGMA table_info({name})").fetchall()]) for name in names]


def copy_store(source: GroupCommit, target: GroupCommit, tables: Tables) -> dict[str, int]:
    """Copy all rows in one transaction and return their numbers by table. `target` must be new.

    Raises StoreError, also if the copy does not verify; nothing is copied then.
    """
    if target.query(last_event):
        raise StoreError("the store to copy to has events already; it must be new")
    return target.query(lambda into: source.query(_copying(into, target, tables)))


def _copying(into: Tx, target: GroupCommit, tables: Tables) -> Callable[[Tx], dict[str, int]]:
    def copy(out: Tx) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, columns in tables:
            into.execute(f"DELETE FROM {name}")  # noqa: S608 (what opening a new store wrote)
            listed, marks = ", ".join(columns), ", ".join("?" * len(columns))
            rows = out.execute(f"SELECT {listed} FROM {name}")  # noqa: S608
            counts[name] = 0
            for batch in _batches(rows):
                into.executemany(f"INSERT INTO {name} ({listed}) VALUES ({marks})", batch)  # noqa: S608
                counts[name] += len(batch)
        end = journal_end(out)
        into.journal.id, into.journal.hash = end.id, end.hash or into.journal.sealer.beginning
        report = verify_journal(into, target.sealer, None)
        if report.faults:
            raise StoreError(f"the copy does not verify: {report.faults[0].message}; nothing was copied")
        return counts

    return copy


def _batches(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def continue_numbers(tx: Tx) -> None:
    """Let the numbers that a database gives to new rows continue after the copied ones."""
    for table, column in tx.execute(_IDENTITIES).fetchall():
        tx.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), "  # noqa: S608
            f"(SELECT coalesce(max({column}), 0) + 1 FROM {table}), false)"
        )
