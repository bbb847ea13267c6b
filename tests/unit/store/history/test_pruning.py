"""Fan-outs are forgotten with the events of the journal."""

from __future__ import annotations

from pathlib import Path

from farhand.store.history.pruning import PRUNED, forget_fanouts
from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.sqlite.store import SqliteStore
from farhand.store.tables.fanouts import FanOutRecord, begin_fanout
from farhand.store.tables.idempotency import IDEMPOTENCY_MS
from tests.unit.sdk.wire import asynchronous


@asynchronous
async def test_a_fan_out_goes_with_its_event_but_stays_while_it_can_be_repeated(tmp_path: Path) -> None:
    """Without a limit in days they stayed for good, whatever the limit in megabytes."""
    now = 10 * IDEMPOTENCY_MS
    made = {"old": 1, "fresh": now - 1, "later": now - IDEMPOTENCY_MS - 1}

    def begin(store: Tx) -> None:
        for name, at in made.items():
            begin_fanout(store, FanOutRecord(name, "Read", "owner", ["laptop"], at), {"laptop": f"call-{name}"})

    def left(store: Tx) -> set[str]:
        forget_fanouts(store, now)
        return {str(row[0]) for row in store.execute("SELECT fanout FROM fanout_calls JOIN fanouts ON fanout = id")}

    database = SqliteStore.open(tmp_path / "farhand.db")
    try:
        await database.write(begin)
        assert await database.write(left) == set(made)
        await database.write(lambda store: append_event(store, now, PRUNED, "journal", {"until": 1000}))
        assert await database.write(left) == {"later", "fresh"}
        await database.write(lambda store: append_event(store, now, PRUNED, "journal", {"until": now}))
        assert await database.write(left) == {"fresh"}
    finally:
        await database.close()
