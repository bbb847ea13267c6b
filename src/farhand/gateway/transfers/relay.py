"""One attempt of a transfer: relay messages between sender and receiver, and bytes without reading them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from farhand.gateway.nodes.registry import Connection
from farhand.protocol.errors import Failed, FarhandError, ToolError
from farhand.protocol.frames import HEADER_BYTES, FrameKind
from farhand.protocol.manifest import MAX_ENTRIES, MAX_MANIFEST_BYTES
from farhand.protocol.messages import (
    Message,
    TransferCredit,
    TransferDone,
    TransferOffer,
    TransferReady,
    encode,
)
from farhand.protocol.version import TRANSFER_WINDOW_BYTES

Role = Literal["send", "receive"]
MAX_SIZE = 2**60
MAX_NAME = 4096
MAX_DIGEST = 256
MAX_MIME = 200


class Interrupted(FarhandError):
    """An end of the transfer disconnected; the transfer resumes when it returns."""


class StartAgain(FarhandError):
    """The received data was discarded; a new attempt from the start may succeed."""


class Party(Protocol):
    """One end of a transfer: a node, or an endpoint of the gateway that handles the same messages."""

    def tell(self, message: Message) -> None: ...

    def pass_on(self, frame: bytes | memoryview) -> None:
        """Send a frame. A memoryview belongs to the caller again when this returns."""


class NodeParty:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def tell(self, message: Message) -> None:
        self.connection.link.send(encode(message))

    def pass_on(self, frame: bytes | memoryview) -> None:
        self.connection.link.send_frame(frame)


class Stream:
    """The state of one attempt. A protocol violation by either end fails the attempt."""

    def __init__(self, number: int, sender: Party, receiver: Party, moved: Callable[[int], None]) -> None:
        self.number = number
        self.sender = sender
        self.receiver = receiver
        loop = asyncio.get_running_loop()
        self.offered: asyncio.Future[TransferOffer] = loop.create_future()
        self.accepted: asyncio.Future[TransferReady] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.heard_at = time.monotonic()
        # Bytes from earlier attempts: both ends may reread them for their digests before anything moves.
        self.held = 0
        self._moved = moved
        self._next = 0
        self._until = 0
        # Offset that the receiver has written.
        self._written = 0
        self._parts = 0
        self._total = 0
        self._stray: Callable[[], None] | None = None
        self._refused = False

    @property
    def whole(self) -> bool:
        """Return whether the receiver may have everything and may have put it in place."""
        return not self._refused and 0 < self._total <= min(self._next, self._until)

    def heard(self, role: Role, message: Message) -> None:
        """Handle a message of an end. Only messages that advance the transfer count as activity."""
        match message:
            case TransferReady(offer=TransferOffer() as offer) if role == "send" and not self.offered.done():
                if not _possible(offer):
                    self.fail(Failed("the sender's offer is invalid"))
                    return
                if offer.mime is not None and not _is_mime(offer.mime):
                    offer = msgspec.structs.replace(offer, mime=None)
                self._total = offer.manifest_bytes + offer.size
                self.heard_at = time.monotonic()
                self.offered.set_result(offer)
            case TransferReady() if role == "receive" and self.offered.done() and not self.accepted.done():
                if not 0 <= message.offset <= self._total:
                    self.fail(Failed("the receiver wants to begin beyond the end"))
                    return
                self._next = self._until = self._written = message.offset
                self.heard_at = time.monotonic()
                self.accepted.set_result(message)
            case TransferCredit(_, offset, until) if role == "receive" and self.accepted.done():
                if not 0 <= offset <= self._next:
                    self.fail(Failed("the receiver claims more than was sent"))
                    return
                self._until = max(self._until, min(until, offset + TRANSFER_WINDOW_BYTES))
                if offset > self._written:
                    self._written = offset
                    self.held = 0
                    self.heard_at = time.monotonic()
                self._moved(offset)
                self.sender.tell(TransferCredit(self.number, offset, self._until))
            case TransferDone(_, None) if role == "receive" and self.accepted.done():
                if self._next != self._total:
                    self.fail(Failed("the receiver says it has everything, which it cannot"))
                elif not self.done.done():
                    self.done.set_result(None)
            case TransferDone(_, error, again) if error is not None:
                self._refused = role == "receive"
                failure = ToolError.of(error.kind, error.message)
                self.fail(StartAgain(error.message) if again and role == "receive" else failure)

    def relay(self, kind: FrameKind, offset: int, frame: bytes | memoryview) -> None:
        """Relay a frame of the sender, if it was allowed to send it."""
        if not self.accepted.done() or self.done.done():
            return
        if self._stray is not None:
            self._stray()
            return
        if kind is FrameKind.DATA:
            size = len(frame) - HEADER_BYTES
            if offset != self._next or offset + size > min(self._until, self._total):
                self.fail(Failed("the sender sent bytes it was not asked for"))
                return
            self._next += size
        else:
            self._parts += 1
            if self._parts > MAX_ENTRIES + 1:
                self.fail(Failed("the sender sent more parts than a transfer has"))
                return
        self.receiver.pass_on(frame)

    def carried(self, broke: Callable[[], None]) -> None:
        """Stop counting bytes here, since they use a separate connection; `broke` is called if any arrive anyway."""
        self._next = self._total
        self._stray = broke

    def fail(self, error: FarhandError) -> None:
        for future in (self.offered, self.accepted, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as retrieved, even if nothing awaits it

    def over(self) -> None:
        for future in (self.offered, self.accepted, self.done):
            future.cancel()


def _possible(offer: TransferOffer) -> bool:
    return (
        0 < offer.manifest_bytes <= MAX_MANIFEST_BYTES
        and 0 <= offer.size <= MAX_SIZE
        and 0 <= offer.files <= MAX_ENTRIES
        and len(offer.name) <= MAX_NAME
        and len(offer.manifest_digest) <= MAX_DIGEST
    )


def _is_mime(text: str) -> bool:
    return len(text) <= MAX_MIME and text.isascii() and text.isprintable()
