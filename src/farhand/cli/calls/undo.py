"""`undo` and `trial`: restore the files that a call changed; keep or discard what a trial run changed."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.calls.calls import call_path
from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_command, command_group
from farhand.cli.output import plain_lines, remark, show, show_failure


@client_command
@click.argument("call_id", metavar="CALL", required=False)
@click.option("--run", "run_id", metavar="RUN", help="Undo everything that a run of an agent changed, newest first.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
def undo(call_id: str | None, run_id: str | None, dry_run: bool, client: Client) -> int:
    """Restore the files that a call changed, and remove those it created.

    If any of them changed since, nothing is touched. CALL is the id of the call, or the end of it. To reverse an undo,
    undo the undo. With --run, every call of the run is undone by itself, and those that cannot be are listed.

    \b
    Examples:
      farhand undo 0198c0de-7a11-7000-8000-0123456789ab
      farhand undo 0123456789ab --dry-run
      farhand undo --run 0198c0de-7a11-7000-8000-0123456789ab
    """

    if (call_id is None) == (run_id is None):
        raise click.UsageError("give either CALL or --run RUN")
    if run_id is not None:
        return _undo_run(client, run_id, dry_run)
    assert call_id is not None

    def render(ended: dict[str, Any]) -> None:
        if "error" in ended:
            show_failure(ended["error"])
            return
        _show_files(ended["result"]["files"], dry_run)
        if not dry_run:
            remark(f"undone by call {ended['request_id']}; to reverse it: farhand undo {ended['request_id']}")

    answer = client.post(f"{call_path(client, call_id)}/undo", {"dry_run": dry_run})
    show(answer, render)
    return 0 if answer.value["ok"] else 1


def _undo_run(client: Client, run_id: str, dry_run: bool) -> int:
    def render(ended: dict[str, Any]) -> None:
        for one in ended["calls"]:
            if one["undone"] and one.get("reason"):
                print(plain_lines(f"undone before: {one['tool']} ({one['call_id']}): {one['reason']}"))
            elif one["undone"]:
                _show_files(one["files"], dry_run, machine=one["node_id"] or "")
            else:
                print(plain_lines(f"not undone: {one['tool']} ({one['call_id']}): {one['reason']}"))
        word = "could be undone" if dry_run else "undone"
        count = f"{ended['undone']} call{'' if ended['undone'] == 1 else 's'}"
        remark(f"run {run_id}: {count} {word}, {ended['not_undone']} not")

    answer = client.post(url_path("/v1/runs/{}/undo", run_id), {"dry_run": dry_run})
    show(answer, render)
    return 0 if answer.value["not_undone"] == 0 else 1


def _show_files(files: list[dict[str, Any]], dry_run: bool, machine: str = "") -> None:
    for file in files:
        size = "" if file["action"] == "removed" else f" ({file['bytes']} bytes)"
        place = f"{machine}:{file['path']}" if machine else file["path"]
        print(plain_lines(f"{'would be ' if dry_run else ''}{file['action']}: {place}{size}"))
        if file.get("diff"):
            print(plain_lines(file["diff"]).rstrip("\n"))


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
    show(client.get(_trial_path(client, trial_id)), _show_trial)


@trial.command()
@click.argument("trial_id", metavar="ID")
def keep(trial_id: str, client: Client) -> None:
    """Apply what a trial changed: all of it, or nothing if a file has been changed since."""
    show(client.post(f"{_trial_path(client, trial_id)}/keep", {}), _show_trial)


@trial.command()
@click.argument("trial_id", metavar="ID")
def discard(trial_id: str, client: Client) -> None:
    """Drop what a trial changed."""
    show(client.post(f"{_trial_path(client, trial_id)}/discard", {}), _show_trial)


def _trial_path(client: Client, trial_id: str) -> str:
    return f"/v1/trials/{call_path(client, trial_id).rpartition('/')[2]}"


def _show_trial(found: dict[str, Any]) -> None:
    for change in found["changes"]:
        print(plain_lines(f"{change['kind']}: {change['path']}"))
        if change.get("diff"):
            print(plain_lines(change["diff"]).rstrip("\n"))
    count = len(found["changes"])
    kept_by = found.get("keptBy")
    undo_hint = f"; to undo it: farhand undo {kept_by}" if kept_by and found["state"] == "kept" else ""
    remark(f"trial {found['trialId']}: {found['state']}, {count} change{'' if count == 1 else 's'}{undo_hint}")
