"""`join` and `node key`: register this machine as a node."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import msgspec

from farhand.cli.client import CONNECT_SECONDS, Client, ClientError, NoGateway, reason_of
from farhand.cli.json_output import json_option, print_only
from farhand.cli.output import show
from farhand.cli.run.node import (
    DEFAULT_GATEWAY,
    NODE_TOKEN_FILE,
    TRUST,
    given_limits,
    node,
    node_options,
    run_until_stopped,
)
from farhand.machine.files.private_files import replace_private
from farhand.machine.home import home_folder, make_home
from farhand.node.identity import NodeKey
from farhand.node.names import default_node_id
from farhand.node.program import node_folder
from farhand.node.stored_limits import LendingError, LendingLimits, effective_limits, store_limits
from farhand.protocol.join_codes import JoinCode, certificate_pin
from farhand.protocol.names import validate_node_id

# In the folder of a node that joined with a pinned certificate.
CERTIFICATE_FILE: Final = "gateway.pem"
Answered = TypeVar("Answered", bound=msgspec.Struct)


@node.command()
@click.option("--id", "node_id", help="Name of the node.  [default: the host name]")
@click.option("--home", type=click.Path(file_okay=False), help="State of the node.  [~/.farhand]")
@json_option(expose_value=False)
def key(node_id: str | None, home: str | None) -> None:
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
    hint = f"On the gateway: farhand token create --node {shlex.quote(name)} --public-key {made.public}"
    show({"node_id": name, "public_key": made.public}, made.public, hint)


@click.command()
@click.argument("code")
@click.option("--gateway", "gateway_url", help="Address of the gateway.  [default: the part of CODE after the @]")
@click.option("--no-run", is_flag=True, help="Only register; connect later with `farhand node`.")
@json_option()
@node_options
def join(code: str, gateway_url: str | None, no_run: bool, as_json: bool, **options: Any) -> None:
    """Register this machine with the gateway that created CODE, and connect it.

    This creates a key in the home folder, readable only by you, and registers it with the gateway. Limits and tags are
    stored too. From then on `farhand node` is enough. A code may come with a name, limits and tags; the options can
    limit further, but not lend more.

    \b
    Examples:
      farhand join K7QM-2RXF@192.168.1.5:3210
      farhand join K7QM-2RXF --gateway https://gateway.example:3210 --id laptop
    """
    try:
        parts = JoinCode.parse(code)
    except ValueError as error:
        raise ClientError("usage", str(error)) from None
    home = home_folder(options["home"])
    url = gateway_url or parts.url or os.environ.get("FARHAND_URL") or _running_gateway(options["home"])
    url = _http_url(url or DEFAULT_GATEWAY)
    certificate = _pinned(url, parts.pin) if parts.pin else None
    if certificate is None and (options["ca_file"] or options["pinned_cert"]):
        os.environ["FARHAND_CA_FILE"] = options["ca_file"] or options["pinned_cert"]
    with contextlib.ExitStack() as stack:
        gateway = GatewayClient(url, None if certificate is None else stack.enter_context(_as_file(certificate)))
        _join(gateway, parts.secret, home, certificate, as_json=as_json, options=options)
    if not no_run:
        # The limits are stored now; without this, those of the code would be reset again.
        run_until_stopped(url, {**options, "reset_limits": False})


def _join(
    gateway: GatewayClient, secret: str, home: Path, certificate: str | None, *, as_json: bool, options: dict[str, Any]
) -> None:
    """Register this machine and store its login and limits; complete `options` for a start of the node."""
    offered = gateway.ask("/v1/pair/offer", {"code": secret}, CodeOffer)
    node_id = options["node_id"] or offered.node_id or default_node_id()
    try:
        validate_node_id(node_id)
    except ValueError as error:
        raise ClientError("invalid_id", str(error)) from None
    folder = node_folder(home, node_id)
    given = _with_code(offered.limits, given_limits(options))
    # Checked before the code is used, which works only once.
    holds = effective_limits(home, folder, given, reset=options["reset_limits"])
    login = NodeKey.fresh(folder)
    body = {"code": secret, "node_id": node_id, "public_key": login.public}
    answer = gateway.ask("/v1/pair", body, Joined)
    if answer.node_id != node_id:  # the limits are stored for the id that was asked for
        raise ClientError("not_a_gateway", f"{gateway.url} is not a gateway: it answered for another node")
    make_home(home)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # First, so that a program that is killed here leaves no login without limits.
    store_limits(folder, given, reset=options["reset_limits"])
    kept = {"gateway": gateway.url, "node_id": answer.node_id, "token": answer.token}
    if certificate is not None:
        replace_private(folder / CERTIFICATE_FILE, certificate.encode())
        options["pinned_cert"] = str(folder / CERTIFICATE_FILE)
    kept |= {name: str(Path(options[name]).absolute()) for name in TRUST if options[name]}
    if not answer.token:
        login.belongs_to(answer.gateway_id)
    path = home / NODE_TOKEN_FILE
    replace_private(path, json.dumps(kept).encode())
    options |= {"node_id": answer.node_id, "token": answer.token or None}
    if as_json:
        facts = {"node_id": answer.node_id, "gateway": gateway.url, "token_file": str(path), "key": not answer.token}
        print_only({**facts, "limits": holds.described()})
        return
    what = f"its token is in {path}" if answer.token else f"its key is in {folder}"
    print(f"joined {gateway.url} as {answer.node_id}; {what}", flush=True)
    if holds.described():
        print(f"limits: {holds.described()}", flush=True)
    print("to keep it connected, even after a restart of this machine: farhand service install --node", flush=True)


class CodeOffer(msgspec.Struct):
    """What a code gives."""

    node_id: str | None = None
    limits: LendingLimits = LendingLimits()


class Joined(msgspec.Struct):
    """The answer to a code that was used."""

    node_id: str
    token: str
    gateway_id: str


class GatewayClient:
    """Sends requests to the gateway that is joined, with a certificate of its own if its code has one."""

    def __init__(self, url: str, certificate: str | None) -> None:
        self.url = url
        self._client = Client(url=url, certificate=certificate)

    def ask(self, path: str, body: dict[str, Any], answer: type[Answered]) -> Answered:
        """Return the answer to a request. Raises ClientError."""
        try:
            return msgspec.convert(self._client.request("POST", path, body).value, answer)
        except msgspec.ValidationError:
            raise ClientError("not_a_gateway", f"{self.url} is not a gateway: unexpected answer") from None
        except ClientError as error:
            if error.code == "unauthorized":
                reason = "it is wrong, used or expired; create another with `farhand node pair`"
                raise ClientError("unauthorized", f"{self.url} rejected the code: {reason}") from None
            if error.code == "untrusted":
                hint = "give the authority with --ca-file, or the certificate with --pinned-cert"
                raise ClientError("untrusted", f"{str(error).rpartition(';')[0]}; {hint}") from None
            raise


def _with_code(offered: LendingLimits, given: LendingLimits) -> LendingLimits:
    """Return the limits of a code with those of its user added. Raises ClientError if they would allow more.

    Tools that the code lends without a sandbox are not lent to a user who names the folders: the code comes from the
    gateway, and the folders are a limit for it.
    """
    roots = tuple(str(Path(root).expanduser()) for root in offered.root)
    try:
        # The tags of the code stay, too: rules of the policy may depend on them.
        tags = tuple(dict.fromkeys((*offered.tags, *given.tags)))
        together = msgspec.structs.replace(offered, root=roots).narrowed(given)
        allowed = given.allow_tools if given.root else together.allow_tools
        return msgspec.structs.replace(together, tags=tags, allow_tools=allowed)
    except LendingError as error:
        raise ClientError("not_allowed", f"{error}; the code comes with these limits: {offered.described()}") from None


def _pinned(url: str, pin: str) -> str:
    """Return the certificate that the gateway shows, in PEM, if it is the one of the code. Raises ClientError."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise ClientError("usage", f"the code has a certificate's digest, so the gateway is https://, not {url}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing but its certificate is read from this connection
    try:
        with (
            socket.create_connection((parts.hostname or "", parts.port or 443), timeout=CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname) as link,
        ):
            shown = link.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as error:
        raise NoGateway(f"cannot reach {url}: {reason_of(error)}") from None
    if certificate_pin(shown) != pin:
        raise ClientError(
            "untrusted",
            f"{url} shows another certificate than the one in the code: it is not the gateway that made the code, or "
            "something in between reads the connection; nothing was sent",
        )
    return ssl.DER_cert_to_PEM_cert(shown)


@contextlib.contextmanager
def _as_file(certificate: str) -> Iterator[str]:
    """Write a certificate to a temporary file: Python's TLS trusts files, and a node that joined keeps its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(certificate)
        file.flush()
        yield file.name


def _http_url(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    for scheme, plain in (("ws://", "http://"), ("wss://", "https://")):
        if url.startswith(scheme):
            url = plain + url.removeprefix(scheme)
    return url.removesuffix("/v1/nodes/ws").rstrip("/")


def _running_gateway(home: str | None) -> str | None:
    with contextlib.suppress(ClientError):
        return Client(home).find().url
    return None
