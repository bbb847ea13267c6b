"""The plug-in guide's hello-node: a stateless tool, an echo, and a file reader that stays in its folder.

SA_NODE_TOKEN=secret python examples/hello_node.py ws://localhost:3210/v1/nodes/ws
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from farhand.sdk import (
    MAX_TOOL_RESPONSE_BYTES,
    Failed,
    InvalidArgs,
    NodeClient,
    NodeInfo,
    NodeSdkError,
    NotAllowed,
    Shutdown,
    ToolContext,
    ToolRegistry,
)
from farhand.sdk.protocol import ToolSpec

allowed_dir = Path(os.environ.get("SA_ALLOWED_DIR", "."))


async def ping(ctx: ToolContext, args: Any) -> dict[str, Any]:
    return {"pong": True, "timestamp": time.time_ns() // 1_000_000}


async def echo(ctx: ToolContext, args: Any) -> Any:
    """Give the arguments back."""
    return args


def read_text(ctx: ToolContext, args: Any) -> dict[str, str]:
    """Read a text file below the allowed folder: {"path": "notes/today.txt"}."""
    path = args.get("path") if isinstance(args, dict) else None
    if not isinstance(path, str):
        raise InvalidArgs("missing 'path' argument")
    try:
        folder = allowed_dir.resolve(strict=True)
    except OSError as error:
        raise Failed(f"allowed dir error: {error}") from None
    try:
        file = (folder / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise Failed(f"file not found: {error}") from None
    if not file.is_relative_to(folder):
        raise NotAllowed("path traversal outside allowed directory")
    try:
        content = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"read error: {error}") from None
    return {"path": str(file), "content": content}


registry = ToolRegistry()
registry.register("node.ping", ping, spec=ToolSpec("node.ping", "Say that this node is there.", read_only=True))
registry.register("node.echo", echo)
registry.register("node.fs.read_text", read_text)
registry.derive_capabilities_from_tools()


async def main() -> None:
    shutdown = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.set)
    client = NodeClient(
        gateway_ws_url=sys.argv[1] if len(sys.argv) > 1 else None,
        node_info=NodeInfo.from_env("reference", "0.1.0"),
        max_response_bytes=MAX_TOOL_RESPONSE_BYTES,
    )
    with contextlib.suppress(Shutdown):
        await client.run(registry, shutdown)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except NodeSdkError as error:
        sys.exit(f"hello-node: {error}")
