"""How often and how long, for whoever watches over a gateway: counts kept while it runs, and counts of rows."""

from __future__ import annotations

from typing import Any, Final

from farhand.store.ports import Tx

BUCKETS: Final = 40

# Of tables that only grow, what is open: that has an index.
_ROWS: Final = {
    "runs": "SELECT state, count(*) FROM runs WHERE ended_at IS NULL GROUP BY state",
    "outbox": "SELECT state, count(*) FROM outbox WHERE ended_at IS NULL GROUP BY state",
    "transfers": "SELECT state, count(*) FROM transfers WHERE ended_at IS NULL GROUP BY state",
    "cron_slots": "SELECT status, count(*) FROM cron_slots GROUP BY status",
    "cron_jobs": "SELECT CASE WHEN enabled THEN 'enabled' ELSE 'disabled' END, count(*) FROM cron_jobs GROUP BY 1",
}
_SESSIONS: Final = "SELECT count(*) FROM sessions"


class Durations:
    """Times, counted by their order of magnitude: one index and two additions for each."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        # How many took less than 2**index units, and not less than half of that.
        self.counts = [0] * BUCKETS
        self.total = 0.0

    def add(self, units: float) -> None:
        self.counts[int(units).bit_length()] += 1
        self.total += units


def count_rows(store: Tx) -> dict[str, dict[str, int]]:
    """Rows by state, for each kind of thing that waits, runs or is on record."""
    rows: dict[str, list[Any]] = {name: store.execute(text).fetchall() for name, text in _ROWS.items()}
    found = {name: {str(state): int(count) for state, count in counted} for name, counted in rows.items()}
    sessions: list[Any] = store.execute(_SESSIONS).fetchall()
    return {**found, "sessions": {"": int(sessions[0][0])}}
