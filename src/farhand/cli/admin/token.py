"""`token`: the owner's token, and tokens for nodes and programs."""

from __future__ import annotations

import shlex
import time
from typing import Any, Final
from urllib.parse import urlsplit

import click

from farhand.cli.admin.budget import BudgetLimit
from farhand.cli.client import TOKEN_FILE, Client, ClientError, reason_of
from farhand.cli.commands import Age, command_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import (
    Column,
    ago,
    hide,
    minute_time,
    paint,
    plain,
    remark,
    show,
    show_fields,
    show_json,
    show_list,
)
from farhand.protocol.names import is_loopback

SCOPES: Final = ("read", "chat", "tools.read", "tools.write", "tools.exec", "approve", "pair", "freeze", "admin")
# An example command for each scope, most powerful first.
EXAMPLES: Final = {
    "admin": "tools",
    "read": "tools",
    "tools.read": "call",
    "tools.write": "call",
    "tools.exec": "call",
    "chat": "chat",
    "approve": "approvals",
    "pair": "node pair",
    "freeze": "freeze --status",
}


def _state(entry: dict[str, Any]) -> str:
    if entry["revoked_at"] is not None:
        return "revoked"
    expired = entry["expires_at"] is not None and entry["expires_at"] <= time.time() * 1000
    return "expired" if expired else "valid"


def _only_for(entry: dict[str, Any]) -> str:
    """Return the tools and nodes the token is limited to, such as `laptop__* on laptop`."""
    return " ".join([*entry["tools"], *(["on", *entry["nodes"]] if entry["nodes"] else [])])


COLUMNS = [
    Column("ID", "id"),
    Column("STATE", _state),
    Column("NODE", "node_id", narrow=str),
    Column("LABEL", "label", narrow=str),
    Column("CREATED", lambda entry: ago(entry["created_at"]), narrow=hide),
    Column("LAST USED", lambda entry: ago(entry["last_used_at"])),
    Column("EXPIRES", lambda entry: minute_time(entry["expires_at"], ""), optional=True),
    Column("SCOPES", lambda entry: " ".join(entry["scopes"]) + (" (by key)" if entry.get("public_key") else "")),
    Column("ONLY FOR", _only_for, optional=True),
]


@command_group
def token() -> None:
    """Create, list and revoke tokens.

    \b
    Examples:
      farhand token create --node laptop
      farhand token create --label dashboard --scope read
      farhand token list
      farhand token revoke 1a2b3c4d
    """


@token.command("show")
def show_owner(client: Client) -> None:
    """Print the owner's token, which has all rights. The gateway need not be running.

    \b
    Example:
      curl -H "Authorization: Bearer $(farhand token show)" localhost:3210/v1/jobs
    """
    path = client.home / TOKEN_FILE
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        raise ClientError("no_token", f"{client.home} has no token; `farhand up` creates it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError("no_token", f"cannot read {path}: {reason_of(error)}") from None
    if not secret:
        raise ClientError("no_token", f"{path} is blank; remove it and restart the gateway to create a new token")
    show({"token": secret}, secret)


@token.command()
@click.option("--node", "node_id", metavar="ID", help="Create a token with which only this node can connect.")
@click.option("--label", default="", help="What the token is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    type=click.Choice(SCOPES),
    help=f"What it allows; repeatable: {', '.join(SCOPES)}.  [default: the first five]",
)
@click.option("--tool", "tools", multiple=True, metavar="PATTERN", help="Only these tools, such as 'laptop__*'.")
@click.option("--node-only", "nodes", multiple=True, metavar="ID", help="Only the tools of this node. Repeatable.")
@click.option(
    "--profile",
    type=click.Choice(["compact", "full"]),
    default="compact",
    show_default=True,
    help="What MCP clients see: node_bash and the like for all machines, or every machine's tools.",
)
@click.option("--public-key", metavar="KEY", help="With --node: log in with this key, see `farhand node key`.")
@click.option(
    "--budget",
    "budget",
    multiple=True,
    type=BudgetLimit(),
    metavar="LIMIT",
    help="What it may use, such as calls=100/day, money=5/day, bytes=1000000/total. Repeatable.",
)
@click.option("--expires", "expires_seconds", type=Age(), metavar="AGE", help="Expire after 30s, 15m, 2h or 7d.")
def create(client: Client, **options: Any) -> None:
    """Create a token for a node or a program. Its secret is shown only once. The gateway must be running.

    \b
    Examples:
      farhand token create --node laptop
      farhand token create --label dashboard --scope read --json
      farhand token create --tool 'laptop__Read' --node-only laptop --expires 2h
      farhand token create --label ci --budget calls=500/day --budget money=2/day
    """
    node_id = options["node_id"]
    if node_id is not None and any(options[name] for name in ("tools", "nodes", "scopes", "budget")):
        raise click.UsageError(
            "--scope, --tool, --node-only and --budget are not for nodes: a --node token can only connect."
        )
    if options["public_key"] is not None and node_id is None:
        raise click.UsageError("--public-key requires --node.")
    if options["expires_seconds"] == 0:
        raise click.UsageError("--expires must be more than 0.")
    body = {name: value for name, value in options.items() if value not in (None, ())}
    made = client.post("/v1/tokens", body).value
    url = client.find().url
    command = _example(url, made, node_id)
    if wants_json():
        show_json({**made, "command": command})
        return
    show_fields({"id": made["id"], "label": made["label"], "scopes": " ".join(made["scopes"])})
    if made["token"]:
        print(f"{paint('token', bold=True)}   {made['token']}")
        remark(paint("The token is shown only once.", dim=True))
    print("\nRun this on the other machine:" if node_id is not None else "\nUse it like this:")
    print(f"  {command}")
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        remark(
            f"\n{parts.netloc} works only on this machine. For another one, start the gateway with\n"
            "--host, and use an address that the other machine can reach."
        )


def _example(url: str, made: dict[str, Any], node_id: str | None) -> str:
    """Return a command that the new token allows."""
    secret = made["token"]  # empty for a key
    if node_id is not None:
        variable = f"SA_NODE_TOKEN={secret} " if secret else ""
        return f"{variable}farhand node --gateway {shlex.quote(url)} --id {shlex.quote(node_id)}"
    command = next(command for scope, command in EXAMPLES.items() if scope in made["scopes"])
    if command == "call":
        command += f" {shlex.quote(next((tool for tool in made['tools'] if '*' not in tool), 'TOOL'))} KEY=VALUE"
    return f"FARHAND_URL={shlex.quote(url)} FARHAND_TOKEN={secret} farhand {command}"


@token.command("list")
def list_(client: Client) -> None:
    """List the tokens, without their secrets.

    \b
    Example:
      farhand token list
    """
    empty = "no tokens yet; `farhand token show` prints the owner's"
    show_list(client.get("/v1/tokens"), "tokens", COLUMNS, empty)


@token.command()
@click.argument("token_id", metavar="ID")
def revoke(token_id: str, client: Client) -> None:
    """Revoke a token and every token created with it; nodes connected with them are disconnected.

    \b
    Example:
      farhand token revoke 1a2b3c4d
    """
    answer = client.delete("/v1/tokens/{}", token_id)
    show(answer, f"revoked: {token_id}")
    for created in [] if wants_json() else answer.value["also"]:
        print(plain(f"revoked: {created} (created with {token_id})"))
