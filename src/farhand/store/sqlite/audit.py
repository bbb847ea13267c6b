"""Checks the journal of a store that may be in use, without writing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from farhand.protocol.errors import FarhandError
from farhand.store.history.verify import Report, check_end, verify_journal
from farhand.store.journal.seal import Head, Sealer, journal_end, kept_head, load_key
from farhand.store.ports import Tx
from farhand.store.sqlite.store import open_readonly


@contextlib.contextmanager
def reading(store: Path) -> Iterator[Tx]:
    """Open one snapshot of a sealed store. Raises FarhandError."""
    if not store.exists():
        raise FarhandError(f"there is no journal: {store} does not exist")
    with open_readonly(store) as tx:
        if "hash" not in {row[1] for row in tx.execute("PRAGMA table_info(events)")}:
            raise FarhandError(f"{store} was written by a version without seals; start this gateway on it once")
        yield tx


def verify(home: Path, store: Path, *, start: int | None = None, noted: Head | None = None) -> Report:
    """Check the whole journal, or from the event `start` on; with `noted`, that this event is in it as well.

    Raises FarhandError when it cannot be checked.
    """
    sealer, kept = Sealer(load_key(home)), kept_head(home)
    with reading(store) as tx:
        return verify_journal(tx, sealer, kept, start=start, noted=noted)


def read_head(store: Path) -> Head:
    """Return the newest row of a journal. Raises FarhandError."""
    with reading(store) as tx:
        return journal_end(tx)


def quick_look(home: Path, store: Path) -> tuple[Head, str | None]:
    """Return the head, and what is wrong with the journal's end, if anything is. Raises FarhandError."""
    sealer, kept = Sealer(load_key(home)), kept_head(home)
    with reading(store) as tx:
        return check_end(tx, sealer, kept)
