"""The plug-in SDK: offer tools of this process to a gateway."""

from farhand.protocol.errors import (
    Cancelled,
    ErrorKind,
    Failed,
    InvalidArgs,
    NotAllowed,
    NotFound,
    Timeout,
    ToolError,
)
from farhand.protocol.messages import NodeInfo
from farhand.protocol.version import MAX_TOOL_RESPONSE_BYTES, PROTOCOL_VERSION
from farhand.sdk import protocol
from farhand.sdk.backoff import ReconnectBackoff
from farhand.sdk.client import NodeClient
from farhand.sdk.context import CancelToken, ToolContext
from farhand.sdk.errors import ConfigError, NodeSdkError, ReconnectExhausted, Refused, Shutdown
from farhand.sdk.protocol import ToolResponseError, WsMessage
from farhand.sdk.registry import NodeTool, ToolRegistry

__all__ = [
    "MAX_TOOL_RESPONSE_BYTES",
    "PROTOCOL_VERSION",
    "CancelToken",
    "Cancelled",
    "ConfigError",
    "ErrorKind",
    "Failed",
    "InvalidArgs",
    "NodeClient",
    "NodeInfo",
    "NodeSdkError",
    "NodeTool",
    "NotAllowed",
    "NotFound",
    "ReconnectBackoff",
    "ReconnectExhausted",
    "Refused",
    "Shutdown",
    "Timeout",
    "ToolContext",
    "ToolError",
    "ToolRegistry",
    "ToolResponseError",
    "WsMessage",
    "protocol",
]
