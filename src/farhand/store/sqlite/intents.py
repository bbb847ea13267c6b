"""What was promised before the tables have it.

A call with effects must be on disk before it leaves, and a killed gateway may not forget a call it answered. The tables
would take a transaction over four pages for that; here it is one write into blocks the file already has, for all that
came together (a file that grows takes twice as long). The tables follow later, many calls in one transaction.

The file has two halves, each written from its beginning under a number of its own (the epoch). A half is written again
only once the tables have all that the other half and it promised, on disk. What is found at the next start may
therefore be in the tables already; it is taken up only where it is not.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Final

from farhand.machine.files.direct_writes import BLOCK
from farhand.store.sqlite.blocks import Region

HALF = 2 << 20
# What is larger goes to the tables at once.
LARGEST = HALF // 16
_HEAD: Final = struct.Struct("<IIQ")  # length, checksum of what follows it, epoch


class IntentLog:
    """Opened by `IntentLog.open`; whoever opened it calls `close`. One process at a time.

    Intents are put into memory. A `mapped` log is for what need not be synced: its memory is the file, and a killed
    process loses nothing of it. Another is written by whoever `take`s what was added: whole blocks, each of them once,
    so that a write that breaks off can harm nothing that was promised before.
    """

    def __init__(self, file: int, epoch: int, *, mapped: bool = False) -> None:
        self.file = file
        self.memory = mmap.mmap(file if mapped else -1, 2 * HALF)
        self._mapped = mapped
        self._half = 0
        self._busy = [False, False]
        self._epoch = epoch
        # Where the next intent goes in its half.
        self._at = 0
        self._taken = 0
        # What was added to the half before this one and not taken.
        self._left: list[Region] = []
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
        # An epoch no earlier run had: what those left lies behind what is written now, and is not to be taken for new.
        epoch = max(halves[-1][0] + 1, time.time_ns() // 1000)
        return cls(file, epoch, mapped=mapped), [intent for _, intents in halves for intent in intents]

    def add(self, intent: bytes) -> bool:
        """Put an intent into the memory; False when this half has no room."""
        at = self._at
        end = at + _HEAD.size + len(intent)
        if end > HALF or self.retired:
            return False
        self._at = end
        epoch = self._epoch
        start = self._half * HALF
        self.memory[start + at : start + end] = (
            _HEAD.pack(len(intent), zlib.crc32(intent, epoch & 0xFFFFFFFF), epoch) + intent
        )
        return True

    def take(self) -> list[Region]:
        """The blocks that were added since the last time, to be written; what comes next goes into others."""
        regions, self._left = self._left, []
        start, end = self._taken, -(-self._at // BLOCK) * BLOCK
        if end > start:
            first = self._half * HALF
            self.memory[first + self._at : first + end] = bytes(end - self._at)
            self._at = self._taken = end
            regions.append((first + start, first + end))
        return regions

    def write(self, regions: list[Region]) -> None:
        """Hand what was taken to the system; a sync of `file` puts it on disk. Raises OSError."""
        for start, end in regions:
            if os.pwrite(self.file, memoryview(self.memory)[start:end], start) != end - start:
                raise OSError(f"only a part of {end - start} bytes was written")

    def turn(self) -> int | None:
        """Go on in the other half, if that is free; the one left is to be `free`d when the tables have what it says."""
        left, other = self._half, 1 - self._half
        if self._busy[other] or self.retired:
            return None
        if not self._mapped:
            self._left = self.take()
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
        self.memory.close()
        os.close(self.file)

    def _begin(self, half: int) -> None:
        self._half, self._at, self._taken = half, 0, 0
        self._epoch += 1


def _read(half: bytes) -> tuple[int, list[bytes]]:
    """The epoch of a half, and the intents written under it; a torn one, never promised to anybody, ends them."""
    intents: list[bytes] = []
    first = 0
    at = 0
    while at + _HEAD.size <= len(half):
        length, checksum, epoch = _HEAD.unpack_from(half, at)
        intent = half[at + _HEAD.size : at + _HEAD.size + length]
        if length and epoch == (first or epoch) and zlib.crc32(intent, epoch & 0xFFFFFFFF) == checksum:
            first = epoch
            intents.append(intent)
            at += _HEAD.size + length
        elif at % BLOCK:
            at += -at % BLOCK  # what was written later begins in a block of its own
        else:
            break
    return first, intents
