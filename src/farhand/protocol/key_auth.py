"""Login of a node by its Ed25519 key: the text form of a key, and the bytes a node signs.

The signature covers the gateway, the node, the gateway's nonce and its time, so it is useless for another connection
or another gateway.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from farhand.protocol.messages import GatewayChallenge

# Scheme of the `Authorization` header.
SCHEME: Final = "Ed25519"
PREFIX: Final = "ed25519:"
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_PURPOSE: Final = b"farhand node login 1\n"


def signed_bytes(challenge: GatewayChallenge, node_id: str) -> bytes:
    return _PURPOSE + msgspec.json.encode([challenge.gateway_id, node_id, challenge.nonce, challenge.time])


def key_text(public_key: bytes) -> str:
    """Return `ed25519:` and the key in base64url."""
    return PREFIX + to_text(public_key)


def read_key(text: str) -> bytes:
    """Return the key in such a text. Raises ValueError."""
    try:
        key = from_text(text.strip().removeprefix(PREFIX))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"not a public key: {text[:60]!r}; expected {PREFIX} and 43 characters (`farhand node key`)")
    return key


def to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text: str) -> bytes:
    """Raises ValueError."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
