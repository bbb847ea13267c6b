"""`token`: the owner's token, and those for nodes and programs."""

from __future__ import annotations

import shlex
import time
from typing import Any, Final
from urllib.parse import quote, urlsplit

import click

from farhand.cli.client import TOKEN_FILE, Client, ClientError, client_command, is_loopback
from farhand.cli.json_output import group_json_option
from farhand.cli.output import Column, ago, fits, paint, plain, remark, show_answer, show_fields, show_json, show_table

SCOPES: Final = ("read", "chat", "tools.read", "tools.write", "tools.exec", "approve", "pair", "freeze", "admin")
# What somebody with a scope may ask for, as an example.
USES: Final = (
    ("admin", "tools"),
    ("read", "tools"),
    ("tools.read", "call"),
    ("tools.write", "call"),
    ("tools.exec", "call"),
    ("chat", "chat"),
    ("approve", "approvals"),
    ("pair", "node pair"),
    ("freeze", "freeze --status"),
)


@click.group()
@group_json_option
def token() -> None:
    """Make, list and revoke tokens.

    \b
    Examples:
      farhand token create --node laptop
      farhand token create --label dashboard --scope read
      farhand token list
      farhand token revoke 1a2b3c4d
    """


@token.command()
@client_command
def show(client: Client, as_json: bool) -> None:
    """Print the owner's token, which may do everything. Needs no running gateway.

    \b
    Example:
      curl -H "Authorization: Bearer $(farhand token show)" http://127.0.0.1:3210/v1/nodes
    """
    path = client.home / TOKEN_FILE
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        raise ClientError("no_token", f"there is no token in {client.home}; the first `farhand up` makes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError("no_token", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not secret:
        raise ClientError("no_token", f"{path} is blank; remove it and start the gateway to have a new one made")
    if as_json:
        show_json({"token": secret})
    else:
        print(secret)


@token.command()
@click.option("--node", "node_id", metavar="ID", help="A token with which this node, and no other, joins.")
@click.option("--label", default="", help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    type=click.Choice(SCOPES),
    help=f"What it may do; repeatable: {', '.join(SCOPES)}.  [default: the first five]",
)
@click.option("--tool", "tools", multiple=True, metavar="PATTERN", help="Only for these tools, as 'laptop__*'.")
@click.option("--node-only", "nodes", multiple=True, metavar="ID", help="Only for the tools of this node. Repeatable.")
@click.option("--public-key", metavar="KEY", help="With --node: it logs in by this key, see `farhand node key`.")
@click.option("--expires", metavar="TIME", help="It ends by itself after 30s, 15m, 2h or 7d.")
@client_command
def create(
    node_id: str | None,
    label: str,
    scopes: tuple[str, ...],
    tools: tuple[str, ...],
    nodes: tuple[str, ...],
    public_key: str | None,
    expires: str | None,
    client: Client,
    as_json: bool,
) -> None:
    """Make a token for a node or a program. Its secret is shown this once. The gateway must be running.

    \b
    Examples:
      farhand token create --node laptop
      farhand token create --label dashboard --scope read --json
      farhand token create --tool 'laptop__Read' --node-only laptop --expires 2h
    """
    if node_id is not None and (tools or nodes):
        raise click.UsageError("--tool and --node-only are for programs; a token made with --node can only join.")
    if node_id is not None and scopes:
        raise click.UsageError("--scope is for programs; a token made with --node can only join as that node.")
    if public_key is not None and node_id is None:
        raise click.UsageError("--public-key goes with --node: a key is that of a node.")
    body: dict[str, Any] = {"label": label}
    if public_key is not None:
        body["public_key"] = public_key
    if node_id is not None:
        body["node_id"] = node_id
    if scopes:
        body["scopes"] = list(scopes)
    if tools:
        body["tools"] = list(tools)
    if nodes:
        body["nodes"] = list(nodes)
    if expires is not None:
        body["expires_seconds"] = _seconds(expires)
    answer = client.request("POST", "/v1/tokens", body).value
    url = client.find().url
    command = _command(url, answer, node_id)
    if as_json:
        show_json({**answer, "command": command})
        return
    show_fields([("id", answer["id"]), ("label", answer["label"]), ("scopes", " ".join(answer["scopes"]))])
    if answer["token"]:
        print(f"{paint('token', bold=True)}   {answer['token']}")
        remark(paint("The token is shown this once.", dim=True))
    print("\nRun this on the machine that joins:" if node_id is not None else "\nUse it like this:")
    print(f"  {command}")
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        remark(
            f"\n{parts.netloc} is this machine. For another one, start the gateway with\n"
            "--host, and put an address there that leads from the other machine to this one."
        )


def _seconds(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or int(text[:-1]) == 0:
        raise click.UsageError(f"--expires takes 30s, 15m, 2h or 7d, not {text!r}.")
    return float(text[:-1]) * unit


def _command(url: str, made: dict[str, Any], node_id: str | None) -> str:
    """One that the new token may give."""
    secret = made["token"]  # for a key there is none to show
    if node_id is None:
        use = next(use for scope, use in USES if scope in made["scopes"])
        if use == "call":
            use += f" {shlex.quote(next((tool for tool in made['tools'] if '*' not in tool), 'TOOL'))} KEY=VALUE"
        return f"FARHAND_URL={shlex.quote(url)} FARHAND_TOKEN={secret} farhand {use}"
    with_token = f"SA_NODE_TOKEN={secret} " if secret else ""
    return f"{with_token}farhand node --gateway {shlex.quote(url)} --id {shlex.quote(node_id)}"


@token.command("list")
@client_command
def list_(client: Client, as_json: bool) -> None:
    """List the tokens that were made, without their secrets.

    \b
    Example:
      farhand token list
    """
    answer = client.get("/v1/tokens")
    tokens = answer.value["tokens"]
    if as_json:
        show_answer(answer)
    elif not tokens:
        remark("no tokens were made yet; the owner's own is shown by `farhand token show`")
    else:
        _show_tokens(tokens)


def _show_tokens(tokens: list[dict[str, Any]]) -> None:
    rows = [
        {
            "ID": entry["id"],
            "STATE": _state(entry),
            "NODE": entry["node_id"] or "",
            "LABEL": entry["label"],
            "CREATED": ago(entry["created_at"]),
            "LAST USED": ago(entry["last_used_at"]),
            "EXPIRES": _expires(entry),
            "SCOPES": " ".join(entry["scopes"]) + (" (by key)" if entry.get("public_key") else ""),
            "ONLY FOR": _only_for(entry),
        }
        for entry in tokens
    ]
    empty = {name for name in rows[0] if not any(row[name] for row in rows)}
    names = [name for name in rows[0] if name not in empty & {"EXPIRES", "ONLY FOR"}]
    if not fits([Column(name) for name in names], [[row[name] for name in names] for row in rows]):
        names = [name for name in names if name not in empty | {"CREATED"}]
    show_table([Column(name) for name in names], [[row[name] for name in names] for row in rows])


def _expires(entry: dict[str, Any]) -> str:
    at = entry["expires_at"]
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at / 1000))


def _only_for(entry: dict[str, Any]) -> str:
    """`laptop__* on laptop`: to which tools, and those of which nodes, it is limited."""
    nodes = f"on {' '.join(entry['nodes'])}" if entry["nodes"] else ""
    return " ".join([*entry["tools"], *([nodes] if nodes else [])])


def _state(entry: dict[str, Any]) -> str:
    if entry["revoked_at"] is not None:
        return "revoked"
    over = entry["expires_at"] is not None and entry["expires_at"] <= time.time() * 1000
    return "expired" if over else "valid"


@token.command()
@click.argument("token_id", metavar="ID")
@client_command
def revoke(token_id: str, client: Client, as_json: bool) -> None:
    """End a token now, and every token it made; a node that is connected with one of them is disconnected.

    \b
    Example:
      farhand token revoke 1a2b3c4d
    """
    answer = client.request("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
    if as_json:
        show_answer(answer)
    else:
        print(f"revoked: {plain(token_id)}")
        for made in answer.value["also"]:
            print(f"revoked: {plain(made)} (made by {plain(token_id)})")
