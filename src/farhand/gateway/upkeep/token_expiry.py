"""Announce tokens that expire while the gateway runs, as `Credentials.remove` announces revoked ones."""

from __future__ import annotations

import asyncio

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.upkeep.periodic import Repeating

# The longest wait: the wall clock may change, and a new token may expire before all others.
LONGEST_WAIT = 1.0


class TokenExpiry(Repeating):
    """Check for expired tokens while used as a context manager."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def _repeat(self) -> None:
        while True:
            following = self._credentials.announce_expired()
            await asyncio.sleep(LONGEST_WAIT if following is None else min(following, LONGEST_WAIT))
