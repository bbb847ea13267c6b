"""Process large bodies outside the event loop.

Reading, copying or searching tens of megabytes takes long enough to be noticed by every other client. Such work is
done in one thread, one body at a time: several threads would compete with the loop for the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from farhand.protocol.redaction import KnownSecrets, StreamRedactor
from farhand.protocol.version import MIB
from farhand.store.tables.calls import CallRecord

T = TypeVar("T")

# Smaller bodies are handled on the loop, which is faster.
LARGE_BYTES: Final = MIB
PIECE_BYTES: Final = 256 * 1024

_thread: Final = ThreadPoolExecutor(1, "farhand-large")


async def beside_loop(size: int, function: Callable[[], T]) -> T:
    """Run `function`, which handles a body of `size` bytes, and return its result."""
    if size < LARGE_BYTES:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_thread, function)


async def redacted(data: bytes, secrets: KnownSecrets) -> bytes:
    """Return the data with each secret replaced."""
    if len(data) < LARGE_BYTES:
        return secrets.redact(data)
    return await beside_loop(len(data), partial(_redact_pieces, data, secrets))


def result_bytes(record: CallRecord) -> int:
    """Return the length of a call's result."""
    return 0 if record.result is None else memoryview(record.result).nbytes


def _redact_pieces(data: bytes, secrets: KnownSecrets) -> bytes:
    # Each search holds the interpreter lock, so searching a whole body at once would still block the loop.
    redactor = StreamRedactor(secrets)
    pieces = [redactor.feed(data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES)]
    return b"".join([*pieces, redactor.finish()])
