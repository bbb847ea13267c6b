"""Files that go to the disk while they are written, where the kernel lets us say so (Linux)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_PIECE = 4 * 1024 * 1024
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class WriteOut:
    """Sends a long file to the disk in pieces as it grows, two of them at most under way.

    Without it the kernel keeps a gigabyte in memory until it is synced, and whoever wants something else on that disk
    meanwhile, such as the record of a call, waits behind all of it.
    """

    def __init__(self, file: int, position: int = 0) -> None:
        """`position` is where the file is written next."""
        self._file = file
        self._position = self._begun = self._waited = position

    def wrote(self, size: int) -> None:
        """So much was written. May wait for the disk; that the disk failed is told by the sync at the end."""
        self._position += size
        if self._position - self._begun < _PIECE:
            return
        sync = _sync_range()
        sync(self._file, self._begun, self._position - self._begun, _WRITE)
        if self._begun > self._waited:
            sync(self._file, self._waited, self._begun - self._waited, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        self._waited, self._begun = self._begun, self._position


def sync_file_system(descriptor: int) -> bool:
    """Bring everything to the disk at once; False where the system cannot."""
    sync = getattr(_libc(), "syncfs", None)
    return sync is not None and sync(descriptor) == 0


@functools.cache
def _sync_range() -> Callable[[int, int, int, int], int]:
    found = getattr(_libc(), "sync_file_range", None)
    if found is None:
        return lambda *_: 0
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call: Callable[[int, int, int, int], int] = found
    return call


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
