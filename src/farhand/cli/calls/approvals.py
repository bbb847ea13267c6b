"""`approvals`, `approve` and `deny`: decide calls that wait for approval."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Answer, Client, url_path
from farhand.cli.commands import client_command, client_group
from farhand.cli.output import (
    Column,
    ago,
    json_text,
    local_time,
    paint,
    plain,
    plain_lines,
    remark,
    show,
    show_fields,
    show_section,
    show_table,
)

ID = click.argument("approval_id", metavar="ID")
DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
COLUMNS = [
    Column("ID", "id"),
    Column("STATE", "state"),
    Column("TOOL", "tool"),
    Column("RULE", "rule"),
    Column("BY", "decided_by"),
    Column("ASKED", lambda one: ago(one["asked_at"])),
]


@client_group
@click.option("--all", "every", is_flag=True, help="Include decided ones, as a table.")
def approvals(every: bool, client: Client) -> None:
    """Show the calls that wait for approval: exactly what would run, with full diffs and commands.

    \b
    Examples:
      farhand approvals
      farhand approvals show K7PQ2M
      farhand approve K7PQ2M
      farhand deny K7PQ2M --reason "not on a Friday"
    """

    def render(value: dict[str, Any]) -> None:
        if not value["approvals"]:
            remark("no approvals" if every else "no calls wait for approval")
        elif every:
            show_table(COLUMNS, value["approvals"])
        else:
            for place, one in enumerate(value["approvals"]):
                if place:
                    print()
                show_approval(one)

    show(client.get("/v1/approvals", state="all" if every else "pending"), render)


@approvals.command("show")
@ID
def show_one(approval_id: str, client: Client) -> None:
    """Show one approval, by its id or the id of its call."""
    show(client.get("/v1/approvals/{}", approval_id), show_approval)


@client_command
@ID
@click.option("--hash", "shown_hash", metavar="HASH", help="Approve only if the approval has this hash.")
@click.option("--always", is_flag=True, help="Do not ask again about calls that are exactly the same.")
def approve(approval_id: str, shown_hash: str | None, always: bool, client: Client) -> None:
    """Approve a waiting call, exactly as `farhand approvals` shows it.

    An approval never changes; if the files behind it changed since, the call is refused.

    With --always, a later call with the same tool, node and arguments, from the same caller, runs without an approval.
    `farhand policy` lists such approvals, and `farhand policy forget` removes one.

    \b
    Examples:
      farhand approve K7PQ2M
      farhand approve K7PQ2M --hash 3f2a…
      farhand approve K7PQ2M --always
    """
    known = client.get("/v1/approvals/{}", approval_id).value
    _show_decision(decide(client, approval_id, decision="approve", hash=shown_hash or known["hash"], always=always))


@client_command
@ID
@click.option("--reason", default="", help="Reason, shown to the caller.")
def deny(approval_id: str, reason: str, client: Client) -> None:
    """Deny a waiting call.

    \b
    Example:
      farhand deny K7PQ2M --reason "ask me tomorrow"
    """
    _show_decision(decide(client, approval_id, decision="deny", reason=reason))


def decide(client: Client, approval_id: str, **body: str | bool) -> Answer:
    return client.post(url_path("/v1/approvals/{}", approval_id), body)


def _show_decision(answer: Answer) -> None:
    def render(one: dict[str, Any]) -> None:
        print(f"{one['state']}: {plain(one['tool'])} ({one['id']})")
        remark(f"`farhand calls show {one['call_id']}` shows the call")

    show(answer, render)


def show_approval(one: dict[str, Any]) -> None:
    behalf = f" on behalf of {one['on_behalf_of']}" if one.get("on_behalf_of") else ""
    show_fields(
        {
            "approval": one["id"],
            "state": one["state"] + (f" by {one['decided_by']}" if one["decided_by"] else ""),
            "tool": one["tool"],
            "node": one["node_id"],
            "asked by": f"{one['credential']}{behalf}, from {' < '.join(one['origins'])}",
            "session": one["session_key"],
            "rule": one["rule"] + (f": {one['reason']}" if one["reason"] else ""),
            "until": local_time(one["deadline_at"]),
            "folder": one["cwd"],
            "does": one["summary"],
            "call": one["call_id"],
            "hash": one["hash"],
            "note": one["note"],
            "remark": one["remark"],
        }
    )
    if one["command"] is not None:
        show_section("command", plain_lines(one["command"]))
    for name, text in (("environment", one["env"]), ("standard input", one["stdin"])):
        if text:
            show_section(name, json_text(text) if isinstance(text, dict) else plain_lines(text))
    if one["output"]:
        show_section("output of the trial", plain_lines(one["output"]))
    if one["diff"]:
        lines = (plain(line.removesuffix("\n")) for line in one["diff"].split("\n")[:-1])
        show_section("diff", "\n".join(paint(line, DIFF_COLOURS.get(line[:1])) for line in lines))
    if one["command"] is None and not one["diff"]:
        show_section("arguments", json_text(one["args"]))
