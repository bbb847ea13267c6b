"""What was promised before the tables have it.

A call with effects must be on disk before it leaves, and a killed gateway may not forget a call it answered. The tables
would take a transaction over four pages for that; here it is one write into blocks the file already has, and one sync
for all that came together (measured: 160 µs, where a file that grows takes 280). The tables follow later, many calls in
one transaction.

The file has two halves, each written from its beginning under a number of its own (the epoch). A half is written again
only once the tables have all that the other half and it promised, on disk. What is found at the next start may
therefore be in the tables already; it is taken up only where it is not.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Final

HALF = 2 << 20
LARGEST = HALF // 16
"""What is larger goes to the tables at once."""
_HEAD: Final = struct.Struct("<IIQ")  # length, checksum of what follows it, epoch


class IntentLog:
    """Opened by `IntentLog.open`; whoever opened it calls `close`. One process at a time.

    A `mapped` one is for what need not be synced: writing to memory is ten times as quick as a system call (0.4 instead
    of 4 µs), but syncing it takes four times as long.
    """

    def __init__(self, file: int, epoch: int, *, mapped: bool = False) -> None:
        self.file = file
        self._memory = mmap.mmap(file, 2 * HALF) if mapped else None
        self._half = 0
        self._busy = [False, False]
        self._epoch = epoch
        self._at = 0
        """Where the next intent goes in its half."""
        self._written = 0
        self._gathered: list[bytes] = []
        self.retired = False

    @classmethod
    def open(cls, path: Path, *, mapped: bool = False) -> tuple[IntentLog, list[bytes]]:
        """The log, and what it still holds, in order. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            if size < 2 * HALF:
                os.pwrite(file, bytes(2 * HALF - size), size)  # blocks of its own: a sync need not write new ones down
                os.fsync(file)
            halves = sorted((_read(os.pread(file, HALF, start)) for start in (0, HALF)), key=lambda half: half[0])
        except OSError:
            os.close(file)
            raise
        return cls(file, halves[-1][0] + 1, mapped=mapped), [intent for _, intents in halves for intent in intents]

    def add(self, intent: bytes) -> bool:
        """Take an intent for the next `write`, or where it is mapped, write it; False when this half has no room."""
        at = self._at
        end = at + _HEAD.size + len(intent)
        if end > HALF or self.retired:
            return False
        self._at = end
        epoch = self._epoch
        data = _HEAD.pack(len(intent), zlib.crc32(intent, epoch & 0xFFFFFFFF), epoch) + intent
        if self._memory is None:
            self._gathered.append(data)
        else:
            start = self._half * HALF
            self._memory[start + at : start + end] = data
        return True

    def write(self) -> None:
        """Hand what was added to the system; a sync of `file` puts it on disk. Raises OSError."""
        if not self._gathered:
            return
        data = b"".join(self._gathered)
        if os.pwrite(self.file, data, self._half * HALF + self._written) != len(data):
            raise OSError(f"only a part of {len(data)} bytes was written")
        self._gathered.clear()
        self._written += len(data)

    def turn(self) -> int | None:
        """Go on in the other half, if that is free; the one left is to be `free`d when the tables have what it says."""
        left, other = self._half, 1 - self._half
        if self._busy[other] or self.retired:
            return None
        self.write()
        self._busy[left] = True
        self._begin(other)
        return left

    def free(self, half: int) -> None:
        self._busy[half] = False

    def retire(self) -> None:
        """The tables did not take what was promised: keep it for the next start, and promise nothing more."""
        self.retired = True

    def clear(self) -> None:
        """Forget everything: the tables have it."""
        for start in (0, HALF):
            os.pwrite(self.file, bytes(_HEAD.size), start)
        os.fdatasync(self.file)
        self._busy = [False, False]
        self._begin(0)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        os.close(self.file)

    def _begin(self, half: int) -> None:
        self._half, self._at, self._written = half, 0, 0
        self._epoch += 1


def _read(half: bytes) -> tuple[int, list[bytes]]:
    """The epoch of a half, and the intents written under it; a torn one, never promised to anybody, ends them."""
    intents: list[bytes] = []
    first = 0
    at = 0
    while at + _HEAD.size <= len(half):
        length, checksum, epoch = _HEAD.unpack_from(half, at)
        intent = half[at + _HEAD.size : at + _HEAD.size + length]
        if not length or epoch != (first or epoch) or zlib.crc32(intent, epoch & 0xFFFFFFFF) != checksum:
            break
        first = epoch
        intents.append(intent)
        at += _HEAD.size + length
    return first, intents
