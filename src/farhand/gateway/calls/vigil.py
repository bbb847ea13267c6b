"""Waits that are likely to be short are spent awake.

A process that sleeps takes some 30 µs to be woken, and its first steps are slow: other work has had the core's caches.
While one caller calls again and again, that is a third of the time a call takes. So after a short wait the next one of
its kind keeps the loop turning, for as long as it may still be short; after a long one it sleeps at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

SHORT_SECONDS: Final = 0.0004
_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Vigil:
    """The waits of one kind, one at a time."""

    def __init__(self, cores: int = _CORES) -> None:
        # On a single core, whoever is waited for could not work meanwhile.
        self._wakeful = cores > 1
        self._began: float | None = None
        self._until = 0.0
        # The last wait was.
        self._short = False
        self.awake = False

    def begin(self) -> None:
        self._began = now = time.perf_counter()
        if self._short:
            self._until = now + SHORT_SECONDS
            if not self.awake:
                self.awake = True
                asyncio.get_running_loop().call_soon(self._stay_awake)

    def over(self) -> None:
        """What was waited for is here, or something else is to be done."""
        if self._began is not None:
            self._short = self._wakeful and time.perf_counter() - self._began < SHORT_SECONDS
            self._began, self._until = None, 0.0

    def _stay_awake(self) -> None:
        if time.perf_counter() < self._until:
            asyncio.get_running_loop().call_soon(self._stay_awake)
        else:
            self.awake = False
