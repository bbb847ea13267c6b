"""Errors that cross a process boundary.

FarhandError
├── ProtocolError            a peer sent an invalid message
└── ToolError                a tool call failed; carries one of the six kinds
    ├── InvalidArgs          invalid_args
    ├── NotAllowed           not_allowed
    ├── Timeout              timeout
    ├── Failed               failed
    ├── Cancelled            cancelled
    └── NotFound             not_found
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ErrorKind(StrEnum):
    """The closed set of ways a tool call can fail."""

    INVALID_ARGS = "invalid_args"
    NOT_ALLOWED = "not_allowed"
    TIMEOUT = "timeout"
    FAILED = "failed"
    CANCELLED = "cancelled"
    NOT_FOUND = "not_found"

    @classmethod
    def read(cls, name: str) -> ErrorKind:
        """Return the kind a peer named; an unknown kind becomes `failed`."""
        return _KINDS.get(name, cls.FAILED)


_KINDS = {kind.value: kind for kind in ErrorKind}


class FarhandError(Exception):
    """Base class of all exceptions Farhand raises deliberately."""


class ProtocolError(FarhandError):
    """A peer sent something that is not a valid message of the protocol."""


class ToolError(FarhandError):
    """A tool call failed in a way that its caller can act on."""

    kind: ClassVar[ErrorKind] = ErrorKind.FAILED

    def __init__(self, message: object = "") -> None:
        super().__init__(message)
        self.message = str(message)

    @staticmethod
    def of(kind: str, message: str) -> ToolError:
        """Return the exception for a kind read from the wire."""
        return _CLASSES[ErrorKind.read(kind)](message)


class InvalidArgs(ToolError):
    """Bad or missing arguments."""

    kind = ErrorKind.INVALID_ARGS


class NotAllowed(ToolError):
    """Permission denied."""

    kind = ErrorKind.NOT_ALLOWED


class Failed(ToolError):
    """General execution failure."""

    kind = ErrorKind.FAILED


class Timeout(ToolError):
    """The operation timed out."""

    kind = ErrorKind.TIMEOUT


class Cancelled(ToolError):
    """Cancelled by the caller, the gateway or a shutdown."""

    kind = ErrorKind.CANCELLED


class NotFound(ToolError):
    """The resource does not exist."""

    kind = ErrorKind.NOT_FOUND


_CLASSES: dict[ErrorKind, type[ToolError]] = {
    c.kind: c for c in (InvalidArgs, NotAllowed, Failed, Timeout, Cancelled, NotFound)
}
