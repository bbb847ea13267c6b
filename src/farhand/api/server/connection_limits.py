"""Connections of which nobody knows yet whose they are: there are few of them, and none stays for long.

A connection has a moment to say its first word, also when everybody comes back at once; so the few may be more for as
long as that, but never more than there is room for.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

log = logging.getLogger(__name__)

# How long a stranger may take to say what is wanted, head and all.
HEAD_SECONDS: Final = 10.0
# And from there to the end of the answer.
REQUEST_SECONDS: Final = 30.0
MOST: Final = 64
MOST_OF_ONE_ADDRESS: Final = 8
# A younger connection is left alone: when everybody comes back at once, all of them are strangers for a moment.
YOUNG_SECONDS: Final = 1.0
# When a look at the strangers comes so late, the gateway did not listen meanwhile: they have another moment.
LATE_SECONDS: Final = 0.25
MOST_ROOM: Final = 1024
# One address has this part of the room, were it ever so young a crowd.
SHARE_OF_ONE_ADDRESS: Final = 4
TELLING_SECONDS: Final = 60.0

Later = Callable[[float, Callable[[], None]], object]


class Stranger(Protocol):
    def turn_out(self) -> None:
        """Close the connection."""
        ...


class Lobby:
    """Holds the strangers. Once they are no longer young, those who have waited longest make room for the others."""

    def __init__(self, later: Later, clock: Callable[[], float] = time.monotonic, room: int | None = None) -> None:
        """`later` is a loop's `call_later`; `room`: how many there are at most, however young."""
        self._later = later
        self._clock = clock
        self._room = _half_of_the_descriptors() if room is None else room
        self._waiting: dict[Stranger, tuple[float, str]] = {}
        # How many there are of each address.
        self._of: Counter[str] = Counter()
        self._looking = False
        # Since that was last told.
        self._turned_out = 0
        self._last_address = ""
        self._telling = False
        self._tell_from = 0.0

    def enter(self, stranger: Stranger, address: str) -> None:
        now = self._clock()
        self._waiting[stranger] = (now, address)
        self._of[address] += 1
        if self._of[address] > self._room // SHARE_OF_ONE_ADDRESS and not _is_loopback(address):
            self._turn_out(self._oldest_of(address))
        elif len(self._waiting) > self._room:
            self._turn_out(self._oldest_of(self._largest_crowd()))
        self._look_when_they_are_old(now)

    def leave(self, stranger: Stranger) -> None:
        """It is known now, or gone."""
        if (entry := self._waiting.pop(stranger, None)) is not None:
            self._of[entry[1]] -= 1
            if not self._of[entry[1]]:
                del self._of[entry[1]]

    def __len__(self) -> int:
        return len(self._waiting)

    def _oldest_of(self, crowd: str) -> Stranger:
        return next(one for one, (_, address) in self._waiting.items() if address == crowd)

    def _largest_crowd(self) -> str:
        """So that whoever comes alone has a place beside a crowd."""
        return max(self._of, key=self._of.__getitem__)

    def _look_when_they_are_old(self, now: float) -> None:
        if not self._looking and self._excess():
            self._looking = True
            self._later(YOUNG_SECONDS, lambda: self._look(now + YOUNG_SECONDS))

    def _look(self, due: float) -> None:
        self._looking = False
        now = self._clock()
        if now - due < LATE_SECONDS:
            for one in self._excess():
                if now - self._waiting[one][0] >= YOUNG_SECONDS:
                    self._turn_out(one)
        self._look_when_they_are_old(now)

    def _excess(self) -> list[Stranger]:
        """Who is beyond the few: the newest are those who may stay."""
        if len(self._waiting) <= MOST_OF_ONE_ADDRESS:
            return []
        staying: Counter[str] = Counter()
        excess = []
        for one, (_, address) in reversed(self._waiting.items()):
            of_one = MOST if _is_loopback(address) else MOST_OF_ONE_ADDRESS
            if staying[address] < of_one and staying.total() < MOST:
                staying[address] += 1
            else:
                excess.append(one)
        return excess

    def _turn_out(self, stranger: Stranger) -> None:
        self._turned_out += 1
        self._last_address = self._waiting[stranger][1]
        self.leave(stranger)
        stranger.turn_out()
        if not self._telling:
            self._telling = True
            self._later(max(YOUNG_SECONDS, self._tell_from - self._clock()), self._tell)

    def _tell(self) -> None:
        self._telling = False
        self._tell_from = self._clock() + TELLING_SECONDS
        log.warning(
            "too many connections that showed no token: %d were closed to make room, the last from %s",
            self._turned_out,
            self._last_address or "an unknown address",
        )
        self._turned_out = 0


def _half_of_the_descriptors() -> int:
    """The other half is for those who are known, and for files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_ROOM if most == resource.RLIM_INFINITY else min(MOST_ROOM, most // 2)


@functools.lru_cache(maxsize=MOST_ROOM)
def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
