"""`undo`: take back what a call did to files."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.calls.calls import call_path
from farhand.cli.client import Client, client_command
from farhand.cli.output import plain_lines, remark, show_answer


@click.command()
@click.argument("call_id", metavar="CALL")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@client_command
def undo(call_id: str, dry_run: bool, client: Client, as_json: bool) -> int:
    """Give the files that a call changed their old content back, and remove those it made.

    Nothing is touched when one of them was changed since. CALL is the id of the call, or the end of it. What an undo
    did is undone by undoing the undo.

    \b
    Examples:
      farhand undo 0198c0de-7a11-7000-8000-0123456789ab
      farhand undo 0123456789ab --dry-run
    """
    answer = client.request("POST", f"{call_path(client, call_id)}/undo", {"dry_run": dry_run})
    told = answer.value
    if as_json:
        show_answer(answer)
    elif "error" in told:
        remark(f"{told['error']['kind']}: {plain_lines(told['error']['message'])}")
    else:
        for file in told["result"]["files"]:
            _show(file, dry_run)
        if not dry_run:
            remark(f"undone by call {told['request_id']}; to take that back: farhand undo {told['request_id']}")
    return 0 if told["ok"] else 1


def _show(file: dict[str, Any], dry_run: bool) -> None:
    size = "" if file["action"] == "removed" else f" ({file['bytes']} bytes)"
    print(plain_lines(f"{'would be ' if dry_run else ''}{file['action']}: {file['path']}{size}"))
    if file.get("diff"):
        print(plain_lines(file["diff"]).rstrip("\n"))
