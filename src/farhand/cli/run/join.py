"""`join`, `node pair` and `node key`: register a machine as a node."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import Any, Final

import click

from farhand.cli.client import Client, ClientError, is_loopback
from farhand.cli.commands import client_options, options_given
from farhand.cli.json_output import json_option, print_only, wants_json
from farhand.cli.output import remark, show_json
from farhand.cli.run.node import NODE_TOKEN_FILE, TRUST, node, node_options, run_until_stopped
from farhand.machine.home import DEFAULT_PORT, home_folder, make_home
from farhand.node.identity import NodeKey
from farhand.node.lent_limits import LendingLimits, effective_limits, store_limits
from farhand.node.names import default_node_id
from farhand.node.program import node_folder
from farhand.protocol.names import validate_node_id

DEFAULT_GATEWAY: Final = f"http://127.0.0.1:{DEFAULT_PORT}"


@node.command()
@click.option("--id", "node_id", help="Valid for this node only.  [default: any new node]")
@click.option(
    "--minutes", type=click.FloatRange(0.02, 1440), default=10, show_default=True, help="How long the code is valid."
)
@client_options
def pair(node_id: str | None, minutes: float, client: Client) -> None:
    """Create a one-time code for another machine. The gateway must be running.

    \b
    Examples:
      farhand node pair
      farhand node pair --id laptop --json
    """
    made = client.post("/v1/pairings", {"seconds": minutes * 60, **options_given(node_id=node_id)}).value
    url = client.find().url
    code = f"{made['code']}@{url.removeprefix('http://')}"
    command = f"farhand join {shlex.quote(code)}"
    if wants_json():
        show_json({**made, "code": code, "gateway": url, "command": command})
        return
    print(f"Run this on the other machine within {minutes:g} minutes:\n  {command}")
    if is_loopback(url.rpartition("://")[2].rpartition(":")[0].strip("[]")):
        remark(
            "\nThe address after the @ works only on this machine. For another one, start the gateway with\n"
            "--host and --tls-cert, and use an address that the other machine can reach."
        )


@node.command()
@click.option("--id", "node_id", help="Name of the node.  [default: the host name]")
@click.option("--home", type=click.Path(file_okay=False), help="State of the node.  [~/.farhand]")
@json_option()
def key(node_id: str | None, home: str | None, as_json: bool) -> None:
    """Show the public key of this machine's node, creating the key pair the first time.

    Register it with `farhand token create --node ID --public-key KEY`; then `farhand node` needs no token. The private
    key never leaves this machine.

    \b
    Example:
      farhand node key --id laptop
    """
    name = node_id or default_node_id()
    try:
        validate_node_id(name)
    except ValueError as error:
        raise ClientError("invalid_id", str(error)) from None
    place = home_folder(home)
    make_home(place)
    made = NodeKey.make(node_folder(place, name))
    if as_json:
        show_json({"node_id": name, "public_key": made.public})
    else:
        print(made.public)
        remark(f"On the gateway: farhand token create --node {shlex.quote(name)} --public-key {made.public}")


@click.command()
@click.argument("code")
@click.option("--gateway", "gateway_url", help="Address of the gateway.  [default: the part of CODE after the @]")
@click.option("--no-run", is_flag=True, help="Only register; connect later with `farhand node`.")
@json_option()
@node_options
def join(code: str, gateway_url: str | None, no_run: bool, as_json: bool, **options: Any) -> None:
    """Register this machine with the gateway that created CODE, and connect it.

    This creates a key in the home folder, readable only by you, and registers it with the gateway. Limits and tags are
    stored too. From then on `farhand node` is enough.

    \b
    Examples:
      farhand join K7QM-2RXF@192.168.1.5:3210
      farhand join K7QM-2RXF --gateway https://gateway.example:3210 --id laptop
    """
    secret, _, place = code.partition("@")
    home = home_folder(options["home"])
    url = gateway_url or place or os.environ.get("FARHAND_URL") or _running_gateway(options["home"]) or DEFAULT_GATEWAY
    url = _http_url(url)
    if options["ca_file"] or options["pinned_cert"]:
        os.environ["FARHAND_CA_FILE"] = options["ca_file"] or options["pinned_cert"]
    node_id = options["node_id"] or default_node_id()
    folder = node_folder(home, node_id)
    given = LendingLimits(
        root=tuple(str(Path(root).absolute()) for root in options["roots"]),
        read_only=options["read_only"],
        allow_tools=tuple(options["allowed"]),
        deny_tools=tuple(options["denied"]),
        tags=tuple(options["tags"]),
        sandbox=options["sandbox"] or "",
        network=options["network"] or "",
    )
    # Checked before the code is used, which works only once.
    holds = effective_limits(home, folder, given, reset=options["reset_limits"])
    login = NodeKey.fresh(folder)
    body = {"code": secret, "node_id": node_id, "public_key": login.public}
    try:
        answer = Client(url=url).request("POST", "/v1/pair", body).value
        kept = {"gateway": url, "node_id": str(answer["node_id"]), "token": str(answer["token"])}
        gateway_id = str(answer["gateway_id"])
    except (KeyError, TypeError):
        raise ClientError("not_a_gateway", f"{url} is not a gateway: unexpected answer") from None
    except ClientError as error:
        if error.code == "unauthorized":
            reason = "it is wrong, used or expired; create another with `farhand node pair`"
            raise ClientError("unauthorized", f"{url} rejected the code: {reason}") from None
        if error.code == "untrusted":
            hint = "give the authority with --ca-file, or the certificate with --pinned-cert"
            raise ClientError("untrusted", f"{str(error).rpartition(';')[0]}; {hint}") from None
        raise
    kept |= {name: str(Path(options[name]).absolute()) for name in TRUST if options[name]}
    make_home(home)
    if not kept["token"]:
        login.belongs_to(gateway_id)
    path = _store_login(home, kept)
    store_limits(folder, given, reset=options["reset_limits"])
    if as_json:
        print_only({"node_id": kept["node_id"], "gateway": url, "token_file": str(path), "key": not kept["token"]})
    else:
        what = f"its token is in {path}" if kept["token"] else f"its key is in {folder}"
        print(f"joined {url} as {kept['node_id']}; {what}", flush=True)
        if holds.described():
            print(f"limits: {holds.described()}", flush=True)
    if not no_run:
        run_until_stopped(url, {**options, "node_id": kept["node_id"], "token": kept["token"] or None})


def _http_url(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    for socket, plain in (("ws://", "http://"), ("wss://", "https://")):
        if url.startswith(socket):
            url = plain + url.removeprefix(socket)
    return url.removesuffix("/v1/nodes/ws").rstrip("/")


def _running_gateway(home: str | None) -> str | None:
    with contextlib.suppress(ClientError):
        return Client(home).find().url
    return None


def _store_login(home: Path, kept: dict[str, str]) -> Path:
    path = home / NODE_TOKEN_FILE
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(kept, file)
        file.flush()
        os.fsync(file.fileno())
    beside.chmod(0o600)
    beside.replace(path)
    return path
