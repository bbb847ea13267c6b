"""A chat service that only sends: each message becomes a line of a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from farhand.gateway.messaging.channel import ChannelKind, ChannelSettings, Outgoing, Take, TryLater, Undeliverable
from farhand.store.tables.outbox import Place


class NotebookSettings(ChannelSettings, kw_only=True):
    """The table `[channels.notebook]`."""

    path: str


class NotebookChannel:
    # What fits into one message.
    longest_text = 10_000
    # A repeated delivery is recognised by its id.
    repeatable = False
    files_apart = False
    # Why the channel does not work at the moment.
    trouble = ""

    def __init__(self, settings: NotebookSettings) -> None:
        self.settings = settings

    async def run(self, take: Take) -> None:
        """Receive nothing."""
        await asyncio.Event().wait()

    async def send(self, message: Outgoing) -> str | None:
        """Append a message. Raises TryLater while the file cannot be written, and Undeliverable for files."""
        if message.attachments:
            raise Undeliverable("a notebook takes no files; send only a text")
        line = msgspec.json.encode({"to": message.place.peer, "text": message.text}) + b"\n"
        try:
            await asyncio.to_thread(self._append, line)
        except OSError as error:
            raise TryLater(str(error)) from None
        return None

    def _append(self, line: bytes) -> None:
        with Path(self.settings.path).open("ab") as file:
            file.write(line)

    async def typing(self, place: Place) -> None:
        return None

    async def close(self) -> None:
        return None


CHANNEL = ChannelKind(NotebookSettings, NotebookChannel)
