"""`events`: the journal, up to now or live."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import click

from farhand.cli.client import Client, ConnectionLost, NoGateway, client_command
from farhand.cli.output import (
    SHORT_ID,
    STATE_COLOURS,
    moment,
    moment_briefly,
    on_terminal,
    paint,
    plain,
    remark,
    show_json,
    wrap,
)

LAST: Final = 20
# A live journal says at least every 15 s that it is there; three of these missed, and the line is dead.
SILENCE_SECONDS: Final = 45.0
RETRY_SECONDS: Final = (0.2, 5.0)
WINDOW: Final = 500


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Stay, and show what happens; survives restarts of the gateway.")
@click.option("--after", type=click.IntRange(min=0), metavar="ID", help="Begin after this event.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"How many of the last.  [default: {LAST}; 0 with --follow]",
)
@client_command
def events(follow: bool, after: int | None, limit: int | None, client: Client, as_json: bool) -> None:
    """Show the journal: the last entries, those --after an id, or live with --follow.

    With --json one document {"events": […], "last_id": N}; with --json and --follow one event on each line. What was
    seen last is a valid --after, so a reader that stopped misses nothing.

    \b
    Examples:
      farhand events
      farhand events --after 0 --json
      farhand events --follow
      farhand events --follow --after 1200 --json
    """
    if not follow:
        _show(client, after, limit, as_json)
        return
    try:
        _follow(client, after, limit or 0, as_json)
    except KeyboardInterrupt:  # the way this command ends; a line about it would only spoil the output
        raise SystemExit(130) from None


def _show(client: Client, after: int | None, limit: int | None, as_json: bool) -> None:
    if after is None:
        last, entries = _tail(client, LAST if limit is None else limit)
    else:
        with client.events(after, follow=False) as stream:
            read = list(stream)
        last = read[-1]["id"] if read else after
        entries = read if limit is None else read[-limit:] if limit else []
    if as_json:
        show_json({"events": entries, "last_id": last})
    elif not entries:
        remark("nothing has happened yet" if not last else f"nothing happened after {last}")
    else:
        _print(entries, as_json)


def _follow(client: Client, after: int | None, limit: int, as_json: bool) -> None:
    """The first connection must succeed; after that it is taken up again until somebody stops us."""
    if after is None:
        last, entries = _tail(client, limit)
        _print(entries, as_json)
    else:
        last = after
    if on_terminal() and not as_json:
        remark(paint("following; Ctrl-C ends", dim=True))
    begun, lost, pause = False, False, RETRY_SECONDS[0]
    while True:
        try:
            with client.events(last, follow=True, seconds=SILENCE_SECONDS) as stream:
                if lost:
                    remark("farhand: connected again")
                begun, lost, pause = True, False, RETRY_SECONDS[0]
                for event in stream:
                    _print([event], as_json)
                    last = event["id"]
        except (NoGateway, ConnectionLost) as error:
            if not begun:
                raise
            reason = str(error)
        else:
            reason = "the gateway ended the stream"
        if not lost:
            remark(f"farhand: {reason}; trying again")
            lost = True
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311
        pause = min(pause * 2, RETRY_SECONDS[1])


def _tail(client: Client, limit: int) -> tuple[int, list[Any]]:
    """The id of the last event, and the last `limit` events.

    The gateway tells what comes after an id, so the end is searched for: a few dozen short requests find it in a
    journal of any length.
    """
    low = _first_after(client, 0)
    if low is None:
        return 0, []
    step = WINDOW
    while (found := _first_after(client, low + step)) is not None:
        low, step = found, step * 2
    high = low + step
    while high - low > WINDOW:
        middle = (low + high) // 2
        found = _first_after(client, middle)
        if found is None:
            high = middle
        else:
            low = found
    last, entries = low, deque[Any](maxlen=limit)
    with client.events(max(0, low - limit), follow=False) as stream:
        for event in stream:
            last = event["id"]
            entries.append(event)
    return last, list(entries)


def _first_after(client: Client, event_id: int) -> int | None:
    with client.events(event_id, follow=False) as stream:
        event = next(stream, None)
    return None if event is None else int(event["id"])


def _print(entries: Iterable[Any], as_json: bool) -> None:
    for event in entries:
        print(json.dumps(event) if as_json else _line(event))
    sys.stdout.flush()


def _line(event: Any) -> str:
    """One line; on a terminal the message of an error stands below, broken between words."""
    subject, data, error = plain(event["subject"]), event["data"], ""
    data = data if isinstance(data, dict) else {"data": data}
    if event["kind"].startswith("call."):
        words = [subject[-SHORT_ID:] if on_terminal() else subject, plain(str(data.get("tool", "")))]
        if "node_id" in data:
            words.append(f"on {plain(str(data['node_id']))}")
        if "state" in data:
            state = str(data["state"])
            words.append(paint(plain(state), STATE_COLOURS.get(state)))
        if isinstance(data.get("error"), dict):
            error = plain(f"{data['error'].get('kind')}: {data['error'].get('message')}")
    else:
        words = [subject]
        words += [f"{plain(key)}={plain(_value(value))}" for key, value in data.items() if value not in (None, "", [])]
    when = moment_briefly(event["at"]) if on_terminal() else moment(event["at"])
    line = f"{paint(str(event['id']).rjust(6), dim=True)}  {when}  {plain(event['kind']):<13}  {' '.join(words)}"
    if not error:
        return line
    return f"{line}\n{wrap(error, ' ' * 8)}" if on_terminal() else f"{line} {error}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
