"""`secret`: values that calls can use without seeing them."""

from __future__ import annotations

import sys
from typing import Any

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group
from farhand.cli.output import Column, ago, remark, show, show_table
from farhand.protocol.errors import FarhandError

COLUMNS = [
    Column("SECRET", "name"),
    Column("NODES", lambda secret: " ".join(secret["nodes"]) or "all"),
    Column("TOOLS", lambda secret: " ".join(secret["tools"]) or "all", flexible=True),
    Column("MASKED", lambda secret: "yes" if secret["masked"] else "no"),
    Column("LAST USE", lambda secret: ago(secret["last_used_at"])),
]


def _list(client: Client) -> None:
    show(client.get("/v1/secrets"), lambda found: show_table(COLUMNS, found["secrets"]))


@client_group
def secret(client: Client) -> None:
    """Manage secrets: values that calls use as {{secret:NAME}} without seeing them.

    Without a command: list them. Values are never shown.

    \b
    Examples:
      farhand secret set GITHUB_TOKEN --node ci --tool 'ci__Bash'
      farhand call ci__Bash command='curl -u me:{{secret:GITHUB_TOKEN}} $URL'
    """
    _list(client)


@secret.command("list")
def list_secrets(client: Client) -> None:
    """List names, restrictions and last use."""
    _list(client)


@secret.command("set")
@click.argument("name")
@click.option("--node", "nodes", multiple=True, help="Only calls on this node may use it. Repeatable.")
@click.option("--tool", "tools", multiple=True, help="Only calls of this tool, such as ci__Bash. Repeatable.")
def set_secret(name: str, nodes: tuple[str, ...], tools: tuple[str, ...], client: Client) -> None:
    """Set a secret. The value is read from a prompt, or from standard input; a final line break is dropped."""
    if sys.stdin.isatty():
        value = click.prompt(f"Value of {name}", hide_input=True, confirmation_prompt=True, err=True)
    else:
        value = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise FarhandError(f"the value of {name!r} is empty; give it on standard input or at the prompt")
    body = {"value": value, "nodes": list(nodes), "tools": list(tools)}

    def render(answer: dict[str, Any]) -> None:
        remark(f"set; calls use it as {{{{secret:{name}}}}}")
        if answer["warning"]:
            remark(f"warning: {answer['warning']}")

    show(client.put(url_path("/v1/secrets/{}", name), body), render)


@secret.command("remove")
@click.argument("name")
def remove(name: str, client: Client) -> None:
    """Remove a secret."""
    show(client.delete("/v1/secrets/{}", name), lambda _: remark(f"removed {name}"))
