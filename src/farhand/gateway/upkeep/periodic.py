"""Run periodic work while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class Repeating:
    """Run a task while used as a context manager."""

    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _repeat(self) -> None:
        raise NotImplementedError
