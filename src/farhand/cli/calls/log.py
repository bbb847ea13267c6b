"""`log`: the journal as a timeline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any, Final

import click

from farhand.cli.client import Client, ConnectionLost, NoGateway
from farhand.cli.commands import Age, client_command
from farhand.cli.json_output import wants_json
from farhand.cli.output import STATE_COLOURS, json_value, log_time, one_line, paint, plain, remark, show_json, wrap

DEFAULT_LIMIT: Final = 200
MAX_LIMIT: Final = 100_000
PAGE: Final = 500
MAX_CHARACTERS: Final = 100
POLL_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 1.0


@client_command
@click.option("--session", metavar="KEY", help="Only events of this session.")
@click.option("--node", metavar="ID", help="Only events of this node.")
@click.option("--day", metavar="DATE", help="Only events of this day: 2026-11-15, today or yesterday.")
@click.option("--since", metavar="AGE", help="Only the last 90s, 15m, 2h, 7d, or since 2026-11-15T08:00.")
@click.option(
    "--kind", "kinds", metavar="KIND", multiple=True, help="Only call, run, cron, message, node, …; repeatable."
)
@click.option(
    "--limit", type=click.IntRange(1, MAX_LIMIT), help=f"The newest N.  [default: {DEFAULT_LIMIT}; all with --day]"
)
@click.option("--follow", "-f", is_flag=True, help="Keep showing new events.")
def log(
    day: str | None,
    since: str | None,
    kinds: tuple[str, ...],
    limit: int | None,
    follow: bool,
    client: Client,
    **query: Any,
) -> None:
    """Show the journal as a timeline: calls with short arguments and results, runs, messages, nodes.

    Each line starts with the number of its event: `farhand sessions fork KEY --at EVENT` continues from there.

    \b
    Examples:
      farhand log --session main
      farhand log --node laptop --since 2h --kind call
      farhand log --day yesterday --json
    """
    if day is not None and since is not None:
        raise click.UsageError("--day and --since exclude each other")
    if follow and day is not None:
        raise click.UsageError("--day and --follow exclude each other; use --since")
    query["kind"] = ",".join(kinds) or None
    if day is not None:
        query["since"], query["until"] = _day(day)
    if since is not None:
        query["since"] = _since(since)
    events, last, more = _read(client, query, limit or (MAX_LIMIT if day is not None else DEFAULT_LIMIT))
    if wants_json() and not follow:
        show_json({"events": events, "count": len(events), "more": more})
        return
    for event in events:
        _show(event)
    if not events and not follow:
        remark("no entries match")
    if more and not follow:
        remark(f"only the newest {len(events)}; --limit shows more")
    if follow:
        try:
            for event in _follow(client, query, last):
                _show(event)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


def _read(client: Client, query: dict[str, Any], limit: int) -> tuple[list[Any], int, bool]:
    """Return the newest events, oldest first; the id of the last event; and whether there are older ones."""
    found: list[Any] = []
    before = last = None
    while True:
        page = client.get("/v1/journal", **query, limit=min(PAGE, limit - len(found)), before=before).value
        found = page["events"] + found
        last = page["last"] if last is None else last
        before = page["before"]
        if before is None or len(found) >= limit:
            return found, last, before is not None


def _follow(client: Client, query: dict[str, Any], last: int) -> Iterator[Any]:
    """Yield the events after `last`, waiting for a gateway that restarts."""
    while True:
        try:
            page = client.get("/v1/journal", **query, after=last, limit=PAGE).value
        except (NoGateway, ConnectionLost):
            time.sleep(RETRY_SECONDS)
            continue
        yield from page["events"]
        last = page["last"]
        if len(page["events"]) < PAGE:
            time.sleep(POLL_SECONDS)


def _show(event: dict[str, Any]) -> None:
    if wants_json():
        print(json.dumps(event), flush=True)
        return
    text, state = describe(event)
    kind = plain(event["kind"])
    number = str(event["id"])
    line = f"{number} {log_time(event['at'])}  {kind:<15} {plain(text)}"
    line = wrap(line, indent=" " * (7 - len(number)), hanging=" " * (len(number) + 1))
    print(line.replace(kind, paint(kind, STATE_COLOURS.get(state)), 1), flush=True)


def describe(event: dict[str, Any]) -> tuple[str, str]:
    """Return one line about an event, and the state that colours it."""
    if (message := event.get("message")) is not None:
        calls = f" → {', '.join(message['calls'])}" if message["calls"] else ""
        return f"{event['subject']} {message['role']}: {_excerpt(message['text'])}{calls}", ""
    if (run := event.get("run")) is not None:
        return _describe_run(event, run), run["state"] if event["kind"] == "run.ended" else ""
    if (call := event.get("call")) is not None:
        return _describe_call(event, call), call["state"] if event["kind"] == "call.ended" else ""
    given = {name: value for name, value in event["data"].items() if value not in (None, "", {}, [])}
    return f"{event['subject']} {_pairs(given)}".rstrip(), ""


def _describe_call(event: dict[str, Any], call: dict[str, Any]) -> str:
    where = f" on {call['node_id']}" if call.get("node_id") else ""
    start = f"{call['tool']}{where} {_excerpt(call['args'])}"
    if event["kind"] == "call.started":
        return f"{start}  ({event['subject']})"
    if event["kind"] != "call.ended":
        return f"{start}: {_pairs(event['data'])}"
    took = f" in {call['duration_ms']:.0f} ms" if call.get("duration_ms") is not None else ""
    what = call.get("error_message") or (_excerpt(call["result"]) if call.get("result") else "")
    return f"{start} → {call['state']}{took}: {what[:MAX_CHARACTERS]}  ({event['subject']})"


def _describe_run(event: dict[str, Any], run: dict[str, Any]) -> str:
    start = f"{event['subject']} in {run['session_key']}"
    if event["kind"] == "run.ended":
        what = run.get("error_message") or run.get("reply") or ""
        steps = "1 step" if run["steps"] == 1 else f"{run['steps']} steps"
        return f"{start} {run['state']} after {steps}: {one_line(what, MAX_CHARACTERS)}"
    if event["kind"] == "run.joined":
        return f"{start} joined {run.get('joined_to')}"
    return f"{start} from {run['origin']}"


def _excerpt(excerpt: dict[str, Any]) -> str:
    text = " ".join(excerpt["text"].split())
    cut = len(text) > MAX_CHARACTERS or excerpt["length"] > len(excerpt["text"].encode())
    return f"{text[:MAX_CHARACTERS]}… ({excerpt['length']} bytes)" if cut else text


def _pairs(data: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json_value(value)}" for name, value in data.items())


def _day(text: str) -> tuple[int, int]:
    """Return the first millisecond of a day and of the next."""
    named = {"today": date.today(), "yesterday": date.today() - timedelta(days=1)}
    try:
        day = named.get(text) or date.fromisoformat(text)
        limits = [datetime(one.year, one.month, one.day).astimezone() for one in (day, day + timedelta(days=1))]
        begin, end = (max(0, round(limit.timestamp() * 1000)) for limit in limits)
    except (ValueError, OverflowError):  # not a date, or the first or last day that Python knows
        raise click.BadParameter(f"{text!r} is not a day; write it as 2026-11-15", param_hint="--day") from None
    return begin, end


def _since(text: str) -> int:
    """Return the milliseconds since 1970 of an age or a time."""
    try:
        return round(max(0.0, time.time() - Age().convert(text, None, None)) * 1000)
    except click.BadParameter:
        pass
    try:
        return max(0, round(datetime.fromisoformat(text).astimezone().timestamp() * 1000))
    except (ValueError, OverflowError):
        message = f"{text!r} is neither an age (90s, 15m, 2h, 7d) nor a time (2026-11-15T08:00)"
        raise click.BadParameter(message, param_hint="--since") from None
