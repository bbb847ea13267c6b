"""Read the store of a home without its gateway: the file in the home, or the database of [store] url."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from farhand.app.fleet import check_fleet_settings
from farhand.config import Config
from farhand.store.journal.seal import Head, load_key
from farhand.store.ports import Tx
from farhand.store.sqlite import audit
from farhand.store.sqlite.snapshots import STORE_FILE


def reading(home: Path, settings: Config) -> contextlib.AbstractContextManager[Tx]:
    """Open one snapshot of the store. Raises FarhandError."""
    url = _shared(settings)
    if not url:
        return audit.reading(home / STORE_FILE)
    found: contextlib.AbstractContextManager[Tx] = _postgres().reading(url)
    return found


def quick_look(home: Path, settings: Config) -> tuple[Head, str | None]:
    """Return the head of the journal, and what is wrong with its end, if anything is. Raises FarhandError."""
    url = _shared(settings)
    if not url:
        return audit.quick_look(home, home / STORE_FILE)
    found: tuple[Head, str | None] = _postgres().quick_look(url, load_key(home))
    return found


def _shared(settings: Config) -> str:
    check_fleet_settings(settings)
    return settings.store.url


def _postgres() -> Any:
    return importlib.import_module("farhand.store.postgres.audit")
