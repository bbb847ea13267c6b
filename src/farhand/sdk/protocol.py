"""The wire types, for plug-ins that need them."""

from farhand.protocol.calls import ToolFailure as ToolResponseError
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import ErrorKind, ProtocolError
from farhand.protocol.messages import (
    GatewayWelcome,
    NodeHello,
    NodeInfo,
    Ping,
    Pong,
    ToolRequest,
    ToolResponse,
    decode,
    encode,
)
from farhand.protocol.messages import Message as WsMessage
from farhand.protocol.names import validate_capability
from farhand.protocol.version import MAX_TOOL_RESPONSE_BYTES, PROTOCOL_VERSION

__all__ = [
    "MAX_TOOL_RESPONSE_BYTES",
    "PROTOCOL_VERSION",
    "ErrorKind",
    "GatewayWelcome",
    "NodeHello",
    "NodeInfo",
    "Ping",
    "Pong",
    "ProtocolError",
    "ToolRequest",
    "ToolResponse",
    "ToolResponseError",
    "ToolSpec",
    "WsMessage",
    "decode",
    "encode",
    "validate_capability",
]
