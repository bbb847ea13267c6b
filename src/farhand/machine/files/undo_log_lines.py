"""The lines of the log of what was kept: see `kept`."""

from __future__ import annotations

import os

import msgspec


class ChangedFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file that a call changed."""

    # Where it really is.
    path: bytes
    # The digest of what it held, empty where that was not kept; None: it did not exist.
    old: str | None = None
    # The digest of what the call made of it; None: it was removed.
    new: str | None = None
    size: int = 0
    new_size: int = 0
    mode: int = 0
    owner: tuple[int, int] = (0, 0)
    # Why the old content was not kept.
    unkept: str = ""
    # Folders that were made for it, the outermost first.
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
    """A change that was not made after all."""

    call: str
    change: int


class CallUndone(msgspec.Struct, frozen=True, tag="undone"):
    call: str
    by: str
    at: int


class CallDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """Its contents made room for newer ones."""

    call: str


Line = ChangeBegun | ChangeDone | ChangeAborted | CallUndone | CallDropped
