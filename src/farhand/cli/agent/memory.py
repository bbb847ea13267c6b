"""`memory`: search and read what the agents wrote down for themselves."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import Column, paint, plain, plain_lines, remark, show_answer, show_table

AGENT = click.option("--agent", default="main", show_default=True, help="Whose memory.")
REINDEX_SECONDS = 3600.0


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@AGENT
@client_command
def memory(agent: str, client: Client, as_json: bool) -> None:
    """What the agents remember: MEMORY.md and memory/*.md. Without a command: what is indexed.

    \b
    Examples:
      farhand memory
      farhand memory search wifi password
      farhand memory get memory/2026-11-15.md --from 3 --lines 10
    """
    if click.get_current_context().invoked_subcommand is None:
        _status(client, agent, as_json)


@memory.command()
@AGENT
@client_command
def status(agent: str, client: Client, as_json: bool) -> None:
    """What is indexed, and by what it can be found.

    \b
    Example:
      farhand memory status
    """
    _status(client, agent, as_json)


@memory.command()
@click.argument("query", nargs=-1, required=True)
@click.option("-n", "--max-results", type=click.IntRange(1, 50), help="Most passages to show.  [default: 6]")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Leave out what scores less.")
@AGENT
@client_command
def search(
    query: tuple[str, ...], max_results: int | None, min_score: float | None, agent: str, client: Client, as_json: bool
) -> None:
    """Search the memory. Exit status 1 when nothing is found, as grep does.

    \b
    Example:
      farhand memory search what is the wifi password
    """
    asked = {"q": " ".join(query), "agent": agent, "max_results": max_results, "min_score": min_score}
    answer = client.get(f"/v1/memory/search?{_query(asked)}")
    found = answer.value
    if as_json:
        show_answer(answer)
    else:
        for hit in found["results"]:
            place = f"{hit['path']}:{hit['start_line']}-{hit['end_line']}"
            print(f"{paint(plain(place), bold=True)} (score: {hit['score']:.2f})\n{plain_lines(hit['text'])}\n")
        remark(f"index: {found['index']}" + (f" ({plain(found['note'])})" if found["note"] else ""))
    if not found["results"]:
        raise click.exceptions.Exit(1)


@memory.command()
@click.argument("path")
@click.option("--from", "start", type=click.IntRange(1), help="First line.  [default: 1]")
@click.option("--lines", type=click.IntRange(1), help="How many lines.  [default: to the end]")
@AGENT
@client_command
def get(path: str, start: int | None, lines: int | None, agent: str, client: Client, as_json: bool) -> None:
    """Print a memory file, or some lines of it. PATH may carry lines: MEMORY.md:3-7.

    \b
    Example:
      farhand memory get MEMORY.md --from 3 --lines 5
    """
    answer = client.get(f"/v1/memory/get?{_query({'path': path, 'from': start, 'lines': lines, 'agent': agent})}")
    if as_json:
        show_answer(answer)
    else:
        print(plain_lines(answer.value["text"]))


@memory.command()
@AGENT
@client_command
def reindex(agent: str, client: Client, as_json: bool) -> None:
    """Read every file again. Never needed to see a change: searches find changed files by themselves.

    \b
    Example:
      farhand memory reindex
    """
    answer = client.request("POST", f"/v1/memory/reindex?{_query({'agent': agent})}", seconds=REINDEX_SECONDS)
    if as_json:
        show_answer(answer)
    else:
        _show_status(answer.value)


def _status(client: Client, agent: str, as_json: bool) -> None:
    answer = client.get(f"/v1/memory?{_query({'agent': agent})}")
    if as_json:
        show_answer(answer)
    else:
        _show_status(answer.value)


def _show_status(value: dict[str, Any]) -> None:
    columns = [Column("SOURCE", flexible=True), Column("FILES", right=True), Column("CHUNKS", right=True)]
    show_table(columns, [[place["source"], str(place["files"]), str(place["chunks"])] for place in value["sources"]])
    vectors = f", {value['embedded']} of {value['chunks']} chunks embedded by {value['embedder']}"
    print(plain(f"index: {value['index']}{vectors if value['embedder'] else ''}"))
    if value["trouble"]:
        remark(plain(f"note: {value['trouble']}"))


def _query(values: dict[str, Any]) -> str:
    return urlencode({name: value for name, value in values.items() if value is not None})
