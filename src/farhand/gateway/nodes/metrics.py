"""Samples of how busy the nodes are, of the last day."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec

from farhand.protocol.version import MIB

# The query that nodes answer with a sample, announced as the feature `query.metrics`.
METRICS = "metrics"
EVERY_SECONDS = 10.0
DAY_SAMPLES = int(86_400 / EVERY_SECONDS)
# Of all nodes together; with many nodes, each has less than a day.
MOST_BYTES = 64 * MIB

Amount = Annotated[float, msgspec.Meta(ge=0, le=2**60)]


class Reading(msgspec.Struct, frozen=True):
    """What a node reports."""

    cpu: Annotated[float, msgspec.Meta(ge=0, le=100)]
    memory: Amount
    memory_total: Amount
    disk: Amount
    disk_total: Amount
    load: Amount


class Sample(msgspec.Struct, frozen=True):
    """A reading and when it arrived: milliseconds since 1970. `cpu` is in percent of all cores, sizes are bytes."""

    at: int
    cpu: float
    memory: int
    memory_total: int
    disk: int
    disk_total: int
    load: float


# Sizes are stored with 24 significant bits.
_PACKED = struct.Struct("<q6f")


class MetricsHistory:
    def __init__(self) -> None:
        self._nodes: dict[str, bytearray] = {}
        # Added since `take_new`.
        self._new: dict[str, bytearray] = {}

    def add(self, node_id: str, at: int, reading: Reading) -> None:
        sample = _PACKED.pack(
            at,
            reading.cpu,
            reading.memory,
            reading.memory_total,
            reading.disk,
            reading.disk_total,
            reading.load,
        )
        self._append(node_id, sample)
        self._new.setdefault(node_id, bytearray()).extend(sample)

    def take_new(self) -> dict[str, bytes]:
        """Return the samples that were added since the last time, packed, by node."""
        taken, self._new = self._new, {}
        return {node_id: bytes(packed) for node_id, packed in taken.items() if node_id in self._nodes}

    def restore(self, node_id: str, packed: bytes, since: int) -> None:
        """Add packed samples of an earlier process that are not older than this moment."""
        for start in range(0, len(packed) - _PACKED.size + 1, _PACKED.size):
            if _PACKED.unpack_from(packed, start)[0] >= since:
                self._append(node_id, packed[start : start + _PACKED.size])

    def _append(self, node_id: str, sample: bytes) -> None:
        packed = self._nodes.setdefault(node_id, bytearray())
        packed += sample
        most = min(DAY_SAMPLES, MOST_BYTES // _PACKED.size // len(self._nodes)) * _PACKED.size
        if len(packed) > most:
            del packed[: len(packed) - most]

    def since(self, node_id: str, at: int) -> list[Sample]:
        """Return the samples from this moment on, the oldest first."""
        found = []
        packed = self._nodes.get(node_id, b"")
        for start in range(len(packed) - _PACKED.size, -1, -_PACKED.size):
            when, cpu, memory, memory_total, disk, disk_total, load = _PACKED.unpack_from(packed, start)
            if when < at:
                break
            sizes = int(memory), int(memory_total), int(disk), int(disk_total)
            found.append(Sample(when, round(cpu, 1), *sizes, round(load, 2)))
        found.reverse()
        return found

    def keep(self, node_ids: Iterable[str]) -> None:
        """Drop the samples of every other node."""
        for gone in self._nodes.keys() - set(node_ids):
            del self._nodes[gone]
            self._new.pop(gone, None)


def first_moment(packed: bytes) -> int:
    return int(_PACKED.unpack_from(packed, 0)[0])
