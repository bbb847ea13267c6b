"""The order to stop everything, as it is kept by the gateway and by each node until it is lifted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from farhand.protocol.errors import NotAllowed
from farhand.protocol.untrusted import one_line

MAX_REASON_CHARS = 500
MAX_NAME_CHARS = 200

# Milliseconds since 1970, up to the last year that can be written with four digits.
Moment = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]


class Frozen(NotAllowed):
    """Everything is stopped, and nothing begins until the owner lifts it."""


class FreezeOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Since when, by whom and why nothing may run."""

    since: Moment
    by: str
    reason: str = ""
    # Whose order it is: only that gateway lifts it.
    gateway_id: str = ""

    @property
    def summary(self) -> str:
        """`frozen since 2026-11-16 04:10:03 UTC by owner: it mails everybody`."""
        moment = datetime.fromtimestamp(self.since / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        # The other end of a link may have written the name and the reason.
        by, reason = one_line(self.by, MAX_NAME_CHARS), one_line(self.reason, MAX_REASON_CHARS)
        return f"frozen since {moment} by {by}" + (f": {reason}" if reason else "")

    def refusal(self) -> Frozen:
        """What the gateway says to whoever wants something run."""
        return Frozen(f"{self.summary}; nothing runs until `farhand thaw` (POST /v1/thaw) lifts it")

    def node_refusal(self) -> Frozen:
        """What a node says by itself, whichever gateway asks."""
        return Frozen(f"this node is {self.summary}; it takes no call until its gateway lifts that with `farhand thaw`")


class FreezeState:
    """While there is an order, nothing may begin."""

    def __init__(self) -> None:
        self.order: FreezeOrder | None = None
        # When an order was last lifted.
        self.thawed_at: int | None = None

    def freeze(self, order: FreezeOrder) -> None:
        """Holds at once. Raises OSError when it could not be kept, and holds all the same."""
        self.order = order
        self._keep()

    def thaw(self, at: int) -> None:
        """Raises OSError when it could not be kept; then the order stands."""
        before = (self.order, self.thawed_at)
        self.order, self.thawed_at = None, at
        try:
            self._keep()
        except OSError:
            self.order, self.thawed_at = before
            raise

    def try_freeze(self, order: FreezeOrder) -> str | None:
        """As `freeze`; what is to be told when it could not be kept."""
        try:
            self.freeze(order)
        except OSError as error:
            return f"the freeze holds, but could not be kept on disk, so a restart lifts it: {error}"
        return None

    def try_thaw(self, gateway_id: str, at: int) -> str | None:
        """As `thaw`, for a gateway that wants it; what is to be told when it may not, or could not."""
        order = self.order
        if order is None:
            return None
        if order.gateway_id not in ("", gateway_id):
            return f"another gateway ({order.gateway_id}) froze this node, and only that one lifts it"
        try:
            self.thaw(at)
        except OSError as error:
            return f"the thaw could not be kept on disk, so the freeze stands: {error}"
        return None

    def _keep(self) -> None:
        """In memory, as a plug-in has it, there is nothing to do."""


def clean_reason(text: str) -> str:
    """A reason as one line that can be shown anywhere."""
    words = " ".join(text.split())
    return "".join(character for character in words if character.isprintable())[:MAX_REASON_CHARS]
