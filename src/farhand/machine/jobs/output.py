"""A command's output on disk, written by its worker and readable by anyone while it grows.

Offsets count every byte the command ever wrote. The stream is stored in segments named by the offset of their first
byte; over the limit, the oldest is dropped. Bytes that are not kept, for that reason or because the disk was full,
leave a gap in the offsets. Standard library only: the keeper imports this file.
"""
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_SEGMENTS = 16  # the limit is divided into this many segments
_SMALLEST = 65536
OUTPUT = "output"
ERRORS = "errors"  # standard error, for a command whose streams are separate


class OutputChunk(NamedTuple):
    """Output from `offset` on; `skipped` requested bytes before it are not kept."""

    offset: int
    data: bytes
    skipped: int = 0

    @property
    def next_offset(self) -> int:
        """The offset at which the next read continues."""
        return self.offset + len(self.data)


class OutputWriter:
    """The only writer of an output, in the folder of the descriptor `folder`."""

    def __init__(self, folder: int, limit: int, name: str = OUTPUT) -> None:
        """Raises OSError if no segment can be created."""
        self.size = 0
        self._name = name
        self._folder = folder
        self._limit = limit
        self._segment = max(_SMALLEST, limit // _SEGMENTS)
        self._file = -1
        self._starts: list[int] = []
        self._open()

    def append(self, data: bytes) -> None:
        """Append `data`. If the disk is full, the bytes are lost, the command continues and offsets stay valid."""
        view = memoryview(data)
        try:
            if self._file < 0 or self.size - self._starts[-1] >= self._segment:
                self._open()
            while view:
                written = os.write(self._file, view)
                self.size += written
                view = view[written:]
        except OSError:
            self.size += len(view)
            self._close()

    def _open(self) -> None:
        self._close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(f"{self._name}.{self.size:015d}", flags, 0o600, dir_fd=self._folder)
        self._starts.append(self.size)
        while len(self._starts) > 1 and self.size + self._segment - self._starts[0] > self._limit:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._name}.{self._starts[0]:015d}", dir_fd=self._folder)
            del self._starts[0]

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def segments(folder: str, name: str = OUTPUT) -> list[tuple[int, int]]:
    """Return the segments of the output in `folder` as (first byte, byte after the last), in order."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.startswith(f"{name}."):
                start = int(entry.name[len(name) + 1 :])
                with contextlib.suppress(FileNotFoundError):
                    found.append((start, start + entry.stat().st_size))
    return sorted(found)


def read(folder: str, offset: int, limit: int, name: str = OUTPUT) -> OutputChunk:
    """Return at most `limit` bytes from `offset` on; empty if there are none yet, or none any more."""
    data = b""
    begin = offset
    for start, end in segments(folder, name):
        if end <= begin:
            continue
        if start > begin + len(data):
            if data:
                break  # a gap: the next read reports it
            begin = start
        with (
            contextlib.suppress(FileNotFoundError),  # dropped concurrently for newer output
            open(f"{folder}/{name}.{start:015d}", "rb") as file,
        ):
            file.seek(begin + len(data) - start)
            data += file.read(limit - len(data))
        if len(data) >= limit:
            break
    return OutputChunk(begin, data, begin - offset) if data else OutputChunk(offset, b"")


def tail(folder: str, limit: int, end: int, name: str = OUTPUT) -> OutputChunk:
    """Return what is kept of the last `limit` bytes before byte `end`, without gaps."""
    first = max(0, end - limit)
    pieces = []
    position = first
    while position < end:
        chunk = read(folder, position, end - position, name)
        if not chunk.data or chunk.offset >= end:
            break
        pieces.append(chunk.data[: end - chunk.offset])
        position = chunk.next_offset
    data = b"".join(pieces)
    return OutputChunk(end - len(data), data, end - first - len(data))
