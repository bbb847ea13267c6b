"""The code that adds a machine: `K7QM-2RXF@192.168.1.5:3210#PIN`.

It holds a one-time secret, the address of the gateway, and the digest of its certificate if that is self-signed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Final

import msgspec

_PIN: Final = re.compile(r"[A-Za-z0-9_-]{43}")


class JoinCode(msgspec.Struct, frozen=True):
    """A code in its parts; `url` is empty if the code has no address."""

    secret: str
    url: str = ""
    pin: str | None = None

    @classmethod
    def parse(cls, text: str) -> JoinCode:
        """Read a code. An address without a scheme is `https` with a pin and `http` without. Raises ValueError."""
        secret, _, rest = text.strip().partition("@")
        place, marked, pin = rest.partition("#")
        if marked and not _PIN.fullmatch(pin):
            raise ValueError(
                f"the code is incomplete: {pin!r} after the # is not a certificate's digest; copy it again"
            )
        url = place if "://" in place or not place else f"{'https' if marked else 'http'}://{place}"
        return cls(secret, url.rstrip("/"), pin or None)

    def __str__(self) -> str:
        plain = "https://" if self.pin else "http://"
        place = self.url.removeprefix(plain)
        return f"{self.secret}@{place}#{self.pin}" if self.pin else f"{self.secret}@{place}"


def certificate_pin(der: bytes) -> str:
    """Return the digest of a certificate as codes contain it."""
    return base64.urlsafe_b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")
