"""`events`: the journal, up to now or live."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click

from farhand.cli.calls.resumable_streams import resume
from farhand.cli.client import READ_SECONDS, Client
from farhand.cli.commands import client_command
from farhand.cli.json_output import wants_json
from farhand.cli.output import STATE_COLOURS, json_value, log_time, on_terminal, paint, plain, remark, show_json, wrap

DEFAULT_LIMIT: Final = 20
# A live journal sends a heartbeat every 15 s; after three missed ones the connection is dead.
SILENCE_SECONDS: Final = 45.0


@client_command
@click.option("--follow", "-f", is_flag=True, help="Keep showing new events, across restarts of the gateway.")
@click.option("--after", type=click.IntRange(min=0), metavar="ID", help="Start after this event.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"How many of the last events.  [default: {DEFAULT_LIMIT}; 0 with --follow]",
)
def events(follow: bool, after: int | None, limit: int | None, client: Client) -> None:
    """Show the journal: the last events, those --after an id, or live with --follow.

    --json prints one document {"events": […], "last_id": N}; with --follow, one event per line. Continue after the
    last id you saw with --after, and no event is missed.

    \b
    Examples:
      farhand events
      farhand events --after 0 --json
      farhand events --follow
      farhand events --follow --after 1200 --json
    """
    if not follow:
        _show(client, after, limit)
        return
    try:
        _follow(client, after, limit or 0)
    except KeyboardInterrupt:  # the usual way to end; a message would only disturb the output
        raise SystemExit(130) from None


def _show(client: Client, after: int | None, limit: int | None) -> None:
    if after is None:
        last, entries = _tail(client, DEFAULT_LIMIT if limit is None else limit)
    else:
        read = list(_read(client, after))
        last = read[-1]["id"] if read else after
        entries = read if limit is None else read[-limit:] if limit else []
    if wants_json():
        show_json({"events": entries, "last_id": last})
    elif entries:
        _print(entries)
    else:
        remark(f"no events after {last}" if last else "no events yet")


def _follow(client: Client, after: int | None, limit: int) -> None:
    if after is None:
        last, entries = _tail(client, limit)
        _print(entries)
    else:
        last = after
    if on_terminal() and not wants_json():
        remark(paint("following; Ctrl-C ends", dim=True))

    def read(on_connect: Callable[[], None]) -> Iterator[Any]:
        nonlocal last
        for event in _read(client, last, follow=True, on_connect=on_connect):
            yield event
            last = event["id"]

    for event in resume(read):
        _print([event])


def _read(
    client: Client, after: int, *, follow: bool = False, on_connect: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Yield the events after an id. Raises ClientError."""
    seconds = SILENCE_SECONDS if follow else READ_SECONDS
    headers = {"Last-Event-ID": str(after)}
    with client.stream(f"/v1/events?follow={int(follow)}", headers=headers, seconds=seconds) as stream:
        on_connect()
        for _, answer in stream:
            yield answer.value


def _tail(client: Client, limit: int) -> tuple[int, list[Any]]:
    """Return the id of the last event, and the last `limit` events."""
    last: int = client.get("/v1/journal", limit=1).value["last"]
    entries = deque[Any](maxlen=limit)
    for event in _read(client, max(0, last - limit)):
        last = event["id"]
        entries.append(event)
    return last, list(entries)


def _print(entries: Iterable[Any]) -> None:
    for event in entries:
        print(json.dumps(event) if wants_json() else _line(event))
    sys.stdout.flush()


def _line(event: Any) -> str:
    """Return one line; on a terminal an error message follows on lines of its own."""
    subject, data, error = plain(event["subject"]), event["data"], ""
    data = data if isinstance(data, dict) else {"data": data}
    if event["kind"].startswith("call."):
        words = [subject[-12:] if on_terminal() else subject, plain(str(data.get("tool", "")))]
        if "node_id" in data:
            words.append(f"on {plain(str(data['node_id']))}")
        if "state" in data:
            state = str(data["state"])
            words.append(paint(plain(state), STATE_COLOURS.get(state)))
        if isinstance(data.get("error"), dict):
            error = plain(f"{data['error'].get('kind')}: {data['error'].get('message')}")
    else:
        given = {name: value for name, value in data.items() if value not in (None, "", [])}
        words = [subject, *(f"{plain(name)}={plain(json_value(value))}" for name, value in given.items())]
    start = f"{paint(str(event['id']).rjust(6), dim=True)}  {log_time(event['at'])}  {plain(event['kind']):<13}"
    line = f"{start}  {' '.join(words)}"
    if not error:
        return line
    return f"{line}\n{wrap(error, ' ' * 8)}" if on_terminal() else f"{line} {error}"
