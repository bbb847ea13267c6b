"""Checks the journal of a shared store, which may be in use, without writing."""

from __future__ import annotations

import contextlib

import psycopg

from farhand.store.history.verify import Report, verify_journal
from farhand.store.journal.seal import Head, Sealer
from farhand.store.ports import StoreError
from farhand.store.postgres.store import connect, shown_url
from farhand.store.postgres.transaction import PostgresTx, first_line


def verify(url: str, key: bytes, *, start: int | None = None, noted: Head | None = None) -> Report:
    """Check the whole journal, or from the event `start` on; with `noted`, that this event is in it as well.

    Raises StoreError when it cannot be checked.
    """
    with contextlib.closing(connect(url)) as connection:
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return verify_journal(PostgresTx(connection), Sealer(key), None, start=start, noted=noted)
        except psycopg.Error as error:
            raise StoreError(f"cannot read the store {shown_url(url)}: {first_line(error)}") from None
