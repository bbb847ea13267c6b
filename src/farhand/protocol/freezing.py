"""The order to stop everything, as it is kept by the gateway and by each node until it is lifted."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from farhand.protocol.errors import NotAllowed

MOST_REASON = 500


class Frozen(NotAllowed):
    """Everything is stopped, and nothing begins until the owner lifts it."""


class FreezeOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Since when, by whom and why nothing may run."""

    since: int
    by: str
    reason: str = ""
    gateway_id: str = ""
    """Whose order it is: only that gateway lifts it."""

    @property
    def told(self) -> str:
        """`frozen since 2026-11-16 04:10:03 UTC by owner: it mails everybody`."""
        moment = datetime.fromtimestamp(self.since / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"frozen since {moment} by {self.by}" + (f": {self.reason}" if self.reason else "")

    def refusal(self) -> Frozen:
        """What the gateway says to whoever wants something run."""
        return Frozen(f"{self.told}; nothing runs until `farhand thaw` (POST /v1/thaw) lifts it")

    def refusal_of_node(self) -> Frozen:
        """What a node says by itself, whichever gateway asks."""
        return Frozen(f"this node is {self.told}; it takes no call until its gateway lifts that with `farhand thaw`")


def plain_reason(text: str) -> str:
    """A reason as one line that can be shown anywhere."""
    words = " ".join(text.split())
    return "".join(character for character in words if character.isprintable())[:MOST_REASON]
