"""Writing long files to disk continuously, bypassing the page cache where possible (Linux)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Sequence

from farhand.machine.files.confined_root import libc

_PIECE = 4 * 1024 * 1024
# A shorter file stays in the page cache: it will probably be read soon.
_LONG = 32 * 1024 * 1024
# Alignment of offset, length and memory for direct writes.
BLOCK = 4096
_PAST_CACHE: int | None = getattr(os, "O_DIRECT", None)
_AT_ONCE = 64
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


class DirectWriter:
    """Writes a long file to disk as it grows: past the page cache if possible, else in pieces, two in flight at most.

    Otherwise the kernel keeps a gigabyte in memory until it is synced, and other writes to that disk, such as the
    record of a call, wait behind all of it.
    """

    def __init__(self, file: int, position: int = 0, size: int = 0) -> None:
        """`position` is the current file offset, `size` the final length if it is known."""
        self._file = file
        self._position = self._begun = self._waited = position
        self._may_pass = _PAST_CACHE is not None and size - position >= _LONG
        self._passes = False

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append all pieces. Raises OSError."""
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
        """Append pieces past the page cache, at a third of the cost; return the remaining pieces."""
        while pieces:
            try:
                self._pass(on=True)
                size = os.writev(self._file, pieces[:_AT_ONCE])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._may_pass = False  # not supported by the file system, or the memory is not aligned
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
        """Account for `size` written bytes. May wait for the disk; errors are reported by the final sync."""
        self._position += size
        if self._position - self._begun < _PIECE:
            return
        sync = _sync_range()
        sync(self._file, self._begun, self._position - self._begun, _WRITE)
        if self._begun > self._waited:
            sync(self._file, self._waited, self._begun - self._waited, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        self._waited, self._begun = self._begun, self._position


def sync_file_system(descriptor: int) -> bool:
    """Sync the whole file system; return False if the system cannot."""
    sync = getattr(libc(), "syncfs", None)
    return sync is not None and sync(descriptor) == 0


@functools.cache
def _sync_range() -> Callable[[int, int, int, int], int]:
    found = getattr(libc(), "sync_file_range", None)
    if found is None:
        return lambda *_: 0
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call: Callable[[int, int, int, int], int] = found
    return call
