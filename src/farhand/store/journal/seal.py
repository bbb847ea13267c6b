"""Seal the journal: the last row of each commit carries a keyed hash over its rows and the previous hash.

The key is a file beside the database, so that write access to the database alone is not enough to seal anything. The
head (id and hash of the newest row) is recorded in a third file after every commit, so that a truncated journal is
detected. A row that refers to a record in another table (a call, a message) has that record in its hash as well.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand.protocol.errors import FarhandError
from farhand.store.ports import JournalRow, Seals, Tx

log = logging.getLogger(__name__)

KEY_FILE: Final = "journal.key"
HEAD_FILE: Final = "journal.head"
KEY_BYTES: Final = 32
HASH_BYTES: Final = 32
LARGE_BYTES: Final = 256 * 1024
APPEND: Final = "INSERT INTO events (id, at, kind, subject, data, hash) VALUES (?, ?, ?, ?, ?, ?)"

# Encodes values for hashing; different values never have the same encoding.
packed = msgspec.msgpack.Encoder().encode

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_MAGIC: Final = b"fhhead1\n"
_HEAD: Final = struct.Struct(f"<q{HASH_BYTES}s")
_REST: Final = struct.Struct("<c36s")
_OPEN, _CLEAN = b"o", b"c"


class Head(msgspec.Struct, frozen=True):
    """The newest row of a journal; id 0 for an empty one."""

    id: int
    hash: bytes

    def __str__(self) -> str:
        return f"{self.id}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Read `ID:HASH`. Raises ValueError."""
        number, _, digits = text.strip().partition(":")
        if not number.isdecimal() or len(number) > 18 or len(digits) != 2 * HASH_BYTES:
            raise ValueError(f"a head is ID:HASH as `farhand audit head` prints it, not {text[:100]!r}")
        return cls(int(number), bytes.fromhex(digits))


class KeptHead(msgspec.Struct, frozen=True):
    """The content of the head file."""

    head: Head
    # The gateway was stopped cleanly, so nothing may be missing.
    clean: bool
    # The boot id of the machine: after a crash of the machine, commits that were not synced may be missing.
    boot: str


class Sealer:
    __slots__ = ("_base", "beginning")

    def __init__(self, key: bytes) -> None:
        self._base = blake3(key=key)
        # The hash before the first row.
        self.beginning = self._base.copy().update(b"farhand journal").digest()

    def hash(self, before: bytes, rows: Iterable[JournalRow]) -> bytes:
        """Return the seal of rows that were committed together, after those with the seal `before`."""
        state = self._base.copy()
        parts = [before]
        for row, covered in rows:
            parts.append(packed(row))
            if len(covered) > LARGE_BYTES:  # not copied: that would block the interpreter
                state.update(b"".join(parts))
                state.update(covered)
                parts = []
            else:
                parts.append(covered)
        state.update(b"".join(parts))
        return state.digest()


class SealedJournal:
    """The end of the journal that is being written, and the file that records it, if any. Its owner calls `close`."""

    __slots__ = ("_file", "_kept", "_pending", "hash", "id", "sealer")

    def __init__(self, key: bytes, head: Path | None = None) -> None:
        self.sealer: Seals = Sealer(key)
        # Rows of the current transaction.
        self._pending: list[JournalRow] = []
        # The id of the newest row, including pending ones.
        self.id = 0
        self.hash = self.sealer.beginning
        self._kept = (self.id, self.hash)
        self._file = None if head is None else os.open(head, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, at: int, kind: str, subject: str, data: bytes, covered: bytes = b"", skip: int = 1) -> int:
        self.id = number = self.id + skip
        self._pending.append(((number, at, kind, subject, data), covered))
        return number

    def load(self, tx: Tx) -> None:
        """Continue after the newest row in the table."""
        end = journal_end(tx)
        self.continue_after(end.id, end.hash)

    def continue_after(self, number: int, digest: bytes) -> None:
        """Continue after the row with this id and seal; id 0 is the beginning."""
        self.id, self.hash = (number, digest) if number else (0, self.sealer.beginning)
        self._kept = (self.id, self.hash)

    def write(self, tx: Tx) -> None:
        """Insert the pending rows under one seal, before the commit.

        Raises IntegrityError if another process has appended rows. After a rollback, `load` continues after them.
        """
        pending = self._pending
        if not pending:
            return
        sealed = self.sealer.hash(self.hash, pending)
        last = pending[-1][0][0]
        tx.executemany(APPEND, [(*row, sealed if row[0] == last else None) for row, _ in pending])
        self.hash = sealed
        self._pending = []

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def moved(self) -> bool:
        """Whether the current transaction adds rows, or has added them."""
        return self.id != self._kept[0]

    def drop(self, count: int) -> None:
        """Drop the pending rows after the first `count`: the operation that added them has failed."""
        del self._pending[count:]
        self.id = self._pending[-1][0][0] if self._pending else self._kept[0]

    def opened(self) -> None:
        """Record the end of the journal in the head file, now and after every commit."""
        assert self._file is not None, "the journal has no head file"
        os.pwrite(self._file, _MAGIC + _HEAD.pack(self.id, self.hash) + _REST.pack(_OPEN, boot_id().encode()), 0)
        self._kept = (self.id, self.hash)

    def committed(self) -> None:
        if self._kept[0] != self.id:
            self._kept = (self.id, self.hash)
            if self._file is None:
                return
            try:
                os.pwrite(self._file, _HEAD.pack(self.id, self.hash), len(_MAGIC))
            except OSError as error:  # the rows are stored; only a loss of the newest could go unnoticed
                log.warning("failed to write %s: %s", HEAD_FILE, error)

    def rolled_back(self) -> None:
        self._pending = []
        self.id, self.hash = self._kept

    def close(self) -> None:
        if self._file is None:
            return
        os.pwrite(self._file, _CLEAN, len(_MAGIC) + _HEAD.size)
        os.fsync(self._file)
        os.close(self._file)


def load_key(home: Path, *, make: bool = False) -> bytes:
    """Return the key of a home's journal; with `make`, create a missing one.

    Raises FarhandError if the key is missing or invalid.
    """
    path = home / KEY_FILE
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        if not make:
            raise FarhandError(f"{path} is missing: the journal cannot be checked without it") from None
        key = secrets.token_bytes(KEY_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FarhandError(f"{path} cannot be read: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise FarhandError(f"{path} has {len(key)} bytes instead of the {KEY_BYTES} of the journal's key")
    return key


def journal_end(tx: Tx) -> Head:
    rows: list[Any] = tx.execute("SELECT id, hash FROM events ORDER BY id DESC LIMIT 1").fetchall()
    return Head(rows[0][0], rows[0][1] or b"") if rows else Head(0, b"")


def seal_of(tx: Tx, number: int) -> bytes | None:
    """Return the seal that a row carries; None if there is none, or no such row."""
    rows: list[Any] = tx.execute("SELECT hash FROM events WHERE id = ?", (number,)).fetchall()
    return rows[0][0] if rows else None


def kept_head(home: Path) -> KeptHead | None:
    """Return the recorded head of a home's journal, if any."""
    try:
        data = (home / HEAD_FILE).read_bytes()
    except OSError:
        return None
    if len(data) < len(_MAGIC) + _HEAD.size + _REST.size or not data.startswith(_MAGIC):
        return None
    number, digest = _HEAD.unpack_from(data, len(_MAGIC))
    state, boot = _REST.unpack_from(data, len(_MAGIC) + _HEAD.size)
    return KeptHead(Head(number, digest), state == _CLEAN, boot.decode(errors="replace"))


def forget_head(home: Path) -> KeptHead | None:
    """Delete the recorded head, since another journal replaces this one, and return it."""
    kept = kept_head(home)
    (home / HEAD_FILE).unlink(missing_ok=True)
    return kept


def boot_id() -> str:
    """Return an id that changes with each start of the machine."""
    try:
        return _BOOT.read_text().strip()[:36]
    except OSError:
        return "unknown"
