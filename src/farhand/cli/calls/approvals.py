"""`approvals`, `approve` and `deny`: what waits for the owner's word, and the word."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from farhand.cli.client import Answer, Client, client_command
from farhand.cli.output import (
    Column,
    ago,
    json_text,
    moment,
    paint,
    plain,
    plain_lines,
    remark,
    show_answer,
    show_fields,
    show_table,
)

DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--all", "every", is_flag=True, help="Those that were answered, too, in a table.")
@client_command
def approvals(every: bool, client: Client, as_json: bool) -> None:
    """Show the calls that wait to be approved: exactly what would run, with diffs and commands in full.

    \b
    Examples:
      farhand approvals
      farhand approvals show K7PQ2M
      farhand approve K7PQ2M
      farhand deny K7PQ2M --reason "not on a Friday"
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get(f"/v1/approvals?state={'all' if every else 'pending'}")
    found = answer.value["approvals"]
    if as_json:
        show_answer(answer)
    elif not found:
        remark("no approvals" if every else "nothing waits to be approved")
    elif every:
        columns = [Column("ID"), Column("STATE"), Column("TOOL"), Column("RULE"), Column("BY"), Column("ASKED")]
        show_table(
            columns,
            [
                [one["id"], one["state"], one["tool"], one["rule"], one["decided_by"] or "", ago(one["asked_at"])]
                for one in found
            ],
        )
    else:
        for place, one in enumerate(found):
            if place:
                print()
            show_approval(one)


@approvals.command()
@click.argument("approval_id", metavar="ID")
@client_command
def show(approval_id: str, client: Client, as_json: bool) -> None:
    """Show one approval, by its id or that of its call."""
    answer = client.get(_path(approval_id))
    if as_json:
        show_answer(answer)
    else:
        show_approval(answer.value)


@click.command()
@click.argument("approval_id", metavar="ID")
@click.option("--hash", "shown_hash", metavar="HASH", help="Only if this is what it is about.")
@client_command
def approve(approval_id: str, shown_hash: str | None, client: Client, as_json: bool) -> None:
    """Let a call run that waits, exactly as `farhand approvals` shows it.

    What an approval shows never changes; should anything behind it have changed, the call is refused.

    \b
    Examples:
      farhand approve K7PQ2M
      farhand approve K7PQ2M --hash 3f2a…
    """
    known = client.get(_path(approval_id)).value
    body = {"decision": "approve", "hash": shown_hash or known["hash"]}
    answer = client.request("POST", _path(approval_id), body)
    _show_decision(answer, as_json)


@click.command()
@click.argument("approval_id", metavar="ID")
@click.option("--reason", default="", help="Told to whoever made the call.")
@client_command
def deny(approval_id: str, reason: str, client: Client, as_json: bool) -> None:
    """Do not let a call run that waits.

    \b
    Example:
      farhand deny K7PQ2M --reason "ask me tomorrow"
    """
    answer = client.request("POST", _path(approval_id), {"decision": "deny", "reason": reason})
    _show_decision(answer, as_json)


def _show_decision(answer: Answer, as_json: bool) -> None:
    if as_json:
        show_answer(answer)
        return
    one = answer.value
    print(f"{one['state']}: {plain(one['tool'])} ({one['id']})")
    remark(f"`farhand calls show {one['call_id']}` tells what becomes of it")


def asked_by(one: dict[str, Any]) -> str:
    behalf = one.get("on_behalf_of")
    return f"{one['credential']} on behalf of {behalf}" if behalf else str(one["credential"])


def show_approval(one: dict[str, Any]) -> None:
    show_fields(
        [
            ("approval", one["id"]),
            ("state", one["state"] + (f" by {one['decided_by']}" if one["decided_by"] else "")),
            ("tool", one["tool"]),
            ("node", one["node_id"] or ""),
            ("asked by", f"{asked_by(one)}, from {' < '.join(one['origins'])}"),
            ("session", one["session_key"] or ""),
            ("rule", one["rule"] + (f": {one['reason']}" if one["reason"] else "")),
            ("until", moment(one["deadline_at"])),
            ("folder", one["cwd"] or ""),
            ("does", plain(one["summary"])),
            ("call", one["call_id"]),
            ("hash", one["hash"]),
            ("note", one["note"]),
            ("remark", one["remark"] or ""),
        ]
    )
    if one["command"] is not None:
        _show_section("command", plain_lines(one["command"]))
    for name, text in (("environment", one["env"]), ("standard input", one["stdin"])):
        if text:
            _show_section(name, json_text(text) if isinstance(text, dict) else plain_lines(text))
    if one["diff"]:
        lines = (plain(line.removesuffix("\n")) for line in one["diff"].split("\n")[:-1])
        _show_section("diff", "\n".join(paint(line, DIFF_COLOURS.get(line[:1])) for line in lines))
    if one["command"] is None and not one["diff"]:
        _show_section("arguments", json_text(one["args"]))


def _show_section(title: str, text: str) -> None:
    print(f"\n{paint(title, bold=True)}\n{text}")


def _path(approval_id: str) -> str:
    return f"/v1/approvals/{quote(approval_id, safe='')}"
