"""The home folder: where state, settings and keys of this user's Farhand lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from farhand.protocol.errors import FarhandError

DEFAULT_PORT = 3210
"""Where the gateway of a home listens unless its settings say otherwise."""


class HomeError(FarhandError):
    """The home folder cannot be used."""


def home_folder(option: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """What was named, or `~/.farhand`."""
    chosen = option or environ.get("FARHAND_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".farhand"


def make_home(home: Path) -> None:
    """Create the home, or close it to others. Raises HomeError when that cannot be done."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise HomeError(f"the home folder {home} cannot be used: {error.strerror}") from None
