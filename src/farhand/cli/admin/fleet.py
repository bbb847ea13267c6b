"""`fleet`: the gateways that serve together."""

from __future__ import annotations

from typing import Any

from farhand.cli.client import Client
from farhand.cli.commands import client_command
from farhand.cli.output import Column, ago, remark, show, show_table

COLUMNS = [
    Column("GATEWAY", lambda one: f"{one['id']}{' *' if one['self'] else ''}"),
    Column("VERSION", "version"),
    Column("STARTED", lambda one: ago(one["started_at"])),
    Column("SEEN", lambda one: ago(one["beat_at"])),
    Column("EPOCH", "epoch", right=True),
    Column("NODES", "nodes", right=True),
]


@client_command
def fleet(client: Client) -> None:
    """List the gateways that share the store, with the number of nodes connected to each; * is the one that answered.

    \b
    Examples:
      farhand fleet
      farhand fleet --json
    """
    show(client.get("/v1/fleet"), _show)


def _show(answer: dict[str, Any]) -> None:
    show_table(COLUMNS, answer["replicas"])
    if len({one["settings"] for one in answer["replicas"]}) > 1:
        remark("the settings of these gateways differ; give all of them the same farhand.toml and environment")
