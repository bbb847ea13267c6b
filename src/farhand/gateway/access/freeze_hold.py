"""Whether everything is frozen, as the services that begin work see it."""

from __future__ import annotations

from farhand.protocol.freeze import FreezeOrder


class FreezeHold:
    """Holds the order under which nothing may begin; only `gateway.control.freeze` changes it."""

    def __init__(self, order: FreezeOrder | None = None) -> None:
        self.order = order

    def __call__(self) -> FreezeOrder | None:
        return self.order
