"""Work in a thread of its own, for what must not wait behind other work however busy the shared threads are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns or raises; cancelled, it goes on in its thread."""
    thread = ThreadPoolExecutor(1, "farhand-apart")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: function(*args, **kwargs))
    finally:
        thread.shutdown(wait=False)
