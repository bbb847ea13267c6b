"""`import`: take over files, skills, schedules and sessions from another program."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from farhand.cli.client import Client, ClientError
from farhand.cli.commands import command_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import plain, remark, show_json
from farhand.cli.setup.openclaw_folder import ARCHIVE, MAIN, OpenClawFolder, SourceFile, read_file, read_folder

CHANNELS_FILE = f"{ARCHIVE}/channels.toml"


@command_group
def import_() -> None:
    """Import from another program."""


@import_.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@click.option("--force", is_flag=True, help="Replace files and jobs that exist and differ.")
def openclaw(folder: Path, dry_run: bool, force: bool, client: Client) -> int:
    """Import workspace files, memory, skills, schedules and sessions of OpenClaw.

    DIR is its state folder, usually ~/.openclaw. Credentials are never imported; the command lists those it found.
    Files and jobs that exist here and differ are left alone, unless --force is given; running it again imports only
    what is new.

    \b
    Examples:
      farhand import openclaw ~/.openclaw --dry-run
      farhand import openclaw ~/.openclaw
    """
    found = read_folder(folder)
    report = _Report()
    for file in found.files:
        _import_file(client, file, report, dry_run=dry_run, force=force)
    _import_channels(client, found, report, dry_run=dry_run, force=force)
    _import_jobs(client, found, report, dry_run=dry_run, force=force)
    _show(report, found, dry_run)
    return 1 if report.conflicts or report.failed else 0


class _Report:
    def __init__(self) -> None:
        self.imported: list[tuple[str, str]] = []
        self.unchanged: list[str] = []
        self.conflicts: list[str] = []
        self.failed: list[str] = []


def _import_file(client: Client, file: SourceFile, report: _Report, *, dry_run: bool, force: bool) -> None:
    base = f"/v1/workspace/{quote(file.agent, safe='')}/" if file.agent is not None else "/v1/skills/"
    shown = f"{file.agent}: {file.path}" if file.agent is not None else f"skills/{file.path}"
    try:
        content = read_file(file.source)
        _put(client, base + quote(file.path), content, (file.kind, shown), report, dry_run=dry_run, force=force)
    except OSError as error:
        report.failed.append(f"{shown}: {error}")


def _put(
    client: Client, path: str, content: bytes, named: tuple[str, str], report: _Report, *, dry_run: bool, force: bool
) -> None:
    """Write a file of the workspace, unless it exists with other content. Raises NoGateway if there is no gateway."""
    try:
        # A skill for all agents is read through the workspace of one.
        stored = _stored(client, path.replace("/v1/skills/", f"/v1/workspace/{MAIN}/skills/", 1))
        if stored == content:
            report.unchanged.append(named[1])
            return
        if stored is not None and not force:
            report.conflicts.append(named[1])
            return
        if not dry_run:
            client.request("PUT", path, content, headers={"Content-Type": "application/octet-stream"})
        report.imported.append(named)
    except ClientError as error:
        if error.code in {"no_gateway", "connection_lost", "unauthorized"}:
            raise
        report.failed.append(f"{named[1]}: {error}")


def _stored(client: Client, path: str) -> bytes | None:
    try:
        with client.download(path) as pieces:
            return b"".join(pieces)
    except ClientError as error:
        if error.code != "not_found":
            raise
        return None


def _import_channels(client: Client, found: OpenClawFolder, report: _Report, *, dry_run: bool, force: bool) -> None:
    """Put the tables of the channels into a file, for the owner to complete: without credentials they are not valid."""
    if not found.channels:
        return
    import tomlkit  # noqa: PLC0415 - the command line starts without it

    document = tomlkit.document()
    document.add(tomlkit.comment("Channels of OpenClaw. Add the credentials, and copy the tables to farhand.toml."))
    document["channels"] = found.channels
    path = f"/v1/workspace/{MAIN}/{CHANNELS_FILE}"
    named = ("channels", f"{MAIN}: {CHANNELS_FILE}")
    _put(client, path, tomlkit.dumps(document).encode(), named, report, dry_run=dry_run, force=force)


def _import_jobs(client: Client, found: OpenClawFolder, report: _Report, *, dry_run: bool, force: bool) -> None:
    if not found.jobs:
        return
    known = {job["name"]: job for job in client.get("/v1/cron", includeDisabled=1, limit=500).value["jobs"]}
    for job in found.jobs:
        shown = f"job {job['name']}"
        before = known.get(job["name"])
        if before is not None and not force:
            (report.unchanged if _same(before, job) else report.conflicts).append(shown)
            continue
        try:
            if not dry_run:
                made = client.post("/v1/cron", job).value
                if before is not None:
                    client.delete("/v1/cron/{}", before["id"])
                known[job["name"]] = made.get("job", made)
            report.imported.append(("job", shown))
        except ClientError as error:
            report.failed.append(f"{shown}: {error}")


def _same(job: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a job does what the wanted one does; the gateway adds fields of its own."""
    spec = job.get("spec", {})
    return bool(job["enabled"] == wanted["enabled"]) and all(
        spec.get(key) == value for key, value in wanted["spec"].items() if key in {"mode", "text", "message"}
    )


def _show(report: _Report, found: OpenClawFolder, dry_run: bool) -> None:
    if wants_json():
        show_json(
            {
                "dry_run": dry_run,
                "imported": [{"kind": kind, "name": name} for kind, name in report.imported],
                "unchanged": report.unchanged,
                "conflicts": report.conflicts,
                "failed": report.failed,
                "secrets": found.secrets,
                "skipped": found.skipped,
            }
        )
        return
    for kind, name in report.imported:
        print(plain(f"{'would import' if dry_run else 'imported'} {kind}: {name}"))
    counts = collections.Counter(kind for kind, _ in report.imported)
    total = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing new"
    print(f"{'would import' if dry_run else 'imported'}: {total}; {len(report.unchanged)} unchanged")
    for title, lines in (
        ("exists here and differs; --force replaces it", report.conflicts),
        ("failed", report.failed),
        ("credential, not imported", found.secrets),
        ("left out", found.skipped),
    ):
        for line in lines:
            remark(plain(f"{title}: {line}"))
