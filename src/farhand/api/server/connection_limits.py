"""Limits the connections that have not presented a credential: few at a time, and none for long. Those of one token are
limited as well, so that it cannot use up the descriptors.

New connections are exempt for a moment, because after a restart all clients reconnect at once; there is an absolute
limit all the same.
"""

from __future__ import annotations

import functools
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from farhand.protocol.names import is_loopback

log = logging.getLogger(__name__)

# How long a connection may take to send a request head.
HEAD_SECONDS: Final = 10.0
# And from there to the end of the answer.
REQUEST_SECONDS: Final = 30.0
MAX_CONNECTIONS: Final = 64
MAX_OF_ADDRESS: Final = 8
# Connections of one token that stay open after an answer.
MAX_OF_TOKEN: Final = 256
# Connections younger than this count only for the absolute limit.
GRACE_SECONDS: Final = 1.0
# When a check runs this late, the gateway was busy and read no requests meanwhile: nothing is closed this time.
LATE_SECONDS: Final = 0.25
MAX_YOUNG: Final = 1024
# The part of the absolute limit that one address may use.
ADDRESS_SHARE: Final = 4
LOG_SECONDS: Final = 60.0

Later = Callable[[float, Callable[[], None]], object]


class LimitedConnection(Protocol):
    def drop(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionLimits:
    """Knows the connections without a credential and closes the oldest of those in excess."""

    def __init__(self, later: Later, clock: Callable[[], float] = time.monotonic, room: int | None = None) -> None:
        """`later` is a loop's `call_later`; `room` is the absolute limit, by default from the descriptors."""
        self._later = later
        self._clock = clock
        self._room = _half_of_the_descriptors() if room is None else room
        # Oldest first: when it connected, and from where.
        self._open: dict[LimitedConnection, tuple[float, str]] = {}
        self._of_address: Counter[str] = Counter()
        # Connections with a credential, and how many a token has.
        self._held: dict[LimitedConnection, str] = {}
        self._of_token: Counter[str] = Counter()
        self._check_scheduled = False
        # Connections that were closed since the last log line, and the address of the last one.
        self._dropped = 0
        self._last_address = ""
        self._log_scheduled = False
        self._next_log = 0.0

    def add(self, connection: LimitedConnection, address: str) -> None:
        """Count a new connection; an older one may be closed for it."""
        now = self._clock()
        self._open[connection] = (now, address)
        self._of_address[address] += 1
        if self._of_address[address] > self._room // ADDRESS_SHARE and not _is_loopback(address):
            self._drop(self._oldest_of(address))
        elif len(self._open) > self._room:
            self._drop(self._oldest_of(max(self._of_address, key=self._of_address.__getitem__)))
        self._schedule_check(now)

    def remove(self, connection: LimitedConnection) -> None:
        """Forget a connection that has presented a credential, or has ended."""
        if (entry := self._open.pop(connection, None)) is not None:
            self._of_address[entry[1]] -= 1
            if not self._of_address[entry[1]]:
                del self._of_address[entry[1]]

    def hold(self, connection: LimitedConnection, token_id: str) -> bool:
        """Count a connection of a token until its `release`; False if the token has too many already."""
        if connection in self._held:
            return True
        if self._of_token[token_id] >= MAX_OF_TOKEN:
            return False
        self._held[connection] = token_id
        self._of_token[token_id] += 1
        return True

    def release(self, connection: LimitedConnection) -> None:
        """Forget a connection with a credential, as it has ended."""
        token_id = self._held.pop(connection, None)
        if token_id is not None:
            self._of_token[token_id] -= 1
            if not self._of_token[token_id]:
                del self._of_token[token_id]

    def __len__(self) -> int:
        return len(self._open)

    def _oldest_of(self, wanted: str) -> LimitedConnection:
        return next(one for one, (_, address) in self._open.items() if address == wanted)

    def _schedule_check(self, now: float) -> None:
        if not self._check_scheduled and self._excess():
            self._check_scheduled = True
            self._later(GRACE_SECONDS, lambda: self._check(now + GRACE_SECONDS))

    def _check(self, due: float) -> None:
        self._check_scheduled = False
        now = self._clock()
        if now - due < LATE_SECONDS:
            for connection in self._excess():
                if now - self._open[connection][0] >= GRACE_SECONDS:
                    self._drop(connection)
        self._schedule_check(now)

    def _excess(self) -> list[LimitedConnection]:
        """Return the connections beyond the limits; the newest are within them."""
        if len(self._open) <= MAX_OF_ADDRESS:
            return []
        kept: Counter[str] = Counter()
        excess = []
        for connection, (_, address) in reversed(self._open.items()):
            limit = MAX_CONNECTIONS if _is_loopback(address) else MAX_OF_ADDRESS
            if kept[address] < limit and kept.total() < MAX_CONNECTIONS:
                kept[address] += 1
            else:
                excess.append(connection)
        return excess

    def _drop(self, connection: LimitedConnection) -> None:
        self._dropped += 1
        self._last_address = self._open[connection][1]
        self.remove(connection)
        connection.drop()
        if not self._log_scheduled:
            self._log_scheduled = True
            self._later(max(GRACE_SECONDS, self._next_log - self._clock()), self._log)

    def _log(self) -> None:
        self._log_scheduled = False
        self._next_log = self._clock() + LOG_SECONDS
        log.warning(
            "too many connections that showed no token: %d were closed to make room, the last from %s",
            self._dropped,
            self._last_address or "an unknown address",
        )
        self._dropped = 0


def _half_of_the_descriptors() -> int:
    """Leave the other half to files and to connections with a credential."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_YOUNG if most == resource.RLIM_INFINITY else min(MAX_YOUNG, most // 2)


_is_loopback = functools.lru_cache(maxsize=MAX_YOUNG)(is_loopback)
