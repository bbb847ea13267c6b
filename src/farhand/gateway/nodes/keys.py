"""Verify signatures made with a node's key."""

from __future__ import annotations

from farhand.protocol.key_auth import SIGNATURE_BYTES, from_text, signed_bytes
from farhand.protocol.messages import GatewayChallenge, NodeProof


def proves(public_key: bytes, challenge: GatewayChallenge, node_id: str, proof: NodeProof) -> bool:
    # Imported on first use: only gateways with a node that has a key need it.
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        signature = from_text(proof.signature)
        if len(signature) != SIGNATURE_BYTES:
            return False
        VerifyKey(public_key).verify(signed_bytes(challenge, node_id), signature)
    except (ValueError, BadSignatureError):
        return False
    return True
