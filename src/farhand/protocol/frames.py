"""Binary frames of the node socket: a fixed header, then bytes of a stream at an offset.

Sent only between peers that announced a feature which uses them; binary frames of plain peers are ignored.

    magic u8 | kind u8 | flags u16 | stream u32 | offset u64 | payload …        (big-endian)
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from farhand.protocol.errors import ProtocolError
from farhand.protocol.version import MIB

MAGIC = 0xFA
MAX_PAYLOAD_BYTES = 1 * MIB

_HEADER = struct.Struct("!BBHIQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    # Bytes of the stream at `offset`.
    DATA = 1
    # A part of the stream ends at `offset`; the payload holds the part's number and digest, see `part_end`.
    END = 2


class BinaryFrame(msgspec.Struct, frozen=True):
    kind: FrameKind
    stream: int
    offset: int
    payload: bytes = b""


DIGEST_BYTES = 32
_PART = struct.Struct(f"!I{DIGEST_BYTES}s")


def part_end(stream: int, offset: int, part: int, digest: bytes) -> bytes:
    """Return the frame that ends a part of a stream."""
    return encode_frame(BinaryFrame(FrameKind.END, stream, offset, _PART.pack(part, digest)))


def read_part_end(payload: bytes | memoryview) -> tuple[int, bytes]:
    """Return the number and the digest of a part. Raises ProtocolError."""
    if len(payload) != _PART.size:
        raise ProtocolError(f"the end of a part must have {_PART.size} bytes, not {len(payload)}")
    part, digest = _PART.unpack(payload)
    return part, digest


def put_header(buffer: bytearray, at: int, stream: int, offset: int) -> None:
    """Write the header of a data frame into `buffer` at `at`; the payload begins `HEADER_BYTES` later."""
    _HEADER.pack_into(buffer, at, MAGIC, FrameKind.DATA, 0, stream, offset)


def read_header(data: bytes | memoryview) -> tuple[FrameKind, int, int]:
    """Return kind, stream and offset of a frame without copying its payload. Raises ProtocolError."""
    if not HEADER_BYTES <= len(data) <= HEADER_BYTES + MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a binary frame has {HEADER_BYTES} to {HEADER_BYTES + MAX_PAYLOAD_BYTES} bytes")
    magic, kind, flags, stream, offset = _HEADER.unpack_from(data)
    if magic != MAGIC or flags != 0 or kind not in FrameKind._value2member_map_:
        raise ProtocolError(f"not a binary frame: magic {magic:#x}, kind {kind}, flags {flags:#x}")
    return FrameKind(kind), stream, offset


def encode_frame(frame: BinaryFrame) -> bytes:
    """Encode a frame. Raises ValueError for a frame that could not be decoded."""
    if len(frame.payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a binary frame carries at most {MAX_PAYLOAD_BYTES} bytes, not {len(frame.payload)}")
    if not 0 <= frame.stream < 2**32 or not 0 <= frame.offset < 2**64:
        raise ValueError(f"stream {frame.stream} or offset {frame.offset} is out of range")
    return _HEADER.pack(MAGIC, FrameKind(frame.kind), 0, frame.stream, frame.offset) + frame.payload


def decode_frame(data: bytes | bytearray | memoryview) -> BinaryFrame:
    """Decode a frame. Raises ProtocolError for anything `encode_frame` did not write."""
    kind, stream, offset = read_header(memoryview(data))
    return BinaryFrame(kind, stream, offset, bytes(memoryview(data)[HEADER_BYTES:]))
