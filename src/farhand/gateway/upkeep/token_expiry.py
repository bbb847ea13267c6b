"""Announce tokens that expire while the gateway runs, as `Credentials.remove` announces revoked ones."""

from __future__ import annotations

from farhand.gateway.access.credentials import Credentials
from farhand.gateway.repeating import PeriodicTask

# The longest wait: the wall clock may change, and a new token may expire before all others.
LONGEST_WAIT = 1.0


class TokenExpiry(PeriodicTask):
    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def run_once(self) -> float:
        following = self._credentials.announce_expired()
        return LONGEST_WAIT if following is None else min(following, LONGEST_WAIT)
