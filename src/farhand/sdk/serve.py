"""Serve a registry as a program: `registry.run()`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farhand.protocol.messages import NodeInfo
from farhand.sdk.client import NodeClient
from farhand.sdk.errors import ConfigError, NodeSdkError, ReconnectExhausted, Refused, Shutdown

if TYPE_CHECKING:
    from farhand.sdk.registry import ToolRegistry


def serve(registry: ToolRegistry, name: str, version: str, gateway: str | None, token: str | None) -> None:
    """Connect and serve until SIGINT or SIGTERM; a permanent failure is one line and exit status 1."""
    _show_log()
    info = NodeInfo.from_env(name or _name(registry), version)
    try:
        if not registry.tool_names():
            raise ConfigError("the registry has no tools; decorate functions with @registry.tool")
        client = NodeClient(gateway or os.environ.get("FARHAND_URL") or None, token, node_info=info)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_until_stopped(client, registry))
    except Refused as error:
        token = f"a token that `farhand token create --node {info.id}` made"
        _fail(f"{error}\n  as node {info.id!r}: set SA_NODE_TOKEN to {token}, or use `farhand plugin dev`")
    except ReconnectExhausted as error:
        _fail(f"{error}; is the gateway running, and is SA_GATEWAY_WS_URL its address?")
    except NodeSdkError as error:
        _fail(str(error))


async def _until_stopped(client: NodeClient, registry: ToolRegistry) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # on Windows, or not in the main thread
            loop.add_signal_handler(number, stop.set)
    with contextlib.suppress(Shutdown):
        await client.run(registry, stop)


def _fail(message: str) -> None:
    sys.stderr.write(f"{Path(sys.argv[0]).name or 'plug-in'}: {message}\n")
    raise SystemExit(1)


def _name(registry: ToolRegistry) -> str:
    """Return the first segment of the first capability."""
    return next(iter(registry.capabilities()), "plugin").partition(".")[0]


def _show_log() -> None:
    """Show what the client does, unless the program has set up logging itself."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(handler)
    ours: Any = logging.getLogger("farhand.sdk")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
