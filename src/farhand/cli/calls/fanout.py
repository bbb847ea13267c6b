"""`call --on`: call one tool on many nodes and print one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ClientError, ConnectionLost
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, duration, plain, remark, show, show_table

# The gateway sends heartbeats more often than this.
SILENCE_SECONDS = 60.0
FAILURES = ("failed", "error", "timeout", "denied", "cancelled", "unknown", "offline")
COLUMNS = [
    Column("NODE", "node_id"),
    Column("STATE", "state"),
    Column("TOOK", lambda row: duration(row["duration_ms"]), right=True),
    Column("EXIT", "exit_code", right=True),
    Column("OUTPUT", lambda row: row["output"] or row.get("error", {}).get("message"), flexible=True),
]


def call_many(client: Client, body: dict[str, Any], targets: Sequence[str], headers: Mapping[str, str]) -> int:
    """Call a tool on all `targets`, print the results, and return the exit status."""
    nodes = [name for target in targets for part in target.split(",") if (name := part.strip())]
    if not nodes:
        raise click.UsageError("--on names no node; it takes ids and tag:NAME, separated by commas.")
    try:
        answer = _run(client, {**body, "nodes": nodes, "results": wants_json()}, headers)
    except ConnectionLost as lost:
        raise ConnectionLost(f"{lost}; `farhand calls` shows what ran", lost.code) from None
    except KeyboardInterrupt:
        fate = "the calls go on: see `farhand calls`" if headers else "the gateway cancels the running calls"
        raise ClientError("interrupted", f"interrupted; {fate}") from None
    show(answer, _show)
    return 0 if answer["ok"] else 1


def _run(client: Client, body: dict[str, Any], headers: Mapping[str, str]) -> Any:
    """Return the results. Announce approvals and, on a terminal, each call that ends."""
    ended = 0
    quiet = wants_json() or not sys.stderr.isatty()
    with (
        ApprovalPrompt(client, ask=not wants_json()) as prompt,
        client.stream("/v1/tools/fanout", {**body, "stream": True}, headers=headers, seconds=SILENCE_SECONDS) as events,
    ):
        for _, answer in events:
            event = answer.value
            match event["type"]:
                case "planned":
                    offline = [row for row in event["answer"]["results"] if row["state"] == "offline"]
                    total = len(event["answer"]["results"]) - len(offline)
                    for row in [] if quiet else offline:
                        remark(f"{plain(row['node_id'])} is offline")
                case "waiting":
                    prompt.announce(event["approval"])
                case "ended" if not quiet:
                    ended += 1
                    row = event["row"]
                    remark(f"[{ended}/{total}] {plain(row['node_id'])}: {row['state']} {plain(row['output'])}".rstrip())
                case "done":
                    return event["answer"]
    raise ConnectionLost("the gateway closed the connection before all nodes answered")


def _show(answer: dict[str, Any]) -> None:
    rows = answer["results"]
    show_table(COLUMNS, rows)
    summary = [f"{sum(row['ok'] for row in rows)} of {len(rows)} succeeded"]
    if failed := sum(row["state"] in FAILURES for row in rows):
        summary.append(f"{failed} failed")
    if skipped := answer["counts"].get("skipped", 0):
        summary.append(f"{skipped} skipped")
    remark(f"{', '.join(summary)}; `farhand calls --group {answer['group_id']}` lists the calls")
