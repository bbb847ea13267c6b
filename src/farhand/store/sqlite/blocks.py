"""Blocks of memory that go to the disk past the page cache, while the loop goes on (Linux).

The kernel tells a descriptor of the loop when the disk has them, so neither the loop nor a thread waits: a write and a
sync take 65 µs of CPU time and block whoever makes them for 140, this takes 20 and blocks nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

# A disk quicker than this may be waited for on the loop while nothing else goes on.
QUICK_SECONDS: Final = 0.0005
MOST_REGIONS: Final = 4
# Of the system calls io_setup, io_destroy, io_getevents and io_submit, for which the C library has no names.
_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
# struct iocb: data, key, flags, operation, priority, file, memory, length, place, reserved, flags, descriptor.
_ORDER: Final = struct.Struct("<QIIHhIQQqQII")
# struct io_event: data, order, result, second result.
_EVENT: Final = struct.Struct("<QQqq")
_WRITE, _TELL_DESCRIPTOR = 1, 1
_UNABLE: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EAGAIN)

# From where to where, in the memory and in the file.
Region = tuple[int, int]
Then = Callable[[OSError | None], None]


class BlockWriter:
    """Writes regions of a memory to the same places of a file, one write at a time. Its owner calls `close`."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        """Raises OSError where the system or the file system cannot do this."""
        # A program of 32 bits on such a machine has other numbers, and other calls under these.
        if platform.machine() not in _NUMBERS or not hasattr(os, "eventfd") or sys.maxsize < 2**32:
            raise OSError(errno.ENOSYS, "no asynchronous writes here")
        setup, destroy, getevents, submit = _NUMBERS[platform.machine()]
        number, pointer = ctypes.c_long, ctypes.c_void_p
        self._destroy = _system_call(destroy, ctypes.c_ulong)
        self._getevents = _system_call(getevents, ctypes.c_ulong, number, number, pointer, pointer)
        self._submit = _system_call(submit, ctypes.c_ulong, number, pointer)
        self._context = ctypes.c_ulong()
        self._orders = ctypes.create_string_buffer(_ORDER.size * MOST_REGIONS)
        first = ctypes.addressof(self._orders)
        self._order_list = (ctypes.c_void_p * MOST_REGIONS)(*(first + n * _ORDER.size for n in range(MOST_REGIONS)))
        self._events = ctypes.create_string_buffer(_EVENT.size * MOST_REGIONS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._then: Then = _nobody
        self._left = 0
        self._failure: OSError | None = None
        self._began = 0.0
        # How long the last write took, in seconds.
        self.took = 0.0
        # How long they take of late.
        self.seconds = 0.0
        self._file = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC | os.O_CLOEXEC)
        try:
            self._done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self._file)
            raise
        if _system_call(setup, number, pointer)(MOST_REGIONS, ctypes.byref(self._context)) != 0:
            error = _last_error()
            self._close_files()
            raise error
        self._view = memoryview(memory)
        self._whole = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._address = ctypes.addressof(self._whole)

    def write(self, regions: Sequence[Region], then: Then) -> bool:
        """Whether these are on their way; `then` hears when the disk has them all, or why it has not.

        The memory stays as it is until then.
        """
        if len(regions) > MOST_REGIONS:
            return False
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._done, self._reap)
        for number, (start, end) in enumerate(regions):
            order = (number, 0, 0, _WRITE, 0, self._file, self._address + start, end - start, start, 0)
            _ORDER.pack_into(self._orders, number * _ORDER.size, *order, _TELL_DESCRIPTOR, self._done)
        self._began = time.perf_counter()
        taken = self._submit(self._context, len(regions), self._order_list)
        if taken <= 0:
            return False
        self._then, self._left = then, taken
        if taken < len(regions):
            self._failure = OSError(errno.EAGAIN, f"{taken} of {len(regions)} writes were taken")
        return True

    def write_now(self, regions: Sequence[Region], then: Then) -> None:
        """As `write`, and wait for the disk: half the time, where nobody else wants the loop."""
        self._began = time.perf_counter()
        self._then = then
        try:
            for start, end in regions:
                self._check(os.pwrite(self._file, self._view[start:end], start), end - start)
        except OSError as error:
            self._failure = error
        self._finish()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done)
        count = self._getevents(self._context, 0, MOST_REGIONS, self._events, None)
        if count < 0:
            self._failure, count = _last_error(), self._left
        else:
            for at in range(count):
                number, _, written, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
                self._check(written, _ORDER.unpack_from(self._orders, number * _ORDER.size)[7])
        self._left -= count
        if count and self._left == 0:
            self._finish()

    def _check(self, written: int, expected: int) -> None:
        if written < 0:
            self._failure = OSError(-written, os.strerror(-written))
        elif written != expected:
            self._failure = OSError(errno.EIO, f"only {written} of {expected} bytes were written")

    def _finish(self) -> None:
        self.took = time.perf_counter() - self._began
        self.seconds += (self.took - self.seconds) / 8
        then, failure = self._then, self._failure
        self._then, self._failure = _nobody, None
        then(failure)

    def close(self) -> None:
        """Waits for what is on its way; nobody is told of it."""
        self._destroy(self._context)
        self._left, self._then = 0, _nobody
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._done)
        self._close_files()
        self._view.release()
        del self._whole

    def _close_files(self) -> None:
        os.close(self._done)
        os.close(self._file)


def unable(error: OSError) -> bool:
    """It is not the disk that failed: this way of writing cannot be had here."""
    return error.errno in _UNABLE


def _system_call(number: int, *types: type[Any]) -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True)["syscall"]
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, *types)
    return partial(function, number)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _nobody(_: OSError | None) -> None:
    pass
