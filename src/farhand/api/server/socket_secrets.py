"""Credentials in WebSocket subprotocols: a browser cannot set headers when it opens a WebSocket."""

from __future__ import annotations

import base64
import binascii

# The subprotocol that a client offers beside the one with its credential, and that the answer names.
TERMINAL = "farhand.terminal"
BEARER = "bearer."
PAGE = "page."


def with_offered_secrets(headers: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], str | None]:
    """Return the headers with the credentials of the offered subprotocols, and the subprotocol to answer with.

    `bearer.<token in base64url>` stands for `Authorization: Bearer`, `page.<secret>` for `X-Farhand-Page`. A header
    that was sent counts more. The answer never repeats a secret.
    """
    offered = [part.strip() for part in headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")]
    found: dict[bytes, bytes] = {}
    for name in offered:
        if name.startswith(BEARER):
            encoded = name.removeprefix(BEARER)
            try:
                token = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            except (binascii.Error, ValueError):
                continue
            found.setdefault(b"authorization", b"Bearer " + token)
        elif name.startswith(PAGE):
            found.setdefault(b"x-farhand-page", name.removeprefix(PAGE).encode("latin-1"))
    return {**found, **headers}, TERMINAL if TERMINAL in offered else None
