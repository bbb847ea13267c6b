"""`logs`: what a node program wrote down of itself."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import paint, plain, remark, show_answer

COLOURS = {"ERROR": "red", "WARN": "yellow"}


@click.command()
@click.argument("node_id", metavar="NODE")
@click.option("-n", "--lines", type=click.IntRange(1, 5000), default=100, show_default=True, help="How many, at most.")
@click.option("--raw", is_flag=True, help="The JSON lines as the node wrote them.")
@client_command
def logs(node_id: str, lines: int, raw: bool, client: Client, as_json: bool) -> None:
    """Show the newest lines of a node's log.

    \b
    Examples:
      farhand logs laptop
      farhand logs laptop -n 20 --raw
    """
    answer = client.get(f"/v1/nodes/{quote(node_id, safe='')}/logs?lines={lines}")
    if as_json:
        show_answer(answer)
        return
    for line in answer.value["lines"]:
        print(plain(line) if raw else _shown(line))
    if answer.value["truncated"]:
        count = answer.value["count"]
        remark(f"only the newest {'line' if count == 1 else f'{count} lines'}; --lines shows more")


def _shown(line: str) -> str:
    try:
        entry: Any = json.loads(line)
        level = str(entry["level"])
        text = f"{entry['ts']} {level:<5} {entry['event']}: {entry.get('message', '')}"
        more = " ".join(f"{name}={entry[name]}" for name in ("tool", "callId", "durationMs") if name in entry)
    except (ValueError, KeyError, TypeError):
        return plain(line)
    return paint(plain(f"{text} {more}".rstrip()), COLOURS.get(level))
