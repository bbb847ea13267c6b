"""Stores when each token was last used."""

from __future__ import annotations

import contextlib

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.repeating import PeriodicTask
from farhand.store.ports import Store, StoreError
from farhand.store.tables.access.tokens import tokens_used

EVERY_SECONDS = 60.0


class TokenUses(PeriodicTask):
    """Stores which tokens were used, once a minute and at the end."""

    def __init__(self, database: Store, credentials: Credentials, every_seconds: float = EVERY_SECONDS) -> None:
        self._database = database
        self._credentials = credentials
        self._every = every_seconds

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        with contextlib.suppress(StoreError):
            await self.run_once()

    def first_delay(self) -> float:
        return self._every

    async def run_once(self) -> float:
        used = self._credentials.take_uses()
        if used:
            await self._database.write(lambda store: tokens_used(store, used), durable=False)
        return self._every
