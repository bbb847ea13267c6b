"""Vectors without a vector library: a quick look at their signs, then an exact comparison of the nearest.

One bit a dimension, above or below the middle of all vectors, is enough to choose some hundred of a hundred thousand;
those are compared in full. Measured against an exact search in `benchmarks/memory.py`.
"""

from __future__ import annotations

import heapq
import math
import operator
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

Vector: TypeAlias = "array[float]"
"""32-bit floats, of length one."""

COMPARED = 256
"""How many of the nearest are compared in full; up to here the signs are not needed at all."""
MOST_DIMENSIONS = 8192


class Sketch(msgspec.Struct, frozen=True):
    """The signs of many vectors, side by side."""

    ids: list[int]
    bits: list[int]
    centre: Vector | None

    def nearest(self, query: Vector) -> list[int]:
        """The chunks worth comparing in full."""
        if len(self.ids) <= COMPARED or self.centre is None:
            return self.ids
        wanted = int.from_bytes(signs(query, self.centre))
        distances = [(bits ^ wanted).bit_count() for bits in self.bits]
        return [chunk_id for _, chunk_id in heapq.nsmallest(COMPARED, zip(distances, self.ids, strict=True))]


def unit_vector(values: Sequence[float]) -> Vector:
    """Raises ValueError for what is no direction: nothing, zero, or a number that is none."""
    length = math.sqrt(sum(value * value for value in values))
    if not 0 < len(values) <= MOST_DIMENSIONS or not math.isfinite(length) or length == 0:
        raise ValueError(f"a vector of {len(values)} dimensions and length {length} has no direction")
    return array("f", [value / length for value in values])


def vector_of(data: bytes) -> Vector:
    return array("f", data)


def similarity(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors of length one."""
    return float(sum(map(operator.mul, one, other)))


def signs(vector: Vector, centre: Vector | None) -> bytes:
    """One bit a dimension: above the middle, or not."""
    middle = centre if centre is not None and len(centre) == len(vector) else array("f", bytes(4 * len(vector)))
    text = "".join(["1" if value > edge else "0" for value, edge in zip(vector, middle, strict=True)])
    return int(text, 2).to_bytes((len(vector) + 7) // 8)


def mean(vectors: Sequence[Vector]) -> Vector:
    return array("f", [sum(column) / len(vectors) for column in zip(*vectors, strict=True)])
