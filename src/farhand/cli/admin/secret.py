"""`secret`: values that calls can use without seeing them."""

from __future__ import annotations

import sys
from typing import Any

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group
from farhand.cli.output import Column, ago, remark, show, show_table
from farhand.protocol.errors import FarhandError


def _use(secret: dict[str, Any]) -> str:
    if secret["hosts"]:
        return f"requests to {' '.join(secret['hosts'])}"
    return " ".join(secret["tools"]) or "all"


COLUMNS = [
    Column("SECRET", "name"),
    Column("NODES", lambda secret: " ".join(secret["nodes"]) or "all"),
    Column("TOOLS", _use, flexible=True),
    Column("MASKED", lambda secret: "yes" if secret["masked"] else "no"),
    Column("LAST USE", lambda secret: ago(secret["last_used_at"])),
]


@client_group
def secret(client: Client) -> None:
    """Manage secrets: values that calls use as {{secret:NAME}} without seeing them.

    Without a command: list them. Values are never shown.

    \b
    Examples:
      farhand secret set GITHUB_TOKEN --node ci --tool 'ci__Bash'
      farhand call ci__Bash command='curl -u me:{{secret:GITHUB_TOKEN}} $URL'
    """
    show(client.get("/v1/secrets"), lambda found: show_table(COLUMNS, found["secrets"]))


secret.add_alias("list", "List names, restrictions and last use.")


@secret.command("set")
@click.argument("name")
@click.option("--node", "nodes", multiple=True, help="Only calls on this node may use it. Repeatable.")
@click.option("--tool", "tools", multiple=True, help="Only calls of this tool, such as ci__Bash. Repeatable.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Add it to https requests to this host instead: confined commands use it without ever holding it. Repeatable.",
)
@click.option("--header", default="", help="The header for --host (default: 'Authorization: Bearer {}').")
def set_secret(
    name: str, nodes: tuple[str, ...], tools: tuple[str, ...], hosts: tuple[str, ...], header: str, client: Client
) -> None:
    """Set a secret. The value is read from a prompt, or from standard input; a final line break is dropped.

    \b
    Example:
      farhand secret set GITHUB_TOKEN --node ci --host api.github.com
    """
    if sys.stdin.isatty():
        value = click.prompt(f"Value of {name}", hide_input=True, confirmation_prompt=True, err=True)
    else:
        value = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise FarhandError(f"the value of {name!r} is empty; give it on standard input or at the prompt")
    body = {"value": value, "nodes": list(nodes), "tools": list(tools), "hosts": list(hosts), "header": header}

    def render(answer: dict[str, Any]) -> None:
        if hosts:
            remark(f"set; the proxy of a node with --network adds it to requests to {' '.join(hosts)}")
        else:
            remark(f"set; calls use it as {{{{secret:{name}}}}}")
        if answer["warning"]:
            remark(f"warning: {answer['warning']}")

    show(client.put(url_path("/v1/secrets/{}", name), body), render)


@secret.command("remove")
@click.argument("name")
def remove(name: str, client: Client) -> None:
    """Remove a secret."""
    show(client.delete("/v1/secrets/{}", name), hint=f"removed {name}")
