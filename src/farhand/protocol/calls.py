"""The nouns of a tool call: what can be called, the call, and how it ended."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.errors import ErrorKind, ToolError

NULL: Final = msgspec.Raw(b"null")
# The message with which a call is cancelled only because the program that runs it stops: the call stays open, and what
# it started goes on.
PROGRAM_STOPPING: Final = "this program is leaving"


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a caller must know of a tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    # True: running it twice does no harm, so its record need not wait for the disk.
    read_only: bool = False
    capability: str | None = None
    # How long a call may take when its caller does not say.
    timeout_ms: int | None = None
    # The argument with the tool's own limit in milliseconds, where it has one: the call is given a little more.
    timeout_parameter: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """One call of one tool, as its caller meant it. The arguments stay the bytes that came in."""

    id: str
    tool: str
    args: msgspec.Raw = NULL
    session_key: str | None = None
    agent_id: str | None = None
    timeout_ms: int | None = None


class ToolFailure(msgspec.Struct, frozen=True):
    """Why a call failed, in one of the six kinds."""

    kind: str
    message: str

    def __post_init__(self) -> None:
        kind = ErrorKind.read(self.kind)
        if kind.value != self.kind:
            msgspec.structs.force_setattr(self, "kind", kind.value)

    @classmethod
    def of(cls, error: ToolError) -> ToolFailure:
        # A file's name may hold bytes that are no text; the message must be text to be sent at all.
        return cls(error.kind.value, error.message.encode(errors="backslashreplace").decode())


class ToolResult(msgspec.Struct, frozen=True):
    """How a call ended: a result, or a failure."""

    ok: bool
    result: msgspec.Raw = NULL
    error: ToolFailure | None = None

    @classmethod
    def failed(cls, kind: str, message: str) -> ToolResult:
        return cls(ok=False, error=ToolFailure(kind, message))
