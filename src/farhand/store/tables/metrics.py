"""Counters for monitoring: histograms in memory, and numbers of rows."""

from __future__ import annotations

from typing import Any, Final

from farhand.store.ports import Tx

BUCKETS: Final = 40

# Of tables that only grow, count the open rows: those have an index.
_ROWS: Final = {
    "runs": "SELECT state, count(*) FROM runs WHERE ended_at IS NULL GROUP BY state",
    "outbox": "SELECT state, count(*) FROM outbox WHERE ended_at IS NULL GROUP BY state",
    "transfers": "SELECT state, count(*) FROM transfers WHERE ended_at IS NULL GROUP BY state",
    "cron_slots": "SELECT status, count(*) FROM cron_slots GROUP BY status",
    "cron_jobs": "SELECT CASE WHEN enabled = 1 THEN 'enabled' ELSE 'disabled' END, count(*) FROM cron_jobs GROUP BY 1",
}


class Durations:
    """A histogram of durations with buckets of powers of two."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        # The number of durations from 2**(index - 1) to 2**index units.
        self.counts = [0] * BUCKETS
        self.total = 0.0

    def add(self, units: float) -> None:
        self.counts[int(units).bit_length()] += 1
        self.total += units


def count_rows(tx: Tx) -> dict[str, dict[str, int]]:
    """Return the number of rows by state, for each kind of work."""
    rows: dict[str, list[Any]] = {name: tx.execute(text).fetchall() for name, text in _ROWS.items()}
    found = {name: {str(state): int(count) for state, count in counted} for name, counted in rows.items()}
    sessions: list[Any] = tx.execute("SELECT count(*) FROM sessions").fetchall()
    return {**found, "sessions": {"": int(sessions[0][0])}}
