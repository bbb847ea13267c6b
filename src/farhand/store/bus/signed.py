"""A bus whose messages are signed with a key of the fleet: others on the same server cannot send any."""

from __future__ import annotations

import hmac
import logging
from typing import Any, Final

from blake3 import blake3

from farhand.store.ports import Handler, ReplyUnknown, Subscription

log = logging.getLogger(__name__)

SIGNATURE_BYTES: Final = 32
_CONTEXT: Final = "farhand bus key"


class SignedBus:
    """Signs what is sent through a bus, and drops what is not signed. A repeated message is not recognised."""

    def __init__(self, bus: Any, secret: str) -> None:
        """`secret`: one that all gateways of the fleet have, and nobody else."""
        self._bus = bus
        self._key = blake3(secret.encode(), derive_key_context=_CONTEXT).digest()

    @property
    def connected(self) -> bool:
        return bool(self._bus.connected)

    async def ask(self, subject: str, body: bytes, seconds: float) -> bytes:
        reply = self._opened(f"{subject} reply", await self._bus.ask(subject, self._signed(subject, body), seconds))
        if reply is None:
            raise ReplyUnknown(f"the reply to {subject!r} is not signed by a gateway of this fleet")
        return reply

    def publish(self, subject: str, body: bytes) -> None:
        self._bus.publish(subject, self._signed(subject, body))

    def serve(self, subject: str, handler: Handler) -> Subscription:
        async def checked(data: bytes) -> bytes:
            body = self._opened(subject, data)
            if body is None:
                log.error("dropped a message to %s that is not signed by a gateway of this fleet", subject)
                return b""
            return self._signed(f"{subject} reply", await handler(body))

        found: Subscription = self._bus.serve(subject, checked)
        return found

    async def close(self) -> None:
        await self._bus.close()

    def _signature(self, subject: str, body: bytes) -> bytes:
        return blake3(b"%d %b%b" % (len(subject), subject.encode(), body), key=self._key).digest()

    def _signed(self, subject: str, body: bytes) -> bytes:
        return self._signature(subject, body) + body

    def _opened(self, subject: str, data: bytes) -> bytes | None:
        given, body = data[:SIGNATURE_BYTES], bytes(data[SIGNATURE_BYTES:])
        return body if hmac.compare_digest(given, self._signature(subject, body)) else None
