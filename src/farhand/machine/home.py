"""The home folder: state, settings and keys of this user's Farhand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from farhand.protocol.errors import FarhandError

# Default port of the gateway.
DEFAULT_PORT = 3210


class HomeError(FarhandError):
    """The home folder cannot be used."""


def home_folder(option: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the chosen home, or `~/.farhand`. Raises HomeError if the user is unknown."""
    chosen = option or environ.get("FARHAND_HOME") or "~/.farhand"
    try:
        return Path(chosen).expanduser().absolute()
    except RuntimeError:
        raise HomeError(f"the home folder {chosen} cannot be used: the home of that user is unknown") from None


def make_home(home: Path) -> None:
    """Create the home, or make an existing one private. Raises HomeError."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise HomeError(f"the home folder {home} cannot be used: {error.strerror}") from None
