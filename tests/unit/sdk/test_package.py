"""What `farhand.sdk` exports, and what importing it does not load."""

from __future__ import annotations

import json
import subprocess
import sys

from farhand import sdk
from farhand.protocol import messages

EXPORTS = {
    "NodeClient",
    "ToolRegistry",
    "NodeTool",
    "ToolContext",
    "CancelToken",
    "NodeInfo",
    "ReconnectBackoff",
    "ToolError",
    "InvalidArgs",
    "NotAllowed",
    "Failed",
    "Timeout",
    "Cancelled",
    "NotFound",
    "NodeSdkError",
    "Shutdown",
    "ReconnectExhausted",
    "Refused",
    "ConfigError",
    "WsMessage",
    "ErrorKind",
    "ToolResponseError",
    "PROTOCOL_VERSION",
    "MAX_TOOL_RESPONSE_BYTES",
    "protocol",
}

FORBIDDEN = [
    "uvicorn",
    "apsw",
    "jsonschema_rs",
    "httptools",
    "starlette",
    "click",
    "rich",
    "uvloop",
    "websockets",
    "sqlite3",
    "farhand.gateway",
    "farhand.store",
    "farhand.api",
    "farhand.app.gateway",
    "farhand.cli",
    "farhand.config",
    "farhand.console",
    "farhand.node",
    "farhand.machine.files",
    "farhand.machine.jobs",
    "farhand.machine.patch",
    "farhand.machine.sandbox",
    "farhand.machine.search",
    "farhand.machine.freeze_file",
]


def test_the_export_list() -> None:
    assert set(sdk.__all__) == EXPORTS
    for name in sdk.__all__:
        assert hasattr(sdk, name)


def test_the_protocol_is_within_reach_of_a_plug_in() -> None:
    for name in sdk.protocol.__all__:
        assert hasattr(sdk.protocol, name)
    assert sdk.protocol.WsMessage is messages.Message
    assert sdk.protocol.decode(b'{"type":"ping","timestamp":5}') == sdk.protocol.Ping(5)
    assert (sdk.PROTOCOL_VERSION, sdk.MAX_TOOL_RESPONSE_BYTES) == (1, 4 * 1024 * 1024)


def test_importing_the_sdk_loads_neither_the_gateway_nor_its_dependencies() -> None:
    program = "import farhand.sdk, sys, json; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(output))
    assert "farhand.sdk.client" in loaded
    assert {name for name in loaded if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN)} == set()


def test_the_errors_form_the_trees_their_files_draw() -> None:
    assert issubclass(sdk.ConfigError, ValueError)
    for error in (sdk.Shutdown, sdk.ReconnectExhausted, sdk.Refused, sdk.ConfigError):
        assert error.__bases__[0] is sdk.NodeSdkError
    for tool_error in (sdk.InvalidArgs, sdk.NotAllowed, sdk.Failed, sdk.Timeout, sdk.Cancelled, sdk.NotFound):
        assert issubclass(tool_error, sdk.ToolError)
        assert not issubclass(tool_error, sdk.NodeSdkError)
    assert not issubclass(sdk.Timeout, TimeoutError)
