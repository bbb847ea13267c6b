"""Files that go to the disk while they are written."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest

from farhand.machine.files.direct_writes import BLOCK, DirectWriter

MIB = 1024 * 1024
_CACHESTAT = 451


def cached(file: int) -> tuple[int, int]:
    """How much of a file is in memory, and of that not on the disk; skips where the kernel does not tell."""
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if sys.platform != "linux" or ctypes.CDLL(None).syscall(_CACHESTAT, file, whole, found, 0):
        pytest.skip("this kernel does not tell what waits for the disk")
    page = os.sysconf("SC_PAGE_SIZE")
    return found[0] * page, (found[1] + found[2]) * page


def waiting_bytes(file: int) -> int:
    return cached(file)[1]


def test_little_of_a_long_file_waits_for_the_disk(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb", buffering=0) as file:
        file.write(b"x")
        os.fsync(file.fileno())
        if waiting_bytes(file.fileno()):
            pytest.skip("files here are in memory alone")
        out = DirectWriter(file.fileno(), 1)
        for _ in range(48):
            out.wrote(file.write(os.urandom(MIB)))
            assert waiting_bytes(file.fileno()) <= 13 * MIB
    assert (tmp_path / "long").stat().st_size == 48 * MIB + 1


def test_a_descriptor_that_cannot_be_synced_is_left_to_the_sync_at_the_end() -> None:
    reading, writing = os.pipe()
    try:
        DirectWriter(writing).wrote(64 * MIB)
    finally:
        os.close(reading)
        os.close(writing)


# Of a mebibyte: longer than what stays in the cache.
PIECES = 40


def pieces(at: int = 0) -> list[memoryview]:
    """Pieces of memory that begins `at` bytes behind a page."""
    found = []
    for number in range(PIECES):
        memory = memoryview(mmap.mmap(-1, MIB + BLOCK))[at : at + MIB]
        memory[:] = bytes([number]) * MIB
        found.append(memory)
    return found


def written(path: Path, parts: list[list[memoryview]], position: int = 0, size: int | None = None) -> int:
    """Write the parts to a file, one after the other; how much of it is in memory then."""
    path.write_bytes(b"." * position)
    whole = position + sum(len(piece) for part in parts for piece in part)
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        out = DirectWriter(file.fileno(), position, whole if size is None else size)
        for part in parts:
            out.write(part)
        os.fsync(file.fileno())
        assert path.read_bytes() == b"." * position + b"".join(piece for part in parts for piece in part)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as file:
        return cached(file.fileno())[0]


def passes_the_cache(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_long_file_is_not_in_the_cache_while_it_is_written(tmp_path: Path) -> None:
    if not passes_the_cache(tmp_path):
        pytest.skip("this file system has nothing but a cache")
    with (tmp_path / "long").open("wb", buffering=0) as file:
        out = DirectWriter(file.fileno(), size=PIECES * MIB)
        for piece in pieces():
            out.write([piece])
            assert cached(file.fileno())[0] <= MIB
        out.write([memoryview(b"and the rest")])
    data = (tmp_path / "long").read_bytes()
    assert data == b"".join(bytes([number]) * MIB for number in range(PIECES)) + b"and the rest"


def test_a_file_that_is_not_long_stays_in_the_cache(tmp_path: Path) -> None:
    with (tmp_path / "short").open("wb", buffering=0) as file:
        DirectWriter(file.fileno(), size=MIB).write([memoryview(pieces()[0])])
        assert cached(file.fileno())[0] == MIB


@pytest.mark.parametrize("position", [0, BLOCK, 1, 5000])
@pytest.mark.parametrize("at", [0, 1])
def test_whatever_its_place_and_memory_a_file_is_what_was_written(tmp_path: Path, position: int, at: int) -> None:
    tail = memoryview(b"a tail that fills no block")
    written(tmp_path / "file", [pieces(at)[:3], pieces(at)[3:], [tail]], position)
    written(tmp_path / "file", [[*pieces(at), tail], [tail], pieces(at)], position)


def test_more_pieces_than_one_system_call_takes_are_all_written(tmp_path: Path) -> None:
    many = [memoryview(mmap.mmap(-1, BLOCK)) for _ in range(3000)]
    for number, piece in enumerate(many):
        piece[:] = number.to_bytes(4) * (BLOCK // 4)
    written(tmp_path / "file", [many], size=10**9)


def test_nothing_is_written_of_pieces_that_hold_nothing(tmp_path: Path) -> None:
    full, empty = pieces()[0], memoryview(b"")
    written(tmp_path / "file", [[empty], [full, empty], [empty, full], [empty, empty]], size=10**9)
