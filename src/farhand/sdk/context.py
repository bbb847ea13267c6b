"""The context of a tool call."""

from __future__ import annotations

import asyncio

import msgspec


class CancelToken:
    """Signals that the call was cancelled. Tools poll it, or wait for it."""

    def __init__(self) -> None:
        self._cancelled = False
        # Created on demand: few tools wait.
        self._event: asyncio.Event | None = None
        self.reason = ""

    def is_cancelled(self) -> bool:
        return self._cancelled

    async def cancelled(self) -> None:
        """Wait until the call is cancelled."""
        if not self._cancelled:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()

    def cancel(self, reason: str = "") -> None:
        if not self._cancelled:
            self._cancelled = True
            self.reason = reason
            if self._event is not None:
                self._event.set()


class ToolContext(msgspec.Struct, frozen=True):
    """One invocation of a tool."""

    request_id: str
    tool_name: str
    session_key: str | None
    cancel: CancelToken
    # The gateway's time limit, if it sent one.
    timeout_ms: int | None = None
