"""`undo`: restore the files that a call changed."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.calls.calls import call_path
from farhand.cli.client import Client
from farhand.cli.commands import client_command
from farhand.cli.output import plain_lines, remark, show, show_failure


@client_command
@click.argument("call_id", metavar="CALL")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
def undo(call_id: str, dry_run: bool, client: Client) -> int:
    """Restore the files that a call changed, and remove those it created.

    If any of them changed since, nothing is touched. CALL is the id of the call, or the end of it. To reverse an undo,
    undo the undo.

    \b
    Examples:
      farhand undo 0198c0de-7a11-7000-8000-0123456789ab
      farhand undo 0123456789ab --dry-run
    """

    def render(ended: dict[str, Any]) -> None:
        if "error" in ended:
            show_failure(ended["error"])
            return
        for file in ended["result"]["files"]:
            size = "" if file["action"] == "removed" else f" ({file['bytes']} bytes)"
            print(plain_lines(f"{'would be ' if dry_run else ''}{file['action']}: {file['path']}{size}"))
            if file.get("diff"):
                print(plain_lines(file["diff"]).rstrip("\n"))
        if not dry_run:
            remark(f"undone by call {ended['request_id']}; to reverse it: farhand undo {ended['request_id']}")

    answer = client.post(f"{call_path(client, call_id)}/undo", {"dry_run": dry_run})
    show(answer, render)
    return 0 if answer.value["ok"] else 1
