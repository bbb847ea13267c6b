"""Notice when the holder of some work no longer renews its lease."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class LeaseWatch(Generic[Key]):
    """Watches the numbers that holders increase while they are alive."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: a holder whose number has not changed for this long is considered dead."""
        self._seconds = seconds
        # The last number of each lease, and when it changed.
        self._seen: dict[Key, tuple[int, float]] = {}

    def expired(self, beats: Mapping[Key, int]) -> list[Key]:
        """Take the current numbers of all leases and return those that have expired."""
        now = time.monotonic()  # a jump of the wall clock must not expire leases
        seen: dict[Key, tuple[int, float]] = {}
        for key, beat in beats.items():
            before, since = self._seen.get(key, (beat, now))
            seen[key] = (beat, since if beat == before else now)
        self._seen = seen
        return [key for key, (_, since) in seen.items() if now - since > self._seconds]
