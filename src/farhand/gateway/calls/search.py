"""Search the record of calls, including read-only calls that still run and have no row yet."""

from __future__ import annotations

from collections.abc import Mapping

from farhand.gateway.calls.gate import Gate
from farhand.store.ports import Store
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fanouts import fanout_calls
from farhand.store.tables.waiting_calls import find_approval, find_waiting


class CallSearch:
    def __init__(self, database: Store, gate: Gate) -> None:
        self._database = database
        self._gate = gate

    async def awaited(self, call_id: str) -> tuple[str, str | None]:
        """Return what a call waits for that is open at another gateway, and the id of its approval."""
        waiting, approval = await self._database.read(
            lambda tx: (find_waiting(tx, call_id), find_approval(tx, call_id))
        )
        return "approval" if waiting is None else waiting[1].why, None if approval is None else approval.id

    async def search(
        self,
        filters: Mapping[str, str],
        limit: int,
        before: str | None = None,
        group: str | None = None,
        *,
        bodies: bool = True,
    ) -> list[CallRecord]:
        """Return matching calls, newest first. `bodies` as for `store.tables.calls.search`."""
        running = self._gate.open_records()  # a call may end while the rows are read
        found, members = await self._database.read(
            lambda store: (
                calls.search(store, filters, limit=limit, before=before, group=group, bodies=bodies),
                set() if group is None else fanout_calls(store, group),
            )
        )
        # The gate knows of a change before the row has it.
        newest = {record.id: record for record in (*running, *found, *self._gate.open_records())}
        fitting = [
            record
            for record in newest.values()
            if (before is None or record.id < before)
            and (group is None or record.id in members)
            and all(getattr(record, name) == value for name, value in filters.items())
        ]
        return sorted(fitting, key=lambda record: record.id, reverse=True)[:limit]
