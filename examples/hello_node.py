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

from farhand.sdk import Failed, InvalidArgs, NodeClient, NodeInfo, NotAllowed, Shutdown, ToolContext, ToolRegistry

allowed_dir = Path(os.environ.get("SA_ALLOWED_DIR", "."))
registry = ToolRegistry()


@registry.tool("node.ping", read_only=True)
async def ping(ctx: ToolContext) -> dict[str, Any]:
    """Say that this node is there."""
    return {"pong": True, "timestamp": time.time_ns() // 1_000_000}


async def echo(ctx: ToolContext, args: Any) -> Any:
    """Give the arguments back."""
    return args


async def read_text(ctx: ToolContext, args: Any) -> dict[str, str]:
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
    except (OSError, ValueError) as error:
        raise Failed(f"file not found: {error}") from None
    if not file.is_relative_to(folder):
        raise NotAllowed("path traversal outside allowed directory")
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"read error: {error}") from None
    return {"path": str(file), "content": content}


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
    )
    with contextlib.suppress(Shutdown):
        await client.run(registry, shutdown)


if __name__ == "__main__":
    asyncio.run(main())
