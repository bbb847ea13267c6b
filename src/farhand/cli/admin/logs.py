"""`logs`: the log of a node."""

from __future__ import annotations

import json
from typing import Any

import click

from farhand.cli.client import Client
from farhand.cli.commands import client_command, complete_nodes
from farhand.cli.output import paint, plain, remark, show

COLOURS = {"ERROR": "red", "WARN": "yellow"}


@client_command
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.option("-n", "--lines", type=click.IntRange(1, 5000), default=100, show_default=True, help="How many, at most.")
@click.option("--raw", is_flag=True, help="Print the JSON lines as the node wrote them.")
def logs(node_id: str, lines: int, raw: bool, client: Client) -> None:
    """Show the newest lines of a node's log.

    \b
    Examples:
      farhand logs laptop
      farhand logs laptop -n 20 --raw
    """

    def render(value: dict[str, Any]) -> None:
        for line in value["lines"]:
            print(plain(line) if raw else _format(line))
        if value["truncated"]:
            count = value["count"]
            remark(f"only the newest {'line' if count == 1 else f'{count} lines'}; --lines shows more")

    show(client.get("/v1/nodes/{}/logs", node_id, lines=lines), render)


def _format(line: str) -> str:
    try:
        entry: Any = json.loads(line)
        level = str(entry["level"])
        text = f"{entry['ts']} {level:<5} {entry['event']}: {entry.get('message', '')}"
        more = " ".join(f"{name}={entry[name]}" for name in ("tool", "callId", "durationMs") if name in entry)
    except (ValueError, KeyError, TypeError):
        return plain(line)
    return paint(plain(f"{text} {more}".rstrip()), COLOURS.get(level))
