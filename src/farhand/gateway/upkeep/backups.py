"""Back up the store periodically while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from farhand.gateway.journal import EventJournal
from farhand.gateway.upkeep.periodic import Repeating
from farhand.store.ports import StoreError
from farhand.store.sqlite.snapshots import BACKUPS_FOLDER, Snapshots
from farhand.store.sqlite.store import SqliteStore

log = logging.getLogger(__name__)


class BackupSettings(msgspec.Struct, frozen=True):
    # 0 disables backups.
    every_seconds: float = 3600.0
    keep: int = 24


class Backups(Repeating):
    """Copy the store periodically, unless it is unchanged. Use as a context manager."""

    def __init__(
        self,
        database: SqliteStore,
        journal: EventJournal,
        home: Path,
        settings: BackupSettings,
        *,
        clock: Callable[[], int],
    ) -> None:
        self._database = database
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._snapshots = Snapshots(home / BACKUPS_FOLDER)
        self._copied_at = -1
        # When the newest copy was made, and why the last attempt failed, if it did.
        self.taken_at = next((snapshot.taken_at for snapshot in self._snapshots), None)
        self.failure: str | None = None

    async def _repeat(self) -> None:
        every, newest = self._settings.every_seconds, self.taken_at
        if every <= 0:
            return
        since = every if newest is None else (self._clock() - newest) / 1000
        await asyncio.sleep(min(max(every - since, 0.0), every))
        while True:
            await self.take()
            await asyncio.sleep(every)

    async def take(self) -> None:
        """Make a copy, unless nothing has changed since the last.

        A failure is logged and retried at the next interval.
        """
        commits = self._database.commits
        if commits == self._copied_at:
            return
        try:
            taken = await asyncio.to_thread(self._snapshots.take, self._database.path)
        except StoreError as error:
            # Older copies stay: if the store itself is damaged, they are needed.
            log.error("the hourly copy of the store failed: %s", error)
            self.failure = str(error)
            self._journal.note("backup.failed", "store", {"reason": str(error)})
            return
        self._snapshots.rotate(self._settings.keep)
        self._copied_at = commits
        self.taken_at, self.failure = taken.taken_at, None
        log.info("copied the store to %s (%d bytes)", taken.path, taken.size)
