"""An MCP server of an older revision, without any package; it speaks on standard input and output."""

import json
import os
import sys
from pathlib import Path

TOOLS = [
    {"name": name, "description": text, "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}}}
    for name, text in (
        ("read", "Read a file."),
        ("write", "Write a file."),
        ("ask", "Ask the user."),
        ("flood", "Talk."),
    )
]


def send(**message: object) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(name: str, arguments: dict) -> str:
    if name == "read":
        return Path(arguments["path"]).read_text()
    if name == "write":
        Path(arguments["path"]).write_text("written")
        return str(os.getpid())
    if name == "flood":
        for number in range(20_000):
            send(method="notifications/message", params={"level": "info", "data": f"line {number}"})
        return "over"
    properties = {"colour": {"type": "string", "default": "blue"}}
    schema = {"type": "object", "properties": properties, "required": ["colour"]}
    send(id="q1", method="elicitation/create", params={"message": "Which?", "requestedSchema": schema})
    answer = json.loads(sys.stdin.readline())
    return json.dumps(answer.get("result", answer.get("error")))


for line in sys.stdin:
    message = json.loads(line)
    method, params = message.get("method"), message.get("params") or {}
    if "id" not in message or method is None:
        continue
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        send(id=message["id"], result=result)
    elif method == "tools/list":
        send(id=message["id"], result={"tools": TOOLS})
    elif method == "tools/call":
        try:
            text, failed = call(params["name"], params.get("arguments") or {}), False
        except OSError as error:
            text, failed = str(error), True
        send(id=message["id"], result={"content": [{"type": "text", "text": text}], "isError": failed})
    else:
        send(id=message["id"], error={"code": -32601, "message": "unknown method"})
