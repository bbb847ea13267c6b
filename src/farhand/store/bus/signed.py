"""A bus whose messages are signed with a key of the fleet: others on the same server cannot send or repeat any."""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from blake3 import blake3

from farhand.store.ports import Handler, ReplyUnknown, Subscription

log = logging.getLogger(__name__)

SIGNATURE_BYTES: Final = 32
# A message is dropped when its time differs more from the receiver's clock.
FRESH_SECONDS: Final = 120.0
# A message may arrive after this many later ones of its sender.
REORDERED: Final = 1024
MOST_SENDERS: Final = 1024
# Of a message: its sender, its number among those of the sender, and when it was sent, in milliseconds.
_HEADER: Final = struct.Struct(">16sQQ")
_CONTEXT: Final = "farhand bus key"


class SignedBus:
    """Signs what is sent through a bus, and drops what is not signed, old or repeated."""

    def __init__(self, bus: Any, secret: str, clock: Callable[[], float] = time.time) -> None:
        """`secret` is known only to the gateways of the fleet."""
        self._bus = bus
        self._clock = clock
        self._key = blake3(secret.encode(), derive_key_context=_CONTEXT).digest()
        self._sender = secrets.token_bytes(16)
        self._number = 0

    @property
    def connected(self) -> bool:
        return bool(self._bus.connected)

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        message = self._message(subject, body)
        # A reply is bound to its request, so one of an earlier request does not fit.
        reply = self._opened(_reply_to(subject, message), await self._bus.ask(subject, message, seconds))
        if reply is None:
            raise ReplyUnknown(f"the reply to {subject!r} is not signed by a gateway of this fleet")
        return reply

    def publish(self, subject: str, body: bytes) -> None:
        self._bus.publish(subject, self._message(subject, body))

    def serve(self, subject: str, handler: Handler) -> Subscription:
        received: OrderedDict[bytes, _Received] = OrderedDict()

        async def checked(data: bytes) -> bytes:
            body = self._opened(subject, data)
            if body is None or len(body) < _HEADER.size:
                log.error("dropped a message to %s that is not signed by a gateway of this fleet", subject)
                return b""
            sender, number, sent_ms = _HEADER.unpack_from(body)
            away = abs(self._clock() - sent_ms / 1000)
            if away > FRESH_SECONDS:
                log.error(
                    "dropped a message to %s whose time is %.0f s away from this machine's: it was held up or "
                    "repeated, or the clocks of the gateways differ",
                    subject,
                    away,
                )
                return b""
            of_sender = received.setdefault(sender, _Received())
            received.move_to_end(sender)
            if len(received) > MOST_SENDERS:
                received.popitem(last=False)
            if not of_sender.is_new(number):
                log.error("dropped a message to %s that was received before", subject)
                return b""
            return self._signed(_reply_to(subject, data), await handler(body[_HEADER.size :]))

        found: Subscription = self._bus.serve(subject, checked)
        return found

    async def close(self) -> None:
        await self._bus.close()

    def _message(self, subject: str, body: bytes) -> bytes:
        self._number += 1
        return self._signed(subject, _HEADER.pack(self._sender, self._number, round(self._clock() * 1000)) + body)

    def _signature(self, subject: str, body: bytes) -> bytes:
        return blake3(b"%d %b%b" % (len(subject), subject.encode(), body), key=self._key).digest()

    def _signed(self, subject: str, body: bytes) -> bytes:
        return self._signature(subject, body) + body

    def _opened(self, subject: str, data: bytes) -> bytes | None:
        given, body = data[:SIGNATURE_BYTES], bytes(data[SIGNATURE_BYTES:])
        return body if hmac.compare_digest(given, self._signature(subject, body)) else None


class _Received:
    """The numbers of the messages that were received from one sender."""

    def __init__(self) -> None:
        self._highest = 0
        # Bit n stands for the number n below the highest.
        self._recent = 0

    def is_new(self, number: int) -> bool:
        """Return whether a message was not received before; from now on it was. One that is too late counts as old."""
        ahead = number - self._highest
        if ahead > 0:
            self._recent = ((self._recent << ahead) | 1) & ((1 << REORDERED) - 1) if ahead < REORDERED else 1
            self._highest = number
            return True
        if -ahead >= REORDERED or self._recent >> -ahead & 1:
            return False
        self._recent |= 1 << -ahead
        return True


def _reply_to(subject: str, message: bytes) -> str:
    return f"{subject} reply to {message[:SIGNATURE_BYTES].hex()}"
