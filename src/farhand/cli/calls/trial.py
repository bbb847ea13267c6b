"""`trial`: show, keep or discard what a trial run changed."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.calls.calls import call_path
from farhand.cli.client import Client
from farhand.cli.commands import command_group
from farhand.cli.output import plain_lines, remark, show


@command_group
def trial() -> None:
    """Show, keep or discard what a trial run changed.

    \b
    Examples:
      farhand call laptop__Bash command='make fix' trial=true
      farhand trial show 0123456789ab
      farhand trial keep 0123456789ab
    """


@trial.command("show")
@click.argument("trial_id", metavar="ID")
def show_trial(trial_id: str, client: Client) -> None:
    """Show what a trial would change, with diffs."""
    show(client.get(_path(client, trial_id)), _render)


@trial.command()
@click.argument("trial_id", metavar="ID")
def keep(trial_id: str, client: Client) -> None:
    """Apply what a trial changed: all of it, or nothing if a file has been changed since."""
    show(client.post(f"{_path(client, trial_id)}/keep", {}), _render)


@trial.command()
@click.argument("trial_id", metavar="ID")
def discard(trial_id: str, client: Client) -> None:
    """Drop what a trial changed."""
    show(client.post(f"{_path(client, trial_id)}/discard", {}), _render)


def _path(client: Client, trial_id: str) -> str:
    return f"/v1/trials/{call_path(client, trial_id).rpartition('/')[2]}"


def _render(found: dict[str, Any]) -> None:
    for change in found["changes"]:
        print(plain_lines(f"{change['kind']}: {change['path']}"))
        if change.get("diff"):
            print(plain_lines(change["diff"]).rstrip("\n"))
    count = len(found["changes"])
    remark(f"trial {found['trialId']}: {found['state']}, {count} change{'' if count == 1 else 's'}")
