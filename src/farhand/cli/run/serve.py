"""`up` and `gateway`: the gateway as a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from farhand import __version__, config
from farhand.app.gateway import Gateway
from farhand.cli.client import TOKEN_FILE
from farhand.cli.json_output import json_option, show_only
from farhand.cli.run.local_node import LocalNode
from farhand.cli.run.program import run_loop, set_up_logging
from farhand.machine.home import home_folder, make_home
from farhand.node.names import default_node_id

Command = TypeVar("Command", bound=Callable[..., Any])


def _gateway_options(command: Command) -> Command:
    for option in reversed(
        (
            click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
            click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.  [default: 3210]"),
            click.option("--home", type=click.Path(file_okay=False), help="State, settings and keys.  [~/.farhand]"),
            click.option("--workspace", type=click.Path(file_okay=False), help="Folder of the local tools."),
            click.option("--open", "open_", is_flag=True, help="Accept callers without a token; loopback only."),
            click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False), help="Certificate (PEM)."),
            click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), help="Its private key (PEM)."),
            click.option("--log-level", help="debug, info, warning or error.  [default: info]"),
            json_option("One JSON document on standard output, once it is ready."),
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
    home = home_folder(options["home"])
    make_home(home)
    settings = config.load(home)
    section = settings.gateway
    for name in ("host", "port", "tls_cert", "tls_key"):
        if options[name] is not None:
            setattr(section, name, options[name])
    log = set_up_logging(options["log_level"] or settings.log.level)
    folder = Path(workspace).absolute() if workspace else None
    running = Gateway(home, settings, workspace=folder, open=options["open_"])
    running.on_secrets = log.know
    local: LocalNode | None = None

    def ready(gateway: Gateway) -> None:
        nonlocal local
        if options["as_json"]:
            show_only(_facts(gateway, home, with_node=with_node))
        else:
            # All at once: whoever waits for the first line and leaves has the gateway running all the same.
            click.echo(
                f"farhand ready on {gateway.url}\n"
                f"  console   {_sign_in_link(gateway) or 'farhand console makes a sign-in link'}\n"
                "  lend another machine:  farhand node pair, then there: farhand join CODE"
            )
        if with_node:
            local = LocalNode(gateway, home, gateway.workspace, section.tls_cert or None)

    try:
        run_loop(running.run(os.environ, ready))
    finally:
        if local is not None:
            local.stop()
    if options["as_json"] and not running.url:
        show_only({"ready": False, "home": str(home), "version": __version__, "pid": os.getpid()})


def _facts(gateway: Gateway, home: Path, *, with_node: bool) -> dict[str, Any]:
    """What a program wants to know of a gateway that has begun to serve."""
    return {
        "ready": True,
        "url": gateway.url,
        "console": _sign_in_link(gateway),
        "node": default_node_id() if with_node else None,
        "home": str(home),
        "token_file": str(home / TOKEN_FILE),
        "workspace": str(gateway.workspace),
        "version": __version__,
        "pid": os.getpid(),
    }


def _sign_in_link(gateway: Gateway) -> str | None:
    """A new sign-in link; None where standard output ends up in the log of a service manager."""
    return None if _output_is_logged(os.environ) else gateway.sign_in_link()


def _output_is_logged(environ: Mapping[str, str]) -> bool:
    """Whether systemd or launchd started this process and keeps what it prints."""
    if sys.stdout.isatty():
        return False
    status = os.fstat(sys.stdout.fileno())
    if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
        return True
    if "INVOCATION_ID" in environ or "JOURNAL_STREAM" in environ:
        # Children of a service inherit both; SYSTEMD_EXEC_PID tells which process is the service itself.
        return environ.get("SYSTEMD_EXEC_PID", str(os.getpid())) == str(os.getpid())
    name = environ.get("XPC_SERVICE_NAME", "0")
    return name != "0" and not name.startswith("application.")
