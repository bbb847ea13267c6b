"""Files that go to the disk while they are written."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from farhand.machine.write_out import WriteOut

MIB = 1024 * 1024
_CACHESTAT = 451


def waiting_bytes(file: int) -> int:
    """How much of a file is in memory and not on the disk; skips where the kernel does not tell."""
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if sys.platform != "linux" or ctypes.CDLL(None).syscall(_CACHESTAT, file, whole, found, 0):
        pytest.skip("this kernel does not tell what waits for the disk")
    return (found[1] + found[2]) * os.sysconf("SC_PAGE_SIZE")


def test_of_a_long_file_little_waits_for_the_disk(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
        if waiting_bytes(file.fileno()):
            pytest.skip("files here are in memory alone")
        out = WriteOut(file.fileno(), 1)
        for _ in range(48):
            out.wrote(file.write(os.urandom(MIB)))
            assert waiting_bytes(file.fileno()) <= 13 * MIB
    assert (tmp_path / "long").stat().st_size == 48 * MIB + 1


def test_a_descriptor_that_cannot_be_synced_is_left_to_the_sync_at_the_end() -> None:
    reading, writing = os.pipe()
    try:
        WriteOut(writing).wrote(64 * MIB)
    finally:
        os.close(reading)
        os.close(writing)
