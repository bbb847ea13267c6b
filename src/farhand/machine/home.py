"""The home folder: where state, settings and keys of this user's Farhand lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from farhand.protocol.errors import FarhandError

# Where the gateway of a home listens unless its settings say otherwise.
DEFAULT_PORT = 3210


class HomeError(FarhandError):
    """The home folder cannot be used."""


def home_folder(option: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """What was named, or `~/.farhand`. Raises HomeError where there is no such user."""
    chosen = option or environ.get("FARHAND_HOME") or "~/.farhand"
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError:
        raise HomeError(f"the home folder {chosen} cannot be used: nobody knows where that user's home is") from None


def make_home(home: Path) -> None:
    """Create the home, or close it to others. Raises HomeError when that cannot be done."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise HomeError(f"the home folder {home} cannot be used: {error.strerror}") from None
