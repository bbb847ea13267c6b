"""Vector search without a vector library: preselect by sign bits, then compare the nearest exactly.

One bit per dimension, above or below the mean of all vectors, is enough to preselect some hundred of a hundred
thousand; those are compared in full. `benchmarks/memory.py` measures the recall.

numpy is used if it is installed, as it is with the local model: preselecting from a hundred thousand takes one
millisecond with it and twenty without, comparing 0.1 ms instead of 4. The results are the same.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
import operator
from array import array
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

# 32-bit floats of unit length.
Vector: TypeAlias = "array[float]"

# How many of the nearest are compared in full; up to this number, signs are not used.
COMPARED = 256
MOST_DIMENSIONS = 8192


class SignIndex:
    def __init__(self, rows: Sequence[tuple[int, int, bytes]], centre: Vector | None, arrays: Any = None) -> None:
        """`rows`: chunk ids in order, the ids of their vectors, and their sign bits. `arrays`: numpy."""
        self.ids = [chunk for chunk, _, _ in rows]
        self._vectors = array("q", [vector for _, vector, _ in rows])
        self._centre = centre
        self._arrays: Any = arrays if len({len(bits) for _, _, bits in rows}) == 1 else None
        self._columns: Any = self._packed(rows)
        self._bits = [int.from_bytes(bits) for _, _, bits in rows] if self._arrays is None else []

    def _packed(self, rows: Sequence[tuple[int, int, bytes]]) -> Any:
        """Return the signs as columns of integers, the fastest layout for numpy."""
        np = self._arrays
        if np is None or not rows:
            return None
        padded = b"".join(bits.ljust(_padded(len(bits)), b"\0") for _, _, bits in rows)
        return np.ascontiguousarray(np.frombuffer(padded, np.uint64).reshape(len(rows), -1).T)

    def _place(self, chunk: int) -> int | None:
        place = bisect.bisect_left(self.ids, chunk)
        return place if place < len(self.ids) and self.ids[place] == chunk else None

    def vectors(self, chunks: Collection[int]) -> dict[int, list[int]]:
        """Return the ids of the chunks' vectors, each with the chunks it belongs to."""
        found: dict[int, list[int]] = {}
        for chunk in chunks:
            if (place := self._place(chunk)) is not None:
                found.setdefault(self._vectors[place], []).append(chunk)
        return found

    def nearest(self, query: Vector) -> list[int]:
        """Return the chunks to compare in full."""
        if len(self.ids) <= COMPARED or self._centre is None:
            return self.ids
        wanted = signs(query, self._centre)
        if self._columns is not None:
            return self._nearest_by_columns(wanted)
        number = int.from_bytes(wanted)
        distances = [(bits ^ number).bit_count() for bits in self._bits]
        return [chunk_id for _, chunk_id in heapq.nsmallest(COMPARED, zip(distances, self.ids, strict=True))]

    def similarities(self, query: Vector, others: Sequence[bytes]) -> list[float]:
        """Return the cosine similarities of a unit vector and others of the same length."""
        if (np := self._arrays) is None or not others:
            return [similarity(query, vector_of(other)) for other in others]
        table = np.frombuffer(b"".join(others), np.float32).reshape(len(others), len(query))
        found: list[float] = (table @ np.frombuffer(query, np.float32)).tolist()
        return found

    def _nearest_by_columns(self, wanted: bytes) -> list[int]:
        np = self._arrays
        parts = np.frombuffer(wanted.ljust(_padded(len(wanted)), b"\0"), np.uint64)
        if len(parts) != len(self._columns):
            return self.ids[-COMPARED:]  # another model: the exact comparison detects it
        distances = np.zeros(len(self.ids), np.uint16)
        for column, part in zip(self._columns, parts, strict=True):  # by column, to avoid a large temporary
            distances += np.bitwise_count(column ^ part)
        # A histogram of distances gives the cut-off in a quarter of the time of sorting.
        edge = int(np.searchsorted(np.cumsum(np.bincount(distances)), COMPARED))
        near = np.flatnonzero(distances < edge).tolist()
        near += np.flatnonzero(distances == edge)[: COMPARED - len(near)].tolist()
        return [self.ids[place] for place in near]


def _padded(width: int) -> int:
    return -(-width // 8) * 8


def unit_vector(values: Sequence[float]) -> Vector:
    """Return a vector of unit length. Raises ValueError if it is empty, zero or not finite."""
    length = math.sqrt(sum(value * value for value in values))
    if not 0 < len(values) <= MOST_DIMENSIONS or not math.isfinite(length) or length == 0:
        raise ValueError(f"a vector of {len(values)} dimensions and length {length} has no direction")
    return array("f", [value / length for value in values])


def vector_of(data: bytes) -> Vector:
    return array("f", data)


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine similarity of two unit vectors."""
    return float(sum(map(operator.mul, one, other)))


@functools.cache
def numpy() -> Any:
    """Return numpy, or None if it is not installed or too old."""
    try:
        import numpy as module  # noqa: PLC0415
    except ImportError:
        return None
    return module if hasattr(module, "bitwise_count") else None


def signs(vector: Vector, centre: Vector | None) -> bytes:
    """Return one bit per dimension: above the mean, or not."""
    middle = centre if centre is not None and len(centre) == len(vector) else array("f", bytes(4 * len(vector)))
    text = "".join(["1" if value > edge else "0" for value, edge in zip(vector, middle, strict=True)])
    return int(text, 2).to_bytes((len(vector) + 7) // 8)


def mean(vectors: Sequence[Vector]) -> Vector:
    return array("f", [sum(column) / len(vectors) for column in zip(*vectors, strict=True)])
