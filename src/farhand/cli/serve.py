"""`up`, `gateway` and `node`: the commands that stay."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from farhand import config
from farhand.app import Gateway, set_up_logging
from farhand.cli.local_node import LocalNode
from farhand.node.program import NodeOptions, default_node_id, run_node
from farhand.protocol.errors import FarhandError

Command = TypeVar("Command", bound=Callable[..., Any])


def _gateway_options(command: Command) -> Command:
    for option in reversed(
        (
            click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
            click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.  [default: 3210]"),
            click.option("--home", type=click.Path(file_okay=False), help="State, settings and keys.  [~/.farhand]"),
            click.option("--workspace", type=click.Path(file_okay=False), help="Folder of the local tools."),
            click.option("--open", "open_", is_flag=True, help="Ask nobody for a token; loopback only."),
            click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False), help="Certificate (PEM)."),
            click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), help="Its private key (PEM)."),
            click.option("--log-level", help="debug, info, warning or error.  [default: info]"),
        )
    ):
        command = option(command)
    return command


@click.command()
@_gateway_options
@click.option("--no-node", is_flag=True, help="Leave this machine out.")
def up(no_node: bool, workspace: str | None, **options: Any) -> None:
    """Start the gateway and, beside it, a node for this machine."""
    _run_gateway(options, workspace, with_node=not no_node)


@click.command()
@_gateway_options
def gateway(workspace: str | None, **options: Any) -> None:
    """Start the gateway alone."""
    _run_gateway(options, workspace, with_node=False)


def _run_gateway(options: dict[str, Any], workspace: str | None, *, with_node: bool) -> None:
    home = config.home_folder(options["home"])
    config.make_home(home)
    settings = config.load(home)
    section = settings.gateway
    for name in ("host", "port", "tls_cert", "tls_key"):
        if options[name] is not None:
            setattr(section, name, options[name])
    set_up_logging(options["log_level"] or settings.log.level)
    folder = Path(workspace).absolute() if workspace else None
    running = Gateway(home, settings, workspace=folder, open=options["open_"])
    local: LocalNode | None = None

    def ready(gateway: Gateway) -> None:
        nonlocal local
        click.echo(f"farhand ready on {gateway.url}")
        click.echo(f"  console   {gateway.sign_in_link()}")
        click.echo("  lend another machine:  farhand token create --node NAME, then there: farhand node --gateway URL")
        sys.stdout.flush()
        if with_node:
            local = LocalNode(gateway, home, gateway.workspace, section.tls_cert or None)

    try:
        run_loop(running.run(os.environ, ready))
    finally:
        if local is not None:
            local.stop()


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


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where the platform has it."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
