"""The flow of one transfer: what a sender may send next, and what a receiver accepts next. Pure.

A transfer is a stream of parts: the manifest, then the content of each of its entries. Every part ends with its
digest. The receiver grants credit as absolute offsets, so a repeated or reordered credit does no harm.
"""

from __future__ import annotations

from blake3 import blake3

from farhand.protocol.errors import Failed
from farhand.protocol.version import MIB, TRANSFER_FRAME_BYTES

# A receiver grants credit after this many bytes, or after this many seconds if something has arrived since.
CREDIT_BYTES = MIB
CREDIT_SECONDS = 1.0


class DigestMismatch(Failed):
    """What arrived differs from what was sent; nothing of it is kept."""


class SendWindow:
    """How far a sender may go, as granted by its receiver."""

    def __init__(self) -> None:
        # The offset at which the receiver wants the stream to begin; None until its first credit.
        self.begin: int | None = None
        self.written = 0
        self.until = 0

    def credit(self, written: int, until: int) -> None:
        """Note that the receiver has everything before `written` and accepts everything before `until`."""
        if self.begin is None:
            self.begin = written
        self.written = max(self.written, written)
        self.until = max(self.until, until)

    def frame_bytes(self, offset: int, part_start: int, left: int) -> int:
        """Return the size of the next data frame at `offset`; 0 means that the sender has to wait for credit.

        Frames are whole and begin at multiples of their size within a part, so that the receiver can write them to
        disk as they are. A receiver that has written everything so far will not grant more: its window is smaller
        than a frame, and it gets what fits.
        """
        wanted = min(left, TRANSFER_FRAME_BYTES - (offset - part_start) % TRANSFER_FRAME_BYTES)
        allowed = self.until - offset
        if wanted <= allowed:
            return wanted
        return allowed if allowed > 0 and self.written >= offset else 0


class CreditPacer:
    """When a receiver grants credit again: the sender has a whole window to send meanwhile."""

    def __init__(self) -> None:
        self._granted = 0
        self._granted_at: float | None = None

    def due(self, offset: int, now: float) -> bool:
        """Return whether to grant credit at `offset`, and count it as granted."""
        waited = CREDIT_SECONDS if self._granted_at is None else now - self._granted_at
        if offset - self._granted < CREDIT_BYTES and waited < CREDIT_SECONDS:
            return False
        self._granted, self._granted_at = offset, now
        return True


class ReceivePosition:
    """Where a receiver is in the stream: the part, how much of it is missing, and its digest so far."""

    def __init__(self, manifest_bytes: int) -> None:
        self.offset = 0
        self.begin_part(0, manifest_bytes)

    def begin_part(self, part: int, size: int) -> None:
        """Expect `size` bytes of `part` next."""
        self.part = part
        self.left = size
        self.digest = blake3()

    def check(self, offset: int, size: int) -> None:
        """Raises Failed unless `size` bytes at `offset` are what comes next."""
        if offset != self.offset or size > self.left:
            raise Failed(
                f"the sender sent {size} bytes for offset {offset}; expected offset {self.offset} and at most "
                f"{self.left} bytes"
            )

    def advance(self, offset: int, size: int) -> None:
        """Count `size` bytes at `offset` as received. Raises Failed unless they are what comes next."""
        self.check(offset, size)
        self.left -= size
        self.offset += size

    def end_part(self, part: int, digest: bytes) -> bool:
        """Return whether the current part has ended; False if an earlier end was repeated after a lost link.

        Raises Failed if the part is incomplete or another one was expected, DigestMismatch if its bytes differ.
        """
        if part < self.part:
            return False
        if part != self.part or self.left:
            raise Failed(f"the sender ended part {part}; part {self.part} still lacks {self.left} bytes")
        if self.digest.digest() != digest:
            raise DigestMismatch("the digest of what arrived differs from the sender's")
        return True
