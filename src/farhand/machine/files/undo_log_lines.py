"""The records of the undo log: see `undo_log`."""

from __future__ import annotations

import os

import msgspec


class ChangedFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file that a call changed."""

    # The real path.
    path: bytes
    # Digest of the old content, empty if it was not stored; None if the file did not exist.
    old: str | None = None
    # Digest of the new content; None if the file was removed.
    new: str | None = None
    size: int = 0
    new_size: int = 0
    mode: int = 0
    owner: tuple[int, int] = (0, 0)
    # Why the old content was not stored.
    unkept: str = ""
    # Folders created for it, outermost first.
    made: list[bytes] = []

    @property
    def name(self) -> str:
        return os.fsdecode(self.path)


class ChangeBegun(msgspec.Struct, frozen=True, tag="kept"):
    """A change is about to be made."""

    call: str
    change: int
    at: int
    files: list[ChangedFile]


class ChangeDone(msgspec.Struct, frozen=True, tag="done"):
    call: str
    change: int


class ChangeAborted(msgspec.Struct, frozen=True, tag="released"):
    """A change that was not made."""

    call: str
    change: int


class CallUndone(msgspec.Struct, frozen=True, tag="undone"):
    call: str
    by: str
    at: int


class CallDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The contents were dropped to make room for newer ones."""

    call: str


Line = ChangeBegun | ChangeDone | ChangeAborted | CallUndone | CallDropped
