"""`call --on`: one tool on many nodes, one table back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ClientError, ConnectionLost
from farhand.cli.output import Column, plain, remark, show_json, show_table, took

# The gateway shows that it is alive more often than that.
SILENCE_SECONDS = 60.0
PATH = "/v1/tools/fanout"
FAILURES = ("failed", "error", "timeout", "denied", "cancelled", "unknown", "offline")


def call_many(
    client: Client, body: dict[str, Any], targets: Sequence[str], headers: Mapping[str, str], as_json: bool
) -> int:
    """Call a tool on all `targets`; the status of the command."""
    nodes = [name for target in targets for part in target.split(",") if (name := part.strip())]
    if not nodes:
        raise click.UsageError("--on names no node; it takes ids and tag:NAME, with commas between them.")
    body = {**body, "nodes": nodes}
    try:
        answer = _watched(client, {**body, "results": as_json}, headers, as_json)
    except ConnectionLost as lost:
        raise ConnectionLost(f"{lost}; what ran is in `farhand calls`", lost.code) from None
    except KeyboardInterrupt:
        fate = "the calls go on: see `farhand calls`" if headers else "the gateway cancels what runs and begins no more"
        raise ClientError("interrupted", f"interrupted; {fate}") from None
    if as_json:
        show_json(answer)
    else:
        _show(answer)
    return 0 if answer["ok"] else 1


def _watched(client: Client, body: dict[str, Any], headers: Mapping[str, str], as_json: bool) -> Any:
    """Return the table. Say which calls wait to be approved and, on a terminal, when each ends."""
    ended = 0
    tell = remark if sys.stderr.isatty() and not as_json else _say_nothing
    with (
        ApprovalPrompt(client, ask=not as_json) as prompt,
        client.stream(PATH, SILENCE_SECONDS, {**body, "stream": True}, headers) as events,
    ):
        for event in events:
            match event["type"]:
                case "planned":
                    total = sum(row["state"] != "offline" for row in event["answer"]["results"])
                    for row in event["answer"]["results"]:
                        if row["state"] == "offline":
                            tell(f"{plain(row['node_id'])} is offline")
                case "waiting":
                    prompt.announce(event["approval"])
                case "ended":
                    ended += 1
                    row = event["row"]
                    tell(f"[{ended}/{total}] {plain(row['node_id'])}: {row['state']} {plain(row['output'])}".rstrip())
                case "done":
                    return event["answer"]
    raise ConnectionLost("the gateway ended before all nodes had answered")


def _say_nothing(_text: str) -> None:
    pass


def _show(answer: dict[str, Any]) -> None:
    columns = [
        Column("NODE"),
        Column("STATE"),
        Column("TOOK", right=True),
        Column("EXIT", right=True),
        Column("OUTPUT", flexible=True),
    ]
    rows = [
        [
            row["node_id"],
            row["state"],
            took(row["duration_ms"]),
            "" if row["exit_code"] is None else str(row["exit_code"]),
            row["output"] or row.get("error", {}).get("message", ""),
        ]
        for row in answer["results"]
    ]
    show_table(columns, rows)
    done = sum(row["ok"] for row in answer["results"])
    failed = sum(row["state"] in FAILURES for row in answer["results"])
    skipped = answer["counts"].get("skipped", 0)
    told = [f"{done} of {len(rows)} succeeded"]
    told += [f"{failed} failed"] if failed else []
    told += [f"{skipped} skipped"] if skipped else []
    remark(f"{', '.join(told)}; `farhand calls --group {answer['group_id']}` shows the calls")
