"""`calls`: list recorded calls; show or cancel one."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.commands import client_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import (
    Column,
    ago,
    duration,
    id_column,
    json_text,
    local_time,
    plain_lines,
    short_time,
    show,
    show_fields,
    show_list,
    show_section,
)

ID = click.argument("call_id", metavar="ID")
# How many of the newest calls are searched for an id with the given end.
SEARCH_LIMIT = 1000


def _state(record: dict[str, Any]) -> str:
    if record["state"] == "error":
        return f"error: {record['error']['kind']}"
    if record["state"] == "waiting":
        return f"waiting: {record['waits_for']} until {short_time(record['deadline_at'])}"
    return str(record["state"])


COLUMNS = [
    id_column("ID", "id"),
    Column("TOOL", "tool"),
    Column("NODE", lambda record: record["route"].get("node_id")),
    Column("STATE", _state),
    Column("TOOK", lambda record: duration(record["duration_ms"]), right=True),
    Column("STARTED", lambda record: ago(record["created_at"])),
]


@client_group
@click.option("--node", "node_id", metavar="ID", help="Only calls to this node.")
@click.option("--tool", metavar="NAME", help="Only calls of this tool.")
@click.option("--group", metavar="ID", help="Only the calls of one `call --on`.")
@click.option("--state", metavar="STATE", help="waiting, running, ok, error, timeout, cancelled, denied or unknown.")
@click.option("--waiting", is_flag=True, help="Only calls that wait for their node or for approval.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, metavar="N", help="How many.  [default: 20, at most 1000]"
)
def calls(waiting: bool, limit: int, client: Client, **filters: str | None) -> None:
    """List calls, newest first; show or cancel one.

    \b
    Examples:
      farhand calls
      farhand calls --state running
      farhand calls --waiting
      farhand calls --tool laptop__Bash --limit 5 --json
      farhand calls show 0198c0de-7a11-7000-8000-0123456789ab
      farhand calls cancel 0123456789ab
    """
    if waiting and filters["state"] not in (None, "waiting"):
        raise click.UsageError("--waiting and --state exclude each other.")
    if waiting:
        filters["state"] = "waiting"
    empty = "no matching calls" if any(filters.values()) else "no calls yet"
    answer = client.get("/v1/calls", limit=limit, bodies=None if wants_json() else 0, **filters)
    show_list(answer, "calls", COLUMNS, empty)


@calls.command("show")
@ID
def show_call(call_id: str, client: Client) -> None:
    """Show one call: its arguments and its result.

    ID is the whole id, or its end, as the list shows it on a narrow terminal.

    \b
    Examples:
      farhand calls show 0198c0de-7a11-7000-8000-0123456789ab
      farhand calls show 0123456789ab --json
    """

    def render(record: dict[str, Any]) -> None:
        show_fields(
            {
                "call": record["id"],
                "tool": record["tool"],
                "node": record["route"].get("node_id"),
                "state": record["state"] + (" (in the background)" if record["background"] else ""),
                "waits": f"for {record['waits_for']}" if record.get("waits_for") else None,
                "approval": record.get("approval_id"),
                "session": record["session_key"],
                "agent": record["agent_id"],
                "started": f"{local_time(record['created_at'])} ({ago(record['created_at'])})",
                "deadline": None if record["ended_at"] else local_time(record["deadline_at"]),
                "took": duration(record["duration_ms"]),
            }
        )
        show_section("arguments", json_text(record["args"]))
        if "error" in record:
            show_section("error", plain_lines(f"{record['error']['kind']}: {record['error']['message']}"))
        elif record["state"] not in ("running", "waiting"):
            show_section("result", json_text(record.get("result")))

    show(client.get(call_path(client, call_id)), render)


@calls.command()
@ID
def cancel(call_id: str, client: Client) -> int:
    """Cancel a call that runs or waits; its node stops it.

    The exit status is 0 if this cancelled the call, and 1 if the call had already ended.

    \b
    Example:
      farhand calls cancel 0198c0de-7a11-7000-8000-0123456789ab
    """
    answer = client.delete(call_path(client, call_id))
    record = answer.value
    cancelled = record["state"] == "cancelled" and not record.get("already_over")
    if cancelled:
        show(answer, f"cancelled: {record['error']['message']}")
    else:
        show(answer, hint=f"farhand: the call had already ended: {record['state']}")
    return 0 if cancelled else 1


def call_path(client: Client, call_id: str) -> str:
    """Return the path of a call given by its id or the end of it. Raises ClientError if several match."""
    if len(call_id) != 36:
        recent = client.get("/v1/calls", limit=SEARCH_LIMIT, bodies=0).value["calls"]
        found = [record["id"] for record in recent if call_id and record["id"].endswith(call_id)]
        if len(found) > 1:
            raise ClientError("ambiguous", f"{len(found)} call ids end in {call_id!r}; give more of the id")
        if found:
            call_id = found[0]
    return url_path("/v1/calls/{}", call_id)
