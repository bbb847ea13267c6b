"""Load the client libraries of chat services, which are extras of the package, on first use."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from typing import Any, Final

# Loggers that would log each request, tokens included.
QUIET: Final = ("httpx", "httpcore", "pywa", "hikari", "aiohttp", "telegram")


def missing(module: str) -> bool:
    """Return whether a library is not installed, without importing it."""
    return importlib.util.find_spec(module) is None


async def load(*modules: str) -> Any:
    """Import modules in a thread and return the first; importing can take a second and would block the event loop."""
    loaded = [await asyncio.to_thread(importlib.import_module, module) for module in modules]
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return loaded[0]
