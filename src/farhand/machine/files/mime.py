"""File types, recognised by the first bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pure_magic_rs import MagicDb

HEAD = 4096  # enough for every supported format


def mime_type(head: bytes) -> str:
    """Return the MIME type for the beginning of a file; `application/octet-stream` if unknown."""
    try:
        return _database().best_magic_buffer(head[:HEAD]).mime_type
    except ValueError:
        return "application/octet-stream"


@functools.cache
def _database() -> MagicDb:
    # Takes 30 ms and 2 MB to load, so only for the first file that is not text.
    from pure_magic_rs import MagicDb  # noqa: PLC0415

    return MagicDb()
