"""Record periodically when each token was last used."""

from __future__ import annotations

import asyncio
import logging

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.upkeep.periodic import Repeating
from farhand.store.ports import Store, StoreError
from farhand.store.tables.tokens import tokens_used

log = logging.getLogger(__name__)

EVERY_SECONDS = 60.0


class TokenUses(Repeating):
    """Write token uses once a minute and at the end. Use as a context manager.

    Between writes, further uses of a token are not tracked, so requests have no extra cost.
    """

    def __init__(self, database: Store, credentials: Credentials, every_seconds: float = EVERY_SECONDS) -> None:
        self._database = database
        self._credentials = credentials
        self._every = every_seconds

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._write()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self._write()

    async def _write(self) -> None:
        used = self._credentials.take_uses()
        if not used:
            return
        try:
            await self._database.write(lambda store: tokens_used(store, used), durable=False)
        except StoreError as error:
            log.warning("failed to record when tokens were last used: %s", error)
