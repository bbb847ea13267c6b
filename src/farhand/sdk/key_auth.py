"""Login by key instead of a token."""

from __future__ import annotations

from typing import Protocol

from farhand.protocol.key_auth import signed_bytes, to_text
from farhand.protocol.messages import GatewayChallenge, NodeProof
from farhand.sdk.errors import Refused


class LoginKey(Protocol):
    """Signs for a node; `farhand node` keeps the private key in a file."""

    @property
    def public(self) -> str:
        """The public key, in the form of `protocol.key_auth.key_text`."""
        ...

    def sign(self, data: bytes) -> bytes: ...

    def expects(self, gateway_id: str) -> bool:
        """Return whether the key belongs to this gateway; nothing is signed for another one."""
        ...


def prove(key: LoginKey, challenge: GatewayChallenge, node_id: str) -> NodeProof:
    """Sign a challenge. Raises Refused for the challenge of another gateway, which could relay it."""
    if not key.expects(challenge.gateway_id):
        raise Refused(
            f"the gateway identifies itself as {challenge.gateway_id[:64]!r}, which is not the one this node joined; "
            "join it with a new code if that is intended"
        )
    return NodeProof(to_text(key.sign(signed_bytes(challenge, node_id))))
