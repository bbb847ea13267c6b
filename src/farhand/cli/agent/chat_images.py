"""Images for a message, given by path."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Final

from farhand.machine.files.mime import mime_type
from farhand.protocol.errors import FarhandError

LARGEST_IMAGE: Final = 10 * 1024 * 1024
_KINDS: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NAMED: Final = re.compile(r"(?:^|(?<=\s))@(\S+\.(?:png|jpe?g|gif|webp))(?=\s|$)", re.IGNORECASE)


class ImageError(FarhandError):
    """A file that cannot be sent as an image."""


def read_image(name: str) -> str:
    """Return an image as a data URL. Raises ImageError."""
    path = Path(name.strip().strip("'\"")).expanduser()
    try:
        size = path.stat().st_size
        if size > LARGEST_IMAGE:
            raise ImageError(f"{path} has {size} bytes; an image may have at most {LARGEST_IMAGE}")
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from None
    kind = mime_type(data)
    if kind not in _KINDS:
        raise ImageError(f"{path} is not a PNG, JPEG, GIF or WebP image")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def with_images(text: str) -> tuple[str, list[str]]:
    """Return a message and the images that it names as `@PATH`. Raises ImageError for one that cannot be read."""
    return text, [read_image(found[1]) for found in _NAMED.finditer(text)]
