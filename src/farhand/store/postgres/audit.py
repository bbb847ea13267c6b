"""Checks the journal of a shared store, which may be in use, without writing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

from farhand.store.history.verify import Report, check_end, verify_journal
from farhand.store.journal.seal import Head, Sealer
from farhand.store.ports import StoreError, Tx
from farhand.store.postgres.store import connect, shown_url
from farhand.store.postgres.transaction import PostgresTx, first_line


def verify(url: str, key: bytes, *, start: int | None = None, noted: Head | None = None) -> Report:
    """Check the whole journal, or from the event `start` on; with `noted`, that this event is in it as well.

    Raises StoreError when it cannot be checked.
    """
    with reading(url) as tx:
        return verify_journal(tx, Sealer(key), None, start=start, noted=noted)


def quick_look(url: str, key: bytes) -> tuple[Head, str | None]:
    """Return the head, and what is wrong with the journal's end, if anything is. Raises StoreError."""
    with reading(url) as tx:
        return check_end(tx, Sealer(key), None)


@contextlib.contextmanager
def reading(url: str) -> Iterator[Tx]:
    """Open one snapshot of a shared store. Raises StoreError."""
    with contextlib.closing(connect(url)) as connection:
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield PostgresTx(connection)
        except psycopg.Error as error:
            raise StoreError(f"cannot read the store {shown_url(url)}: {first_line(error)}") from None
