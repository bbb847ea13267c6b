"""`[memory]` in `farhand.toml`. Imported by every command, so it has no heavy imports."""

from __future__ import annotations

from typing import Final

import msgspec

LOCAL: Final = "local"
NONE: Final = "none"


class MemorySettings(msgspec.Struct, forbid_unknown_fields=True):
    # A model of the embedding server, `local`, or `none`. Empty: the local model if it is installed.
    embedding_model: str = ""
    # Up to and including `/v1`; by default the model provider's.
    embedding_url: str = ""
    # Defaults to the model provider's key, for that provider's address only.
    embedding_api_key: str = ""
    # Default minimum score of a hit, 0 to 1; 0.35 if not set.
    min_score: float | None = None
