"""Implement the `console` channel, whose messages are read from the gateway itself and never sent to a service."""

from __future__ import annotations

import asyncio

from farhand.gateway.messaging.channel import ChannelSettings, Outgoing, Take
from farhand.store.tables.outbox import Place


class ConsoleChannel:
    """Leave messages in the outbox and the journal; `farhand message list --channel console` shows them."""

    longest_text = 1_000_000
    files_apart = False
    repeatable = True
    trouble = ""

    def __init__(self) -> None:
        self.settings = ChannelSettings(kind="console", account="default", policy="allowlist")

    async def run(self, take: Take) -> None:  # noqa: ARG002
        """Do nothing: console users talk to sessions directly."""
        await asyncio.Event().wait()

    async def send(self, message: Outgoing) -> str | None:  # noqa: ARG002
        return None

    async def typing(self, place: Place) -> None:  # noqa: ARG002
        return None

    async def close(self) -> None:
        return None
