"""`node pair` and `node bundle`: add another machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from farhand.cli.client import Client, ClientError, reason_of
from farhand.cli.commands import Age, client_options, options_given
from farhand.cli.json_output import json_option, wants_json
from farhand.cli.output import local_time, on_terminal, plain, remark, show, show_json
from farhand.cli.run.node import node
from farhand.packaging.builds import platform, write_bundle
from farhand.protocol.join_codes import JoinCode
from farhand.protocol.names import is_loopback


@node.command()
@click.option("--id", "node_id", help="Name of the machine.  [default: its host name]")
@click.option("--tag", "tags", multiple=True, help="Tag for grouping nodes. Repeatable.")
@click.option("--root", multiple=True, metavar="DIR", help="It shares only this folder of its own. Repeatable.")
@click.option("--read-only", is_flag=True, help="It shares no tool that changes it.")
@click.option("--allow-tool", "allow_tools", multiple=True, metavar="TOOL", help="It shares this tool despite --root.")
@click.option(
    "--deny-tool", "deny_tools", multiple=True, metavar="TOOL", help="It does not share this tool. Repeatable."
)
@click.option(
    "--expires", type=Age(), default="10m", show_default=True, metavar="AGE", help="Life of the code: 10m, 2h."
)
@click.option("--no-qr", is_flag=True, help="Print no QR code.")
@client_options
def pair(node_id: str | None, expires: float, no_qr: bool, client: Client, **limits: Any) -> None:
    """Create a one-time code for another machine. The gateway must be running.

    The line that is printed installs Farhand on the other machine, from this gateway, and connects it. Limits and tags
    travel with the code: the machine stores them, and the user of the code cannot lend more.

    \b
    Examples:
      farhand node pair
      farhand node pair --id web1 --tag web --root /srv --expires 1h
      farhand node pair --read-only --json
    """
    if not 1 <= expires <= 86_400:
        raise click.UsageError("--expires takes 1s to 24h.")
    body = {"seconds": expires, "limits": limits, **options_given(node_id=node_id)}
    made = client.post("/v1/pairings", body).value
    join, install, url = _best(client, made)
    if wants_json():
        facts = {name: made[name] for name in ("node_id", "expires_at", "limits", "addresses", "pin")}
        show_json({**facts, "code": join, "gateway": url, "command": f"farhand join {join}", "install": install})
        return
    _show(made, join, install, url, qr=not no_qr)


def _best(client: Client, made: dict[str, Any]) -> tuple[str, str, str]:
    """Return the code, the line to paste, and the address in both.

    An address that this command was given is known to work from another machine, unless it is this one's.
    """
    used = client.find().url
    if is_loopback(_host(used)):
        return made["join_code"], made["install"], made["addresses"][0]
    code = str(JoinCode(made["code"], used, made["pin"]))
    return code, made["install"].replace(made["addresses"][0], used), used


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _show(made: dict[str, Any], join: str, install: str, url: str, *, qr: bool) -> None:
    print("Paste this on the other machine; it installs Farhand from this gateway and connects:\n")
    print(f"  {install}\n")
    print("If Farhand is already installed on it:\n")
    print(f"  farhand join {join}\n")
    if qr and on_terminal():
        _show_qr(install)
    remark(f"The code works once, until {local_time(made['expires_at'])}; after that, curl reports the error 401.")
    others = [one for one in made["addresses"] if one != url]
    if others:
        remark(f"If {url} cannot be reached from that machine, use one of {', '.join(map(plain, others))}.")
    if is_loopback(_host(url)):
        remark(
            f"\n{url} is this machine's own address, so no other machine can use the code. Start the gateway with\n"
            "`farhand up --host 0.0.0.0`; it then encrypts connections with a certificate of its own."
        )


def _show_qr(text: str) -> None:
    import segno  # noqa: PLC0415

    code = segno.make(text, micro=False, error="L")
    if code.symbol_size()[0] <= shutil.get_terminal_size().columns:
        code.terminal(sys.stdout, compact=True)


@node.command()
@click.option("--output", "-o", "file", required=True, type=click.Path(dir_okay=False), help="File to write.")
@json_option(expose_value=False)
def bundle(file: str) -> None:
    """Write one file that runs a node with nothing but Python.

    It contains this version of Farhand and the packages that a node needs, for the same system and Python as here. On
    the other machine, `python3 FILE` does what `farhand` does.

    \b
    Examples:
      farhand node bundle -o farhand.pyz
      python3 farhand.pyz join K7QM-2RXF@192.168.1.5:3210
    """
    path = Path(file).absolute()
    try:
        write_bundle(path)
    except OSError as error:
        raise ClientError("failed", f"cannot write {path}: {reason_of(error)}") from None
    size = path.stat().st_size
    show(
        {"file": str(path), "bytes": size, "platform": platform()},
        f"{path}: {size / 1_000_000:.1f} MB, for {platform()}",
        f"on the other machine: python3 {path.name} join CODE",
    )
