"""The key of a node: created once, stored in the node's folder, never sent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from farhand.machine.files.private_files import replace_private
from farhand.protocol.errors import FarhandError
from farhand.protocol.key_auth import KEY_BYTES, from_text, to_text
from farhand.protocol.receipts import SigningKey
from farhand.protocol.sealing import SealingKey

KEY_FILE: Final = "key.json"
# A recognisable prefix, so that the private key is redacted wherever it appears.
SEED: Final = "fhk_"


class NodeKey(SigningKey):
    """The Ed25519 key in a node's folder, and the gateway it belongs to."""

    def __init__(self, path: Path, seed: bytes, gateway_id: str | None) -> None:
        super().__init__(seed)
        self._path = path
        self._seed = seed
        self._gateway_id = gateway_id

    @classmethod
    def load(cls, folder: Path) -> NodeKey | None:
        """Load the key of a node's folder; return None if there is none. Raises FarhandError for an unusable one."""
        path = folder / KEY_FILE
        try:
            kept = json.loads(path.read_text())
            seed, gateway_id = from_text(str(kept["seed"]).removeprefix(SEED)), kept.get("gateway_id")
            if len(seed) != KEY_BYTES or not isinstance(gateway_id, str | None):
                raise ValueError("invalid content")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FarhandError(f"the key in {path} cannot be read: {error}; move it away and join again") from None
        if path.stat().st_mode & 0o077:
            raise FarhandError(f"the key in {path} is readable by others: run chmod 600 {path}, or join again")
        return cls(path, seed, gateway_id)

    @classmethod
    def make(cls, folder: Path) -> NodeKey:
        """Load the key of a node's folder, or create one."""
        known = cls.load(folder)
        if known is not None:
            return known
        made = cls.fresh(folder)
        made._save()
        return made

    @classmethod
    def fresh(cls, folder: Path) -> NodeKey:
        """Return a new key for a node's folder; it is stored, replacing an older one, when it belongs to a gateway."""
        return cls(folder / KEY_FILE, os.urandom(KEY_BYTES), None)

    def expects(self, gateway_id: str) -> bool:
        """Return whether this is the gateway of the key; a key without one is bound to the first that asks."""
        if self._gateway_id is None:
            self.belongs_to(gateway_id)
        return gateway_id == self._gateway_id

    def belongs_to(self, gateway_id: str) -> None:
        """Bind the key to this gateway: it signs for no other."""
        self._gateway_id = gateway_id
        self._save()

    def _save(self) -> None:
        kept = {"seed": SEED + to_text(self._seed), "public": self.public}
        if self._gateway_id is not None:
            kept["gateway_id"] = self._gateway_id
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(self._path, json.dumps(kept).encode())


def load_receipt_key(path: Path) -> SigningKey:
    """Load the key with which a node without a login key signs its answers, or create one. Raises FarhandError."""
    return SigningKey(_load_or_create(path, SEED))


def load_sealing_key(path: Path) -> SealingKey:
    """Load the key to which secrets are sealed, or create one. Raises FarhandError for a file that cannot be used."""
    return SealingKey(_load_or_create(path, ""))


def _load_or_create(path: Path, prefix: str) -> bytes:
    """Return the private key in a file, where it follows `prefix`."""
    try:
        private = from_text(path.read_text().strip().removeprefix(prefix))
        if len(private) != KEY_BYTES:
            raise ValueError("invalid content")
    except FileNotFoundError:
        private = os.urandom(KEY_BYTES)
        replace_private(path, (prefix + to_text(private)).encode())
    except (OSError, ValueError) as error:
        raise FarhandError(f"the key in {path} cannot be read: {error}; remove the file to create another") from None
    return private
