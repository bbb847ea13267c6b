"""Use Farhand from any program over HTTP, with nothing but the standard library.

    FARHAND_TOKEN=$(farhand token create --scope read --scope tools.exec) python examples/http_client.py [URL]

It lists the connected machines, asks each one how full its disk is, and shows a call that is sent twice: with the same
`Idempotency-Key` it runs once.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3210"
TOKEN = os.environ.get("FARHAND_TOKEN", "")


def request(method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Send a request and return the decoded answer. Exits with the gateway's message for an error."""
    asked = urllib.request.Request(
        URL + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{method} {path}: {json.load(error)['error']['message']}")
    except OSError as error:
        sys.exit(f"no gateway at {URL} ({error}); start one with `farhand up`")


def bash(node: str, command: str, key: str) -> Any:
    """Run a command on a machine. A repetition with the same key returns the first outcome."""
    body = {"tool": f"{node}__Bash", "args": {"command": command}}
    return request("POST", "/v1/tools/invoke", body, **{"Idempotency-Key": key})


def main() -> None:
    nodes = [node["node_id"] for node in request("GET", "/v1/nodes")["nodes"] if node["online"]]
    for node in nodes:
        answer = bash(node, "df -h / | tail -1", str(uuid.uuid4()))
        # `ok` says whether the tool ran; the exit code is that of the command.
        shown = answer["result"]["output"].strip() if answer["ok"] else answer["error"]["message"]
        print(f"{node}: {shown}")
    if nodes:
        key = str(uuid.uuid4())
        first, second = bash(nodes[0], "date +%N", key), bash(nodes[0], "date +%N", key)
        print(f"sent twice, ran once: {first['request_id'] == second['request_id']}")


if __name__ == "__main__":
    main()
