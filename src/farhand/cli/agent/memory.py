"""`memory`: search and read the agents' memory files."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group
from farhand.cli.output import Column, paint, plain, plain_lines, remark, show, show_table

AGENT = click.option("--agent", default="main", show_default=True, help="Agent whose memory is used.")
REINDEX_SECONDS = 3600.0
COLUMNS = [
    Column("SOURCE", "source", flexible=True),
    Column("FILES", "files", right=True),
    Column("CHUNKS", "chunks", right=True),
]


@client_group
@AGENT
def memory(agent: str, client: Client) -> None:
    """Search and read the agents' memory: MEMORY.md and memory/*.md. Without a command, show what is indexed.

    \b
    Examples:
      farhand memory
      farhand memory search wifi password
      farhand memory get memory/2026-11-15.md --from 3 --lines 10
    """
    show(client.get("/v1/memory", agent=agent), _show_status)


memory.add_alias("status", "Show what is indexed, and how.")


@memory.command()
@click.argument("query", nargs=-1, required=True)
@click.option("-n", "--max-results", type=click.IntRange(1, 50), help="Maximum number of passages.  [default: 6]")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Leave out passages with a lower score.")
@AGENT
def search(query: tuple[str, ...], client: Client, **options: Any) -> int:
    """Search the memory. The exit status is 1 if nothing is found, as with grep.

    \b
    Example:
      farhand memory search what is the wifi password
    """

    def render(found: dict[str, Any]) -> None:
        for hit in found["results"]:
            place = f"{hit['path']}:{hit['start_line']}-{hit['end_line']}"
            print(f"{paint(plain(place), bold=True)} (score: {hit['score']:.2f})\n{plain_lines(hit['text'])}\n")
        remark(f"index: {found['index']}" + (f" ({plain(found['note'])})" if found["note"] else ""))

    answer = client.get("/v1/memory/search", q=" ".join(query), **options)
    show(answer, render)
    return 0 if answer.value["results"] else 1


@memory.command()
@click.argument("path")
@click.option("--from", type=click.IntRange(1), help="First line.  [default: 1]")
@click.option("--lines", type=click.IntRange(1), help="Number of lines.  [default: to the end]")
@AGENT
def get(client: Client, **query: Any) -> None:
    """Print a memory file, or some of its lines. PATH may include them: MEMORY.md:3-7.

    \b
    Example:
      farhand memory get MEMORY.md --from 3 --lines 5
    """
    show(client.get("/v1/memory/get", **query), lambda value: print(plain_lines(value["text"])))


@memory.command()
@AGENT
def reindex(agent: str, client: Client) -> None:
    """Index every file again. Changed files are indexed automatically, so this is rarely needed.

    \b
    Example:
      farhand memory reindex
    """
    show(client.post(url_path("/v1/memory/reindex", agent=agent), seconds=REINDEX_SECONDS), _show_status)


def _show_status(value: dict[str, Any]) -> None:
    show_table(COLUMNS, value["sources"])
    vectors = f", {value['embedded']} of {value['chunks']} chunks embedded by {value['embedder']}"
    print(plain(f"index: {value['index']}{vectors if value['embedder'] else ''}"))
    if value["trouble"]:
        remark(plain(f"note: {value['trouble']}"))
