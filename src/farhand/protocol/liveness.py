"""When a silent link is pinged, and when it is given up."""

from __future__ import annotations

from enum import Enum

from farhand.protocol.version import LINK_DEADLINE_SECONDS, LINK_PING_SECONDS

AGAIN_SECONDS = 5.0
# Event loops round waits to milliseconds, some of them to zero, which would spin.
SHORTEST_WAIT = 0.001


class LivenessAction(Enum):
    WAIT = "wait"
    PING = "ping"
    GIVE_UP = "give up"


class Liveness:
    """The liveness of one link. Calling `check` early or often does not add pings."""

    def __init__(self) -> None:
        self._next_ping = LINK_PING_SECONDS

    def check(self, silent: float) -> tuple[LivenessAction, float]:
        """Return what to do after this many seconds of silence, and in how many seconds to check again."""
        if silent >= LINK_DEADLINE_SECONDS:
            return LivenessAction.GIVE_UP, 0.0
        if silent < LINK_PING_SECONDS:
            self._next_ping = LINK_PING_SECONDS
        due = silent >= self._next_ping
        if due:
            self._next_ping = silent + AGAIN_SECONDS
        wait = min(self._next_ping, LINK_DEADLINE_SECONDS) - silent
        return LivenessAction.PING if due else LivenessAction.WAIT, max(wait, SHORTEST_WAIT)
