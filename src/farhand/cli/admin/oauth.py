"""`oauth`: the programs that have access through OAuth."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Client
from farhand.cli.commands import command_group
from farhand.cli.output import Column, ago, hide, minute_time, show, show_list


def _may(client: dict[str, Any]) -> str:
    """Return what a client may do: the most powerful scope of each grant, on which machines, with which tools."""
    grants = []
    for grant in client["grants"]:
        where = " ".join(grant["nodes"]) or "all machines"
        tools = "" if not grant["tools"] else f" with {' '.join(grant['tools'])}"
        grants.append(f"{grant['scopes'][-1]} on {where}{tools}")
    return "; ".join(grants)


def _last_used(client: dict[str, Any]) -> str:
    return ago(max((grant["last_used_at"] or 0 for grant in client["grants"]), default=0) or None)


def _expires(client: dict[str, Any]) -> str:
    ends = [grant["expires_at"] for grant in client["grants"]]
    return minute_time(None if None in ends else max(ends))


COLUMNS = [
    Column("ID", "id"),
    Column("NAME", "name", narrow=str),
    Column("MAY", _may),
    Column("LAST USED", _last_used),
    Column("EXPIRES", _expires, narrow=hide),
]


@command_group
def oauth() -> None:
    """List programs that were given access through OAuth, and revoke it.

    \b
    Examples:
      farhand oauth list
      farhand oauth revoke mcp_0a1b2c3d4e5f6071
    """


@oauth.command("list")
def list_(client: Client) -> None:
    """List the programs that have access.

    \b
    Example:
      farhand oauth list
    """
    empty = "no program has access through OAuth"
    show_list(client.get("/v1/oauth/clients"), "clients", COLUMNS, empty)


@oauth.command()
@click.argument("client_id", metavar="ID")
def revoke(client_id: str, client: Client) -> None:
    """Revoke all access of a program; what it runs is stopped.

    \b
    Example:
      farhand oauth revoke mcp_0a1b2c3d4e5f6071
    """
    show(client.delete("/v1/oauth/clients/{}", client_id), f"revoked: {client_id}")
