"""The types of a tool call: what can be called, the call, and how it ended."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.protocol.errors import ErrorKind, ToolError

NULL: Final = msgspec.Raw(b"null")
# The cancellation message for a call that is interrupted only because its program stops: the call stays open, and the
# processes it started continue.
PROGRAM_STOPPING: Final = "this program is leaving"


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a tool that callers see."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    # Running it twice does no harm, so its record need not be durable before it starts.
    read_only: bool = False
    capability: str | None = None
    # The default time limit of a call.
    timeout_ms: int | None = None
    # The argument that holds the tool's own time limit in milliseconds, if any: the call gets a little more.
    timeout_parameter: str | None = None
    # The owner of its machine does not lend it: calls are refused, and it is not offered.
    withheld: bool = False
    # Schemas of further parameters, for Farhand's own clients; models are not shown them.
    unlisted: dict[str, Any] = {}


class ToolCall(msgspec.Struct, frozen=True):
    """One call of one tool. The arguments are kept as the bytes that were received."""

    id: str
    tool: str
    args: msgspec.Raw = NULL
    session_key: str | None = None
    agent_id: str | None = None
    timeout_ms: int | None = None
    # The span of the call, as in the header `traceparent`; empty without traces.
    trace: str = ""
    # The credential that is behind the call, if not the one that makes it: of a call that shows what another does.
    asker: str = ""


class ToolFailure(msgspec.Struct, frozen=True):
    """Why a call failed: one of the six kinds, and a message."""

    kind: str
    message: str

    def __post_init__(self) -> None:
        kind = ErrorKind.read(self.kind)
        if kind.value != self.kind:
            msgspec.structs.force_setattr(self, "kind", kind.value)

    @classmethod
    def of(cls, error: ToolError) -> ToolFailure:
        # File names may contain bytes that are not valid text; the message must be encodable.
        return cls(error.kind.value, error.message.encode(errors="backslashreplace").decode())


class ToolResult(msgspec.Struct, frozen=True):
    """How a call ended: a result, or a failure."""

    ok: bool
    result: msgspec.Raw = NULL
    error: ToolFailure | None = None

    @classmethod
    def failed(cls, kind: str, message: str) -> ToolResult:
        return cls(ok=False, error=ToolFailure(kind, message))
