"""Path errors that remain distinguishable when only their kind and text are stored."""

from __future__ import annotations

import re

from farhand.protocol.errors import ErrorKind, Failed, NotAllowed, ToolError

UPWARD = "has a part '..'; write the path without it"
PROTECTED = "is in a protected folder; no tool may use it"
OUTSIDE = "leads outside the allowed folders; use a path in"
KERNEL_LINK = "goes through a link of a process in /proc; use the path of the file itself"
STEERING = "steers the agent; changing it needs the scope 'chat' without a restriction to some tools or nodes"
EXISTS = "already exists"

_FORBIDDEN = re.compile(
    rf"'.*' (?:{re.escape(UPWARD)}|{re.escape(PROTECTED)}|{re.escape(KERNEL_LINK)}|{re.escape(STEERING)}|"
    rf"{re.escape(OUTSIDE)} .*)",
    re.DOTALL,
)
_THERE = re.compile(rf"'.*' {EXISTS}", re.DOTALL)


class ForbiddenPath(NotAllowed):
    """A path this caller may not use: `UPWARD`, `PROTECTED`, `OUTSIDE`, `KERNEL_LINK` or `STEERING`."""


class AlreadyExists(Failed):
    """The path already exists."""


def as_raised(kind: str, message: str) -> ToolError:
    """Return the error that was originally raised with this text."""
    error = ToolError.of(kind, message)
    if error.kind is ErrorKind.NOT_ALLOWED and _FORBIDDEN.fullmatch(message):
        return ForbiddenPath(message)
    if error.kind is ErrorKind.FAILED and _THERE.fullmatch(message):
        return AlreadyExists(message)
    return error
