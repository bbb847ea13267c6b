"""MCP messages: JSON-RPC requests and answers of both protocol generations.

Up to 2025-11-25 a client starts with `initialize` and sends a session id; from 2026-07-28 on every request is
independent, has its version in `_meta` and repeats parts of the body in headers.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from farhand import __version__
from farhand.api.server.http import Reply, Request, json_fault
from farhand.protocol.json_limits import check_value_count

HANDSHAKE_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS: Final = ("2026-07-28",)
# Version of clients that send no MCP-Protocol-Version, as required by the revisions with that header.
ASSUMED_VERSION: Final = "2025-03-26"
# Since this revision an event without data may carry the id to resume from; older clients cannot parse such an event.
EMPTY_EVENTS_SINCE: Final = "2025-11-25"

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
HEADER_MISMATCH: Final = -32020
MISSING_CAPABILITY: Final = -32021
UNSUPPORTED_VERSION: Final = -32022

_STATUS: Final = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_VERSION: 400,
    MISSING_CAPABILITY: 400,
    METHOD_NOT_FOUND: 404,
}
_PREFIX: Final = "io.modelcontextprotocol/"
# The parameter that the header Mcp-Name repeats, by method.
NAMING: Final = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId"),
}
VERSION_KEY: Final = f"{_PREFIX}protocolVersion"
CAPABILITIES_KEY: Final = f"{_PREFIX}clientCapabilities"
SERVER_KEY: Final = f"{_PREFIX}serverInfo"
LOG_LEVEL_KEY: Final = f"{_PREFIX}logLevel"
LOG_LEVELS: Final = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
SUBSCRIPTION_KEY: Final = f"{_PREFIX}subscriptionId"
SERVER: Final = {"name": "farhand", "title": "Farhand", "version": __version__}
SERVER_META: Final = {SERVER_KEY: SERVER}

Id = int | str


class RpcMessage(msgspec.Struct):
    """A request (with an id), a notification (without), or an answer, though this server sends no requests."""

    jsonrpc: str
    id: Any = UNSET
    method: str | UnsetType = UNSET
    # Undecoded: the arguments of a tool are passed on unread.
    params: dict[str, msgspec.Raw] | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET
    error: msgspec.Raw | UnsetType = UNSET

    def raw(self, name: str) -> msgspec.Raw | None:
        return None if self.params is UNSET else self.params.get(name)

    def value(self, name: str) -> Any:
        """Return a parameter; None if it is missing. Raises RpcError if it cannot be decoded."""
        raw = self.raw(name)
        try:
            return None if raw is None else msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RpcError(INVALID_PARAMS, f"params.{name}: {error}") from None

    @property
    def meta(self) -> dict[str, Any]:
        meta = self.value("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> Id | None:
        token = self.meta.get("progressToken")
        return token if isinstance(token, str | int) and not isinstance(token, bool) else None


class RpcError(Exception):
    """A message that cannot be served: becomes a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None, *, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data
        self.status = status

    def encoded(self, request_id: Id | None) -> bytes:
        error: dict[str, Any] = {"code": self.code, "message": str(self)}
        if self.data is not None:
            error["data"] = self.data
        return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": error})

    def reply(self, request_id: Id | None, *, modern: bool) -> Reply:
        """Return the HTTP reply. Up to 2025-11-25, the error of a valid request has status 200."""
        status = self.status or (_STATUS.get(self.code, 200) if modern else 200)
        return Reply(self.encoded(request_id), status=status)


_decoder = msgspec.json.Decoder(RpcMessage)


def read_message(body: bytes) -> RpcMessage:
    """Parse a body. Raises RpcError unless it is a single message."""
    try:
        body.decode()
        check_value_count(body)
        message = _decoder.decode(body)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error).replace("`", "'")
        raise RpcError(INVALID_REQUEST, f"the body is not a JSON-RPC message: {text}", status=400) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise RpcError(PARSE_ERROR, f"the body is not JSON: {json_fault(body, error)}", status=400) from None
    if message.jsonrpc != "2.0":
        raise RpcError(INVALID_REQUEST, f"jsonrpc must be 2.0, not {message.jsonrpc[:20]!r}", status=400)
    if message.id is not UNSET and (isinstance(message.id, bool) or not isinstance(message.id, int | str)):
        raise RpcError(INVALID_REQUEST, "id must be a number or a text", status=400)
    answered = message.result is not UNSET or message.error is not UNSET
    if message.method is UNSET and not answered:
        raise RpcError(INVALID_REQUEST, "a message has a method, a result or an error", status=400)
    return message


def result(request_id: Id, value: Any) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "result": value})


def notification(method: str, params: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params})


def asking(request_id: Id, method: str, params: dict[str, Any]) -> bytes:
    """Return a request to the client."""
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def event(message: bytes, event_id: str | None = None) -> bytes:
    """Return a server-sent event with a message; an empty one (`b""`) only marks a position to resume from."""
    head = b"" if event_id is None else b"id: %b\n" % event_id.encode()
    name = b"event: message\n" if message else b""
    return b"%b%bdata: %b\n\n" % (head, name, message)


def opening(version: str, event_id: str) -> bytes:
    """Return the event that begins a resumable stream: it gives the client an id for `Last-Event-ID` at once.

    Older revisions get it with a ping, which every client answers; the answer needs no handling.
    """
    if version >= EMPTY_EVENTS_SINCE:
        return event(b"", event_id)
    ping = {"jsonrpc": "2.0", "id": f"farhand:{event_id}", "method": "ping"}
    return event(msgspec.json.encode(ping), event_id)


# -- protocol versions without sessions -----------------------------------------------------------------


def is_modern(request: Request) -> bool:
    version = request.header(b"mcp-protocol-version")
    return version is not None and version not in HANDSHAKE_VERSIONS


def check_modern(request: Request, message: RpcMessage) -> None:
    """Raise RpcError for a request with missing or contradictory metadata."""
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in message.meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}")
    version = message.meta[VERSION_KEY]
    naming = NAMING.get(str(message.method))
    named = message.value(naming) if naming is not None else None
    if naming == "taskId" and request.header(b"mcp-name") is None:
        named = None
    for header, said in (
        ("mcp-protocol-version", version),
        ("mcp-method", message.method),
        ("mcp-name", named),
    ):
        if said is not None and _header(request, header) != said:
            raise RpcError(HEADER_MISMATCH, f"the header {header} is not what the body says")
    check_version(str(version))


def check_version(version: str) -> None:
    """Raise RpcError for an unsupported version without sessions."""
    if version not in MODERN_VERSIONS:
        supported = {"supported": list(MODERN_VERSIONS), "requested": version[:100]}
        raise RpcError(UNSUPPORTED_VERSION, "Unsupported protocol version", supported)


def _header(request: Request, name: str) -> str | None:
    """Return a header's value, decoding the form `=?base64?…?=`."""
    value = request.header(name.encode())
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None


def log_level(value: Any) -> str:
    """Return a level of log messages. Raises RpcError for another value."""
    if value not in LOG_LEVELS:
        raise RpcError(INVALID_PARAMS, f"level must be one of {', '.join(LOG_LEVELS)}")
    return str(value)


def wanted_log_level(message: RpcMessage) -> str:
    """Return the level of log messages that a request without a session asks for; empty for none."""
    wanted = message.meta.get(LOG_LEVEL_KEY)
    return "" if wanted is None else log_level(wanted)


def elicits(message: RpcMessage) -> bool:
    """Return whether the client of a request without a session can ask its user."""
    capabilities = message.meta.get(CAPABILITIES_KEY)
    return isinstance(capabilities, dict) and isinstance(capabilities.get("elicitation"), dict)


def complete(value: dict[str, Any], *, modern: bool, cached_ms: int | None = None) -> dict[str, Any]:
    """Return a result in the format of its generation."""
    if not modern:
        return value
    meta = {**value.get("_meta", {}), SERVER_KEY: SERVER}
    encoded = {**value, "_meta": meta, "resultType": "complete"}
    return encoded if cached_ms is None else {**encoded, "ttlMs": cached_ms, "cacheScope": "private"}
