"""Login of a node by its Ed25519 key: how a key is written, and which bytes a node signs.

The signature names the gateway, the node, the gateway's one-time number and its time. So what was listened to is worth
nothing: another connection has another number, and another gateway another name.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from farhand.protocol.messages import GatewayChallenge

# Of the `Authorization` header a node with a key comes with.
SCHEME: Final = "Ed25519"
PREFIX: Final = "ed25519:"
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_PURPOSE: Final = b"farhand node login 1\n"


def signed_bytes(challenge: GatewayChallenge, node_id: str) -> bytes:
    return _PURPOSE + msgspec.json.encode([challenge.gateway_id, node_id, challenge.nonce, challenge.time])


def key_text(public_key: bytes) -> str:
    """`ed25519:` and the key in base64url, as people pass it on."""
    return PREFIX + to_text(public_key)


def read_key(text: str) -> bytes:
    """The key in such a text. Raises ValueError saying what is wrong with it."""
    try:
        key = from_text(text.strip().removeprefix(PREFIX))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a public key is {PREFIX} and 43 letters, as `farhand node key` shows it, not {text[:60]!r}")
    return key


def to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text: str) -> bytes:
    """Raises ValueError."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
