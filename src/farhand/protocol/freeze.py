"""The freeze order, stored by the gateway and by each node until it is lifted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.protocol.untrusted import one_line

MAX_REASON_CHARS = 500
MAX_NAME_CHARS = 200

# Milliseconds since 1970, up to the year 9999.
Moment = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]


class Frozen(NotAllowed):
    """Everything is stopped, and nothing starts until the owner lifts the freeze."""


class FreezeOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Since when, by whom and why nothing may run."""

    since: Moment
    by: str
    reason: str = ""
    # The gateway that gave the order; only that gateway lifts it.
    gateway_id: str = ""

    @property
    def summary(self) -> str:
        """`frozen since 2026-11-16 04:10:03 UTC by owner: it emails everyone`."""
        moment = datetime.fromtimestamp(self.since / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        # A peer may have supplied the name and the reason.
        by, reason = one_line(self.by, MAX_NAME_CHARS), one_line(self.reason, MAX_REASON_CHARS)
        return f"frozen since {moment} by {by}" + (f": {reason}" if reason else "")

    def refusal(self) -> Frozen:
        """Return the error for callers of the gateway."""
        return Frozen(f"{self.summary}; nothing runs until `farhand thaw` (POST /v1/thaw) lifts it")

    def node_refusal(self) -> Frozen:
        """Return the error with which a node refuses calls, whichever gateway sends them."""
        return Frozen(f"this node is {self.summary}; it accepts no calls until its gateway is thawed (`farhand thaw`)")


class FreezeState:
    """Holds the current freeze order, if any, in memory. A subclass stores it."""

    def __init__(self) -> None:
        self.order: FreezeOrder | None = None
        # When an order was last lifted, in milliseconds.
        self.thawed_at: int | None = None

    def freeze(self, order: FreezeOrder) -> None:
        """Freeze at once. Raises OSError if the order could not be stored; it holds nevertheless."""
        self.order = order
        self._store()

    def thaw(self, at: int) -> None:
        """Lift the order. Raises OSError if that could not be stored; the order then stays."""
        before = (self.order, self.thawed_at)
        self.order, self.thawed_at = None, at
        try:
            self._store()
        except OSError:
            self.order, self.thawed_at = before
            raise

    def try_freeze(self, order: FreezeOrder) -> str | None:
        """Freeze; return a warning if the order could not be stored."""
        try:
            self.freeze(order)
        except OSError as error:
            return f"the freeze holds but could not be stored, so a restart lifts it: {error}"
        return None

    def try_thaw(self, gateway_id: str, at: int) -> str | None:
        """Thaw on behalf of a gateway; return why not if it may not or could not."""
        order = self.order
        if order is None:
            return None
        if order.gateway_id not in ("", gateway_id):
            return f"another gateway ({order.gateway_id}) froze this node; only that gateway can lift it"
        try:
            self.thaw(at)
        except OSError as error:
            return f"the thaw could not be stored, so the freeze stays: {error}"
        return None

    def _store(self) -> None:
        """Store the current state. Kept in memory only by default."""


def clean_reason(text: str) -> str:
    """Return a reason as one printable line."""
    words = " ".join(text.split())
    return "".join(character for character in words if character.isprintable())[:MAX_REASON_CHARS]
