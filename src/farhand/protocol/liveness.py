"""When a silent link is asked whether anybody is there, and when it is given up."""

from __future__ import annotations

from enum import Enum

from farhand.protocol.version import LINK_DEADLINE_SECONDS, LINK_PING_SECONDS

AGAIN_SECONDS = 5.0
# Loops round waits to milliseconds, some of them to none: what comes a little early is to wait once more, not spin.
SHORTEST_WAIT = 0.001


class LivenessAction(Enum):
    WAIT = "wait"
    PING = "ping"
    GIVE_UP = "give up"


class Liveness:
    """Of one link. However often and early it is looked at, a silence has one ping for each of its moments."""

    def __init__(self) -> None:
        self._next_ping = LINK_PING_SECONDS

    def check(self, silent: float) -> tuple[LivenessAction, float]:
        """What to do after so many seconds of silence, and in how many to look again."""
        if silent >= LINK_DEADLINE_SECONDS:
            return LivenessAction.GIVE_UP, 0.0
        if silent < LINK_PING_SECONDS:
            self._next_ping = LINK_PING_SECONDS
        due = silent >= self._next_ping
        if due:
            self._next_ping = silent + AGAIN_SECONDS
        wait = min(self._next_ping, LINK_DEADLINE_SECONDS) - silent
        return LivenessAction.PING if due else LivenessAction.WAIT, max(wait, SHORTEST_WAIT)
