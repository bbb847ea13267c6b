"""Copies of the store that the gateway makes while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from farhand.gateway.journal import EventJournal
from farhand.gateway.repeating import PeriodicTask
from farhand.store.group_commit import GroupCommit
from farhand.store.ports import StoreError
from farhand.store.sqlite.snapshots import BACKUPS_FOLDER, Snapshots

log = logging.getLogger(__name__)


class BackupSettings(msgspec.Struct, frozen=True):
    # 0 disables backups.
    every_seconds: float = 3600.0
    keep: int = 24


class Backups(PeriodicTask):
    """Copies a store in the home periodically; that of a database server has backups of its own."""

    def __init__(
        self,
        database: GroupCommit,
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

    def first_delay(self) -> float | None:
        every = self._settings.every_seconds
        if every <= 0 or not self._database.files:
            return None
        since = every if self.taken_at is None else (self._clock() - self.taken_at) / 1000
        return min(max(every - since, 0.0), every)

    async def run_once(self) -> float:
        await self.take()
        return self._settings.every_seconds

    async def take(self) -> None:
        """Copy the store, unless nothing has changed since the last copy. A failure is logged and recorded."""
        commits = self._database.commits
        if commits == self._copied_at:
            return
        try:
            taken = await asyncio.to_thread(self._snapshots.take, self._database.files["store"])
        except StoreError as error:
            # Older copies stay: if the store itself is damaged, they are what is left.
            log.error("failed to copy the store: %s", error)
            self.failure = str(error)
            self._journal.note("backup.failed", "store", {"reason": str(error)})
            return
        self._snapshots.rotate(self._settings.keep)
        self._copied_at = commits
        self.taken_at, self.failure = taken.taken_at, None
        log.info("copied the store to %s (%d bytes)", taken.path, taken.size)
