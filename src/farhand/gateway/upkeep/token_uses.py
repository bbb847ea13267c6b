"""When each token was last used, written down now and then."""

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
    """Once a minute, and at the end, writes down which tokens were used. Use as a context manager.

    In between a token that was seen is not looked at again, so that a request pays nothing for this.
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
            log.warning("when tokens were last used could not be written down: %s", error)
