"""Expose the freeze state to the services that start work."""

from __future__ import annotations

from farhand.protocol.freeze import FreezeOrder


class FreezeHold:
    """Hold the current freeze order; only `gateway.control.freeze` changes it."""

    def __init__(self) -> None:
        self.order: FreezeOrder | None = None

    def __call__(self) -> FreezeOrder | None:
        return self.order
