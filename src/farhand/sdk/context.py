"""What a tool is told about the call it serves."""

from __future__ import annotations

import asyncio

import msgspec


class CancelToken:
    """Says that nobody waits for the result any more. Tools ask it, or wait for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""

    def is_cancelled(self) -> bool:
        return self._event.is_set()

    async def cancelled(self) -> None:
        """Returns once the call is cancelled."""
        await self._event.wait()

    def cancel(self, reason: str = "") -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()


class ToolContext(msgspec.Struct, frozen=True):
    """One invocation of a tool."""

    request_id: str
    tool_name: str
    session_key: str | None
    cancel: CancelToken
    timeout_ms: int | None = None
    """How long the gateway waits, where it said so."""
