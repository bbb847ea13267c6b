"""Files that go to the disk while they are written, where the kernel lets us say so (Linux)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Sequence

_PIECE = 4 * 1024 * 1024
# A shorter file stays in the page cache: whoever it was sent to will read it soon.
_LONG = 32 * 1024 * 1024
# What place, length and memory of a write past the page cache are multiples of.
BLOCK = 4096
_PAST_CACHE: int | None = getattr(os, "O_DIRECT", None)
_AT_ONCE = 64
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class DirectWriter:
    """Sends a long file to the disk as it grows: past the page cache where it can, else in pieces, two at most on
    their way.

    Without it the kernel keeps a gigabyte in memory until it is synced, and whoever wants something else on that disk
    meanwhile, such as the record of a call, waits behind all of it.
    """

    def __init__(self, file: int, position: int = 0, size: int = 0) -> None:
        """`position` is where the file is written next, `size` how long it becomes, where that is known."""
        self._file = file
        self._position = self._begun = self._waited = position
        self._may_pass = _PAST_CACHE is not None and size - position >= _LONG
        self._passes = False

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append all of them. Raises OSError."""
        pieces = [piece for piece in pieces if piece]
        if self._may_pass and self._position % BLOCK == 0:
            whole = next((at for at, piece in enumerate(pieces) if len(piece) % BLOCK), len(pieces))
            pieces = [*self._write_past(pieces[:whole]), *pieces[whole:]]
        for piece in pieces:
            self._pass(on=False)
            done = 0
            while done < len(piece):
                size = os.write(self._file, piece[done:])
                done += size
                self.wrote(size)

    def _write_past(self, pieces: Sequence[memoryview]) -> Sequence[memoryview]:
        """Append them past the page cache: a third of the work, and others keep what they have there. What is left."""
        while pieces:
            try:
                self._pass(on=True)
                size = os.writev(self._file, pieces[:_AT_ONCE])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._may_pass = False  # this file system cannot, or this memory is not aligned
                break
            if size == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._position += size
            self._begun = self._waited = self._position
            while size:
                taken = min(size, len(pieces[0]))
                pieces = [pieces[0][taken:], *pieces[1:]] if taken < len(pieces[0]) else pieces[1:]
                size -= taken
        return pieces

    def _pass(self, *, on: bool) -> None:
        if self._passes is not on:
            assert _PAST_CACHE is not None
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _PAST_CACHE if on else flags & ~_PAST_CACHE)
            self._passes = on

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
