"""`log`: what happened, as a timeline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

import click

from farhand.cli.client import Client, ConnectionLost, NoGateway, client_command
from farhand.cli.output import STATE_COLOURS, moment, moment_briefly, on_terminal, paint, plain, remark, show_json

LIMIT: Final = 200
PAGE: Final = 500
SHOWN: Final = 100
FOLLOW_SECONDS: Final = 0.5
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.command()
@click.option("--session", metavar="KEY", help="What happened in this session.")
@click.option("--node", metavar="ID", help="What happened on this node.")
@click.option("--day", metavar="DATE", help="On this day: 2026-11-15, today or yesterday.")
@click.option("--since", metavar="SPAN", help="In the last 90s, 15m, 2h, 7d, or since 2026-11-15T08:00.")
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Only this: call, run, cron, message, node, …")
@click.option("--limit", type=click.IntRange(1, 100_000), help=f"The newest N.  [default: {LIMIT}; all with --day]")
@click.option("--follow", "-f", is_flag=True, help="Stay, and show what happens.")
@client_command
def log(
    session: str | None,
    node: str | None,
    day: str | None,
    since: str | None,
    kinds: tuple[str, ...],
    limit: int | None,
    follow: bool,
    client: Client,
    as_json: bool,
) -> None:
    """Show the journal as a timeline: calls with their arguments and results in short, runs, messages, machines.

    The number at the beginning of a line is its event: `farhand sessions fork KEY --at EVENT` goes on from there.

    \b
    Examples:
      farhand log --session main
      farhand log --node laptop --since 2h --kind call
      farhand log --day yesterday --json
    """
    if day is not None and since is not None:
        raise click.UsageError("--day and --since exclude each other")
    if follow and day is not None:
        raise click.UsageError("a day does not go on: use --follow with --since")
    query: dict[str, Any] = {name: value for name, value in (("session", session), ("node", node)) if value is not None}
    if kinds:
        query["kind"] = ",".join(kinds)
    if day is not None:
        query["since"], query["until"] = _day(day)
    if since is not None:
        query["since"] = _since(since)
    most = limit or (100_000 if day is not None else LIMIT)
    events, last, more = _read(client, query, most)
    if as_json and not follow:
        show_json({"events": events, "count": len(events), "more": more})
        return
    for event in events:
        _show(event, as_json)
    if more and not follow:
        remark(f"only the newest {len(events)}; --limit shows more")
    if follow:
        try:
            for event in _follow(client, query, last):
                _show(event, as_json)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


def _read(client: Client, query: dict[str, Any], most: int) -> tuple[list[Any], int, bool]:
    """The newest `most` events, oldest first; the newest event's id; whether there are older ones."""
    found: list[Any] = []
    before: int | None = None
    last: int | None = None
    while True:
        wanted = {**query, "limit": min(PAGE, most - len(found)), **({} if before is None else {"before": before})}
        page = client.get(f"/v1/journal?{urlencode(wanted)}").value
        found = page["events"] + found
        last = page["last"] if last is None else last
        before = page["before"]
        if before is None or len(found) >= most:
            return found, last, before is not None


def _follow(client: Client, query: dict[str, Any], last: int) -> Iterator[Any]:
    """What comes after `last`; a gateway that restarts is waited for."""
    while True:
        try:
            page = client.get(f"/v1/journal?{urlencode({**query, 'after': last, 'limit': PAGE})}").value
        except (NoGateway, ConnectionLost):
            time.sleep(1.0)
            continue
        yield from page["events"]
        last = page["last"]
        if len(page["events"]) < PAGE:
            time.sleep(FOLLOW_SECONDS)


def _show(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    at = moment_briefly(event["at"]) if on_terminal() else moment(event["at"])
    text, state = told(event)
    print(
        f"{event['id']:>7} {at}  {paint(plain(event['kind']).ljust(15), STATE_COLOURS.get(state))} {plain(text)}",
        flush=True,
    )


def told(event: dict[str, Any]) -> tuple[str, str]:
    """What an event says in one line, and the state that colours it."""
    data = event["data"]
    if (message := event.get("message")) is not None:
        calls = f" → {', '.join(message['calls'])}" if message["calls"] else ""
        return f"{event['subject']} {message['role']}: {_short(message['text'])}{calls}", ""
    if (run := event.get("run")) is not None:
        return _run(event, run), run["state"] if event["kind"] == "run.ended" else ""
    if (call := event.get("call")) is not None:
        return _call(event, call), call["state"] if event["kind"] == "call.ended" else ""
    rest = ", ".join(f"{name}={_plain_value(value)}" for name, value in data.items() if value not in (None, "", {}, []))
    return f"{event['subject']} {rest}".rstrip(), ""


def _call(event: dict[str, Any], call: dict[str, Any]) -> str:
    where = f" on {call['node_id']}" if call.get("node_id") else ""
    begun = f"{call['tool']}{where} {_short(call['args'])}"
    if event["kind"] == "call.started":
        return f"{begun}  ({event['subject']})"
    if event["kind"] != "call.ended":
        return f"{begun}: {', '.join(f'{name}={_plain_value(value)}' for name, value in event['data'].items())}"
    took = f" in {call['duration_ms']:.0f} ms" if call.get("duration_ms") is not None else ""
    what = call.get("error_message") or (_short(call["result"]) if call.get("result") else "")
    return f"{begun} → {call['state']}{took}: {what[:SHOWN]}  ({event['subject']})"


def _run(event: dict[str, Any], run: dict[str, Any]) -> str:
    begun = f"{event['subject']} in {run['session_key']}"
    if event["kind"] == "run.ended":
        what = run.get("error_message") or run.get("reply") or ""
        return f"{begun} {run['state']} after {run['steps']} steps: {' '.join(what.split())[:SHOWN]}"
    if event["kind"] == "run.joined":
        return f"{begun} joined {run.get('joined_to')}"
    return f"{begun} from {run['origin']}"


def _short(short: dict[str, Any]) -> str:
    text = " ".join(short["text"].split())
    cut = len(text) > SHOWN or short["length"] > len(short["text"].encode())
    return f"{text[:SHOWN]}… ({short['length']} bytes)" if cut else text


def _plain_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _day(text: str) -> tuple[int, int]:
    named = {"today": date.today(), "yesterday": date.today() - timedelta(days=1)}
    try:
        day = named.get(text) or date.fromisoformat(text)
        begin = datetime(day.year, day.month, day.day).astimezone()
        following = day + timedelta(days=1)
        end = datetime(following.year, following.month, following.day).astimezone()
    except (ValueError, OverflowError):  # the calendar has a first day and a last
        raise click.BadParameter(f"{text!r} is no day; write it as 2026-11-15", param_hint="--day") from None
    return max(0, round(begin.timestamp() * 1000)), max(0, round(end.timestamp() * 1000))


def _since(text: str) -> int:
    if (span := _SPAN.fullmatch(text.strip())) is not None:
        return round(max(0.0, time.time() - float(span[1]) * _SECONDS[span[2]]) * 1000)
    try:
        return max(0, round(datetime.fromisoformat(text).astimezone().timestamp() * 1000))
    except (ValueError, OverflowError):
        message = f"{text!r} is neither a span (90s, 15m, 2h, 7d) nor a moment (2026-11-15T08:00)"
        raise click.BadParameter(message, param_hint="--since") from None
