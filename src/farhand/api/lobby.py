"""Connections of which nobody knows yet whose they are: there are few of them, and none stays for long."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from typing import Final, Protocol

HEAD_SECONDS: Final = 10.0
"""How long a stranger may take to say what is wanted, head and all."""
REQUEST_SECONDS: Final = 30.0
"""And from there to the end of the answer."""
MOST: Final = 64
MOST_OF_ONE_ADDRESS: Final = 8
YOUNG_SECONDS: Final = 1.0
"""A younger connection is left alone: when everybody comes back at once, all of them are strangers for a moment."""


class Stranger(Protocol):
    def turn_out(self) -> None:
        """Close the connection."""
        ...


class Lobby:
    """Holds the strangers; the one who has waited longest makes room for another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[Stranger, tuple[float, str]] = {}

    def enter(self, stranger: Stranger, address: str) -> None:
        now = self._clock()
        self._waiting[stranger] = (now, address)
        if len(self._waiting) > MOST:
            self._make_room(now, lambda _: True, MOST)
        if len(self._waiting) > MOST_OF_ONE_ADDRESS and not _is_loopback(address):
            self._make_room(now, lambda other: other == address, MOST_OF_ONE_ADDRESS)

    def leave(self, stranger: Stranger) -> None:
        """It is known now, or gone."""
        self._waiting.pop(stranger, None)

    def _make_room(self, now: float, of: Callable[[str], bool], most: int) -> None:
        # In the order of their coming, so the oldest is found first.
        crowd = [one for one, (_, address) in self._waiting.items() if of(address)]
        for one in crowd[: max(0, len(crowd) - most)]:
            if now - self._waiting[one][0] < YOUNG_SECONDS:
                return
            del self._waiting[one]
            one.turn_out()

    def __len__(self) -> int:
        return len(self._waiting)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
