"""Announces tokens that expire while the gateway runs, as `Credentials.remove` announces those that are revoked."""

from __future__ import annotations

import asyncio

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.upkeep.periodic import Repeating

# The longest wait: the wall clock may be set, and a token may be made that expires sooner than all others.
LONGEST_WAIT = 1.0


class TokenExpiry(Repeating):
    """Watches the clock between `async with` and its end."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def _repeat(self) -> None:
        while True:
            following = self._credentials.announce_expired()
            await asyncio.sleep(LONGEST_WAIT if following is None else min(following, LONGEST_WAIT))
