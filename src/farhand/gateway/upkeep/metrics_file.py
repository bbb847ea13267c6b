"""Keep the samples of the nodes over a restart of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from farhand.gateway.nodes.metrics import MOST_BYTES, MetricsHistory, first_moment
from farhand.gateway.repeating import PeriodicTask
from farhand.machine.files.private_files import open_private

log = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
DAY_MS = 86_400_000
FOLDER = "metrics"
# Before a record: the lengths of the node's id and of the samples, and their checksum.
_HEAD = struct.Struct("<HII")


class MetricsFile(PeriodicTask):
    """Append new samples to a file once a minute.

    A file that is a day old or too large is kept until the next one is, too.
    """

    def __init__(self, folder: Path, history: MetricsHistory, clock: Callable[[], int]) -> None:
        self._current, self._previous = folder / "current", folder / "previous"
        self._history = history
        self._clock = clock
        self._begun = clock()

    async def __aenter__(self) -> MetricsFile:
        await asyncio.to_thread(self._load)
        return await super().__aenter__()

    async def __aexit__(self, *details: object) -> None:
        await super().__aexit__(*details)
        self._save(self._history.take_new())

    def first_delay(self) -> float:
        return EVERY_SECONDS

    async def run_once(self) -> float:
        # Not interrupted by the end of the task, which saves what is new then.
        await asyncio.shield(asyncio.to_thread(self._save, self._history.take_new()))
        return EVERY_SECONDS

    def _load(self) -> None:
        since = self._clock() - DAY_MS
        for path in (self._previous, self._current):
            try:
                content = path.read_bytes()
                whole = 0
                for node_id, packed, whole in _records(content):  # noqa: B007
                    self._history.restore(node_id, packed, since)
                if whole < len(content):  # the last record was not written to its end
                    os.truncate(path, whole)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("the samples of the nodes in %s cannot be read: %s", path, error.strerror)
                continue
            if path == self._current:
                self._begun = next((first_moment(packed) for _, packed, _ in _records(content)), self._begun)

    def _save(self, new: dict[str, bytes]) -> None:
        if not new:
            return
        try:
            self._current.parent.mkdir(mode=0o700, exist_ok=True)
            with open_private(self._current, "ab") as file:
                file.writelines(_record(node_id, packed) for node_id, packed in new.items())
                size = file.tell()
            if size > MOST_BYTES or self._clock() - self._begun > DAY_MS:
                self._current.replace(self._previous)
                self._begun = self._clock()
        except OSError as error:
            log.warning("the samples of the nodes cannot be written to %s: %s", self._current, error.strerror)


def _record(node_id: str, packed: bytes) -> bytes:
    name = node_id.encode()
    return _HEAD.pack(len(name), len(packed), zlib.crc32(name + packed)) + name + packed


def _records(content: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Yield the records, each with where it ends, up to the first one that is not whole."""
    at = 0
    while at + _HEAD.size <= len(content):
        name_length, length, checksum = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        body = content[at : at + name_length + length]
        if len(body) < name_length + length or zlib.crc32(body) != checksum:
            return
        at += len(body)
        yield body[:name_length].decode(errors="replace"), body[name_length:], at
