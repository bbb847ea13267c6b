"""The client libraries of chat services: extras of the package, loaded when a channel first needs them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from typing import Any, Final

# Loggers that would tell each request, tokens included.
QUIET: Final = ("httpx", "httpcore", "pywa", "hikari", "aiohttp", "telegram")


def missing(module: str) -> bool:
    """Whether a library is not installed; it is not loaded for that."""
    return importlib.util.find_spec(module) is None


async def load(*modules: str) -> Any:
    """Load modules, in a thread: that takes up to a second in which the loop is needed elsewhere. The first of them."""
    loaded = [await asyncio.to_thread(importlib.import_module, module) for module in modules]
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return loaded[0]
