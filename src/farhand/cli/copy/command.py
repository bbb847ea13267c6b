"""`farhand cp`: copy a file or folder between nodes, the workspace and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from farhand.cli.client import Client, client_command
from farhand.cli.copy.fetch import fetch
from farhand.cli.copy.progress import Progress, progress
from farhand.cli.copy.upload import put
from farhand.cli.copy.watch import begin, follow
from farhand.cli.output import plain_lines, remark, show_json


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--agent", metavar="ID", help="Whose workspace `gsv:` is.  [default: main]")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@client_command
def cp(source: str, destination: str, agent: str | None, quiet: bool, client: Client, as_json: bool) -> int:
    """Copy a file or folder; every file arrives whole, or not at all.

    SRC and DST are NODE:PATH, gsv:PATH for the agent's workspace, or a path on this machine. A path that is relative
    starts at the node's workspace. Into a folder that exists, or a DST that ends with /, it goes under its own name.

    \b
    Examples:
      farhand cp laptop:/var/log/syslog server:/backup/
      farhand cp ./report.pdf gsv:notes/
      farhand cp server:project ./project
    """
    known = [node["node_id"] for node in client.get("/v1/nodes").value["nodes"]]
    far = [_is_far(endpoint, known) for endpoint in (source, destination)]
    if not any(far):
        raise click.UsageError(f"neither {source!r} nor {destination!r} is on a node; `farhand nodes` lists them.")
    with progress(quiet or as_json) as show:
        if all(far):
            answer = _between(client, source, destination, agent, show)
        elif far[1]:
            answer = put(client, source, destination, agent, show)
        else:
            answer = fetch(client, source, _path_of(source, known), destination, agent, show)
    if as_json:
        show_json(answer)
    else:
        remark(f"{answer['bytesTransferred']} bytes copied to {plain_lines(destination)}")
    return 0


def _is_far(endpoint: str, known: list[str]) -> bool:
    if endpoint.startswith(("./", "../", "/", "~")) or ":" not in endpoint:
        return False
    if any(endpoint.startswith(f"{node_id}:") for node_id in (*known, "gsv")):
        return True
    return not Path(endpoint).exists()  # most likely a node that is not known; the gateway says so


def _path_of(endpoint: str, known: list[str]) -> str:
    """The path of an endpoint on a node. Ids may contain colons: the longest known one counts, as for the gateway."""
    ids = [node_id for node_id in (*known, "gsv") if endpoint.startswith(f"{node_id}:")]
    return endpoint[len(max(ids, key=len)) + 1 :] if ids else endpoint.partition(":")[2]


def _between(client: Client, source: str, destination: str, agent: str | None, show: Progress) -> dict[str, Any]:
    body = {"source": source, "destination": destination, "agent_id": agent, "background": True}
    return follow(client, begin(client, body), show)
