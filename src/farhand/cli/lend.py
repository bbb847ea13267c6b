"""`node`: this machine, lent to a gateway. A node starts without anything of the gateway's."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from farhand import config
from farhand.cli.program import run_loop, set_up_logging
from farhand.node.program import NodeOptions, default_node_id, run_node
from farhand.protocol.errors import FarhandError


@click.command()
@click.option(
    "--gateway", "gateway_url", default="http://127.0.0.1:3210", show_default=True, help="ws(s):// or http(s)://"
)
@click.option("--id", "node_id", help="Name of this node.  [default: the host name]")
@click.option("--token", help="Token of this node.  [default: SA_NODE_TOKEN]")
@click.option("--token-stdin", is_flag=True, help="Read the token from standard input.")
@click.option("--workspace", type=click.Path(file_okay=False), help="Where relative paths begin.  [default: here]")
@click.option(
    "--root", "roots", multiple=True, type=click.Path(file_okay=False), help="Lend only this folder. Repeatable."
)
@click.option("--read-only", is_flag=True, help="Lend nothing that changes this machine.")
@click.option("--role", type=click.Choice(["execution", "specialized"]), default="execution", show_default=True)
@click.option("--allow-tool", "allowed", multiple=True, help="Lend this tool in spite of --root. Repeatable.")
@click.option("--deny-tool", "denied", multiple=True, help="Do not lend this tool. Repeatable.")
@click.option("--tag", "tags", multiple=True, help="Tag for grouping. Repeatable.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False), help="Certificate authority for wss://.")
@click.option("--home", type=click.Path(file_okay=False), help="State of this node.  [~/.farhand]")
@click.option("--log-level", default="info", help="debug, info, warning or error.")
@click.option("--pinned-cert", type=click.Path(exists=True, dir_okay=False), help="Trust this certificate alone.")
@click.option("--with-parent", type=int, hidden=True)
def node(gateway_url: str, node_id: str | None, log_level: str, with_parent: int | None, **options: Any) -> None:
    """Lend this machine's shell, files and search to a gateway."""
    set_up_logging(log_level)
    home = config.home_folder(options["home"])
    config.make_home(home)
    chosen = NodeOptions(
        gateway_ws_url=node_socket_url(gateway_url),
        node_id=node_id or default_node_id(),
        token=sys.stdin.readline().strip() if options["token_stdin"] else options["token"] or _environment_token(),
        workspace=Path(options["workspace"] or Path.cwd()).absolute(),
        roots=tuple(Path(root).absolute() for root in options["roots"]),
        read_only=options["read_only"],
        role=options["role"],
        allowed=tuple(options["allowed"]),
        denied=tuple(options["denied"]),
        tags=tuple(options["tags"]),
        ca_file=options["ca_file"],
        pinned_cert=options["pinned_cert"],
        home=home,
    )

    async def serve() -> None:
        shutdown = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.set)
        if with_parent is not None:
            loop.create_task(_end_with(with_parent, shutdown))  # noqa: RUF006
        await run_node(chosen, shutdown)

    run_loop(serve())


def _environment_token() -> str | None:
    """Taken out, so that the commands this node runs do not inherit it, and wiped from where `/proc` shows it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address, token = libc.getenv(b"SA_NODE_TOKEN"), os.environ.get("SA_NODE_TOKEN")
    if token and address:
        ctypes.memset(address, ord("*"), len(os.fsencode(token)))
    os.environ.pop("SA_NODE_TOKEN", None)
    return token


async def _end_with(parent: int, shutdown: asyncio.Event) -> None:
    """A node that a gateway brought along does not outlive it."""
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    shutdown.set()


def node_socket_url(url: str) -> str:
    """`http(s)://host:port` or `ws(s)://…/v1/nodes/ws` -> the node socket. Raises FarhandError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise FarhandError(f"--gateway takes http(s)://host:port or ws(s)://host:port/v1/nodes/ws, not {url!r}")
    path = parts.path if parts.path not in ("", "/") else "/v1/nodes/ws"
    return f"{scheme}://{parts.netloc}{path}" + (f"?{parts.query}" if parts.query else "")
