"""`up` and `gateway`: run the gateway."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from farhand import __version__, config
from farhand.app.certificate import use_own_certificate
from farhand.app.fleet import replica_id
from farhand.app.gateway import Gateway
from farhand.cli.client import TOKEN_FILE
from farhand.cli.json_output import json_option, print_only
from farhand.cli.run.local_node import LocalNode
from farhand.cli.run.runtime import run_loop, set_up_logging
from farhand.machine import tracing
from farhand.machine.home import home_folder, make_home
from farhand.node.names import default_node_id
from farhand.protocol.errors import FarhandError

Command = TypeVar("Command", bound=Callable[..., Any])


# Set for a gateway that starts itself again.
STARTS_ANEW = "FARHAND_STARTS_ANEW"
ANEW_SECONDS = 1.0
FOLDER = click.Path(file_okay=False)
FILE = click.Path(exists=True, dir_okay=False)
OPTIONS = (
    click.option("--host", help="Address to listen on.  [default: 127.0.0.1]"),
    click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 picks a free one.  [default: 3210]"),
    click.option("--home", type=FOLDER, help="State, settings and keys.  [~/.farhand]"),
    click.option("--workspace", type=FOLDER, help="Folder of the local tools."),
    click.option("--open", "open_", is_flag=True, help="Accept requests without a token; loopback only."),
    click.option("--tls-cert", type=FILE, help="Certificate (PEM)."),
    click.option("--tls-key", type=FILE, help="Private key of the certificate (PEM)."),
    click.option("--log-level", help="debug, info, warning or error.  [default: info]"),
    json_option("Print one JSON document on standard output once ready."),
)


def _gateway_options(command: Command) -> Command:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@_gateway_options
@click.option("--no-node", is_flag=True, help="Do not start a node for this machine.")
def up(no_node: bool, workspace: str | None, **options: Any) -> None:
    """Start the gateway and a node for this machine."""
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
    use_own_certificate(home, section)
    log = set_up_logging(options["log_level"] or settings.log.level)
    tracing.set_up("farhand-gateway", replica_id(home) if settings.store.url else socket.gethostname(), os.environ)
    folder = Path(workspace).absolute() if workspace else None
    running = Gateway(home, settings, workspace=folder, open=options["open_"], on_secrets=log.know)
    local: LocalNode | None = None

    def ready(gateway: Gateway) -> None:
        nonlocal local
        if options["as_json"]:
            print_only(_facts(gateway, home, with_node=with_node))
        else:
            # In one write: a reader that closes the pipe after the first line must not stop the gateway.
            click.echo(
                f"farhand ready on {gateway.url}\n"
                f"  console   {_sign_in_link(gateway) or 'run `farhand console` for a sign-in link'}\n"
                "  add a machine: `farhand node pair` prints a command to run on it"
            )
        if with_node:
            local = LocalNode(gateway, home, gateway.workspace, section.tls_cert or None)

    anew = os.environ.pop(STARTS_ANEW, "") == "1"
    try:
        while True:
            try:
                run_loop(running.run(os.environ, ready))
                break
            except FarhandError as error:
                if not anew or running.url:
                    raise
                # Other gateways took over the work of this one, and no service manager may be there to start it again.
                logging.getLogger("farhand").warning("cannot restart yet: %s", error)
                time.sleep(ANEW_SECONDS)
                running = Gateway(home, settings, workspace=folder, open=options["open_"], on_secrets=log.know)
    finally:
        if local is not None:
            local.stop()
    if running.superseded:
        os.environ[STARTS_ANEW] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    if options["as_json"] and not running.url:
        print_only({"ready": False, "home": str(home), "version": __version__, "pid": os.getpid()})


def _facts(gateway: Gateway, home: Path, *, with_node: bool) -> dict[str, Any]:
    """Return the document that --json prints once the gateway is ready."""
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
    """Return a new sign-in link, or None if a service manager logs standard output."""
    return None if _output_is_logged(os.environ) else gateway.sign_in_link()


def _output_is_logged(environ: Mapping[str, str]) -> bool:
    """Return whether systemd or launchd started this process and logs its output."""
    if sys.stdout.isatty():
        return False
    status = os.fstat(sys.stdout.fileno())
    if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
        return True
    if "INVOCATION_ID" in environ or "JOURNAL_STREAM" in environ:
        # Children of a service inherit both; SYSTEMD_EXEC_PID identifies the service itself.
        return environ.get("SYSTEMD_EXEC_PID", str(os.getpid())) == str(os.getpid())
    name = environ.get("XPC_SERVICE_NAME", "0")
    return name != "0" and not name.startswith("application.")
