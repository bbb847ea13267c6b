"""`[memory]` in `farhand.toml`. Read by every command, so it needs nothing heavy."""

from __future__ import annotations

from typing import Final

import msgspec

LOCAL: Final = "local"
NONE: Final = "none"


class MemorySettings(msgspec.Struct, forbid_unknown_fields=True):
    # A model of the embedding server, `local`, or `none`. Empty: the local model where it is installed.
    embedding_model: str = ""
    # Up to and including `/v1`; by default the model provider's.
    embedding_url: str = ""
    # By default the model provider's, for that provider's address only.
    embedding_api_key: str = ""
    # The least score of a hit, 0 to 1, where a search does not say; 0.35 by default.
    min_score: float | None = None
