"""The key to which a gateway seals the secrets of a call, so that only this node can read them."""

from __future__ import annotations

from collections.abc import Mapping

from farhand.protocol.errors import InvalidArgs
from farhand.protocol.key_auth import from_text, to_text


class SealingKey:
    """An X25519 key, a new one unless its bytes are given."""

    def __init__(self, private: bytes | None = None) -> None:
        # Imported late: it takes 2.5 MB, which plug-ins that take no secrets save.
        from nacl.public import PrivateKey, SealedBox  # noqa: PLC0415

        key = PrivateKey.generate() if private is None else PrivateKey(private)
        self.private = bytes(key)
        self.public = to_text(bytes(key.public_key))
        self._box = SealedBox(key)

    def open(self, sealed: Mapping[str, str]) -> dict[str, str]:
        """Return the values of sealed secrets. Raises InvalidArgs if they were sealed to another key."""
        from nacl.exceptions import CryptoError  # noqa: PLC0415

        try:
            return {name: self._box.decrypt(from_text(text)).decode() for name, text in sealed.items()}
        except (CryptoError, ValueError) as error:
            raise InvalidArgs(f"a secret of this call cannot be read here: {error}; it did not run") from None


def seal(value: str, public: str) -> str:
    """Seal a value to the key of a node. Raises ValueError for an unusable key."""
    from nacl.exceptions import CryptoError  # noqa: PLC0415
    from nacl.public import PublicKey, SealedBox  # noqa: PLC0415

    try:
        return to_text(SealedBox(PublicKey(from_text(public))).encrypt(value.encode()))
    except (CryptoError, TypeError) as error:
        raise ValueError(str(error)) from None
