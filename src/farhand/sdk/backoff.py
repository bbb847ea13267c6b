"""Delays between reconnection attempts."""

from __future__ import annotations

import random

import msgspec

JITTER = 0.25


class ReconnectBackoff(msgspec.Struct, frozen=True):
    """Exponential delays in seconds, each with up to a quarter of random jitter on top."""

    initial_delay: float = 1.0
    max_delay: float = 60.0
    backoff_factor: float = 2.0
    # Failed attempts in a row before giving up; 0 means unlimited.
    max_attempts: int = 0

    def delay(self, attempt: int) -> float:
        """Return the seconds before reconnect `attempt`, counted from 0."""
        try:
            base = min(self.initial_delay * self.backoff_factor**attempt, self.max_delay)
        except OverflowError:
            base = self.max_delay
        return base * (1 + JITTER * random.random())  # noqa: S311

    def exhausted(self, attempt: int) -> bool:
        return self.max_attempts > 0 and attempt >= self.max_attempts
