"""Login by a key instead of a token: what a client needs to be given for it."""

from __future__ import annotations

from typing import Protocol

from farhand.protocol.key_auth import signed_bytes, to_text
from farhand.protocol.messages import GatewayChallenge, NodeProof
from farhand.sdk.errors import Refused


class LoginKey(Protocol):
    """The private half stays behind this; `farhand node` has it in a file of its own."""

    @property
    def public(self) -> str:
        """The public half, as `protocol.login` writes it."""
        ...

    def sign(self, data: bytes) -> bytes: ...

    def expects(self, gateway_id: str) -> bool:
        """Whether this is the gateway that is meant: for no other is anything signed."""
        ...


def prove(key: LoginKey, challenge: GatewayChallenge, node_id: str) -> NodeProof:
    """Raises Refused for the challenge of another gateway, which might take the answer there."""
    if not key.expects(challenge.gateway_id):
        raise Refused(
            f"the gateway there calls itself {challenge.gateway_id[:64]!r} and is not the one this node joined; "
            "join it with a new code if that is meant"
        )
    return NodeProof(to_text(key.sign(signed_bytes(challenge, node_id))))
