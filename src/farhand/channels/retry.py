"""Retry what a received message needs, for services that deliver each message only once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from farhand.gateway.messaging.channel import Attachment, DeliveryError, Undeliverable
from farhand.protocol.errors import ToolError

log = logging.getLogger(__name__)

LONGEST_WAIT: Final = 60.0
FILE_PAUSES: Final = (1.0, 3.0, None)


async def until_stored(attempt: Callable[[], Awaitable[None]], service: str) -> None:
    """Hand a message over until it is on disk; the messages after it wait."""
    wait = 1.0
    while True:
        try:
            return await attempt()
        except ToolError as error:
            log.warning("failed to store a %s message; retrying in %g s: %s", service, wait, error)
        await asyncio.sleep(wait)
        wait = min(LONGEST_WAIT, wait * 2)


async def fetch_file(attempt: Callable[[], Awaitable[Attachment]], service: str) -> Attachment | None:
    """Download a file, with a few attempts; return None if it is too large or no longer exists."""
    for pause in FILE_PAUSES:
        try:
            return await attempt()
        except DeliveryError as error:
            if isinstance(error, Undeliverable) or pause is None:
                log.warning("skipped a %s attachment: %s", service, error)
                break
            await asyncio.sleep(pause)
    return None
