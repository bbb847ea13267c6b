"""`cp`: copy a file or folder between nodes, the workspace and this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from farhand.cli.client import Client
from farhand.cli.commands import client_command
from farhand.cli.copy.endpoints import Progress
from farhand.cli.copy.fetch import fetch
from farhand.cli.copy.transfers import transfer
from farhand.cli.copy.upload import upload
from farhand.cli.json_output import wants_json
from farhand.cli.output import plain_lines, show


@client_command
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--agent", metavar="ID", help="Agent whose workspace `gsv:` is.  [default: main]")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress bar.")
def cp(source: str, destination: str, agent: str | None, quiet: bool, client: Client) -> int:
    """Copy a file or folder. Every file arrives complete or not at all.

    SRC and DST are NODE:PATH, gsv:PATH for the agent's workspace, or a path on this machine. Relative paths start at
    the node's workspace. If DST is an existing folder or ends with /, SRC keeps its name inside it.

    \b
    Examples:
      farhand cp laptop:/var/log/syslog server:/backup/
      farhand cp ./report.pdf gsv:notes/
      farhand cp server:project ./project
    """
    nodes = [node["node_id"] for node in client.get("/v1/nodes").value["nodes"]]
    remote = [_is_remote(endpoint, nodes) for endpoint in (source, destination)]
    if not any(remote):
        raise click.UsageError(f"neither {source!r} nor {destination!r} is on a node; `farhand nodes` lists them.")
    with _progress_bar(quiet or wants_json()) as progress:
        if all(remote):
            answer = transfer(client, source, destination, agent, progress)
        elif remote[1]:
            answer = upload(client, source, destination, agent, progress)
        else:
            answer = fetch(client, source, _path_of(source, nodes), destination, agent, progress)
    show(answer, hint=f"{answer['bytesTransferred']} bytes copied to {plain_lines(destination)}")
    return 0


def _is_remote(endpoint: str, nodes: list[str]) -> bool:
    if endpoint.startswith(("./", "../", "/", "~")) or ":" not in endpoint:
        return False
    if any(endpoint.startswith(f"{node_id}:") for node_id in (*nodes, "gsv")):
        return True
    return not Path(endpoint).exists()  # most likely an unknown node, which the gateway reports


def _path_of(endpoint: str, nodes: list[str]) -> str:
    """Return the path of an endpoint. Ids may contain colons: the longest known one counts, as for the gateway."""
    ids = [node_id for node_id in (*nodes, "gsv") if endpoint.startswith(f"{node_id}:")]
    return endpoint[len(max(ids, key=len)) + 1 :] if ids else endpoint.partition(":")[2]


@contextlib.contextmanager
def _progress_bar(quiet: bool) -> Iterator[Progress]:
    """Yield a function that updates a bar on the terminal, or does nothing if standard error is not one."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
