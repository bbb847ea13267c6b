"""The intent logs of earlier versions, which held calls for a moment before the tables did.

A gateway that was killed may have left calls in them. They are stored at the next start, and the logs are deleted.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farhand.protocol.calls import NULL
from farhand.store.ports import Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState

# The suffixes of their files, in the order in which they are read: a call's start comes before its end.
INTENT_LOGS: Final = ("-promises", "-tidings")
_HALF: Final = 2 << 20
_BLOCK: Final = 4096
_HEAD: Final = struct.Struct("<IIQ")  # length, checksum of what follows it, epoch


class _Intent(CallRecord, frozen=True, kw_only=True):
    # `Raw | None` cannot be decoded; only a call that ended well has a result.
    result: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Intent).decode


def store_intents(tx: Tx, logs: Sequence[Path]) -> None:
    """Store the calls of some logs, as far as the tables do not have them."""
    for path in logs:
        data = path.read_bytes()
        halves = sorted((list(_intents(data[start : start + _HALF])) for start in (0, _HALF)), key=_epoch)
        for _, intent in (found for half in halves for found in half):
            read = _decode(intent)
            fields = {name: getattr(read, name) for name in CallRecord.__struct_fields__}
            record = CallRecord(**{**fields, "result": read.result if read.state is CallState.OK else None})
            if calls.find(tx, record.id) is None:
                calls.begin(tx, record)
            elif record.ended_at is not None:
                calls.finish(tx, record)


def _epoch(half: list[tuple[int, bytes]]) -> int:
    return half[0][0] if half else 0


def _intents(half: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the epoch of a half and each intent written under it, up to the first that is incomplete."""
    first = at = 0
    while at + _HEAD.size <= len(half):
        length, checksum, epoch = _HEAD.unpack_from(half, at)
        intent = half[at + _HEAD.size : at + _HEAD.size + length]
        if length and epoch == (first or epoch) and zlib.crc32(intent, epoch & 0xFFFFFFFF) == checksum:
            first = epoch
            yield epoch, intent
            at += _HEAD.size + length
        elif at % _BLOCK:
            at += -at % _BLOCK  # each write began in a new block
        else:
            return
