"""What a file is, told by its first bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pure_magic_rs import MagicDb

HEAD = 4096  # bytes that are enough for every format we name


def mime_type(head: bytes) -> str:
    """The MIME type of a file that begins like this; `application/octet-stream` when nothing is known of it."""
    try:
        return _database().best_magic_buffer(head[:HEAD]).mime_type
    except ValueError:
        return "application/octet-stream"


@functools.cache
def _database() -> MagicDb:
    # 30 ms and 2 MB to load, so not before the first file that is not text.
    from pure_magic_rs import MagicDb  # noqa: PLC0415

    return MagicDb()
