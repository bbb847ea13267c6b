"""`audit`: check the journal for changes."""

from __future__ import annotations

import importlib

import click
import msgspec

from farhand import config
from farhand.cli.client import Client, ClientError
from farhand.cli.commands import command_group
from farhand.cli.output import local_time, paint, plain, remark, show, wrap
from farhand.store.history.verify import Report
from farhand.store.journal.seal import Head, load_key
from farhand.store.sqlite.audit import read_head
from farhand.store.sqlite.audit import verify as verify_journal
from farhand.store.sqlite.snapshots import STORE_FILE

MAX_FAULTS = 10


@command_group
def audit() -> None:
    """Check that the journal was not changed; show its head."""


@audit.command()
@click.option("--from", "start", type=click.IntRange(1, 2**62), metavar="ID", help="Start with this event.")
@click.option("--head", "noted", metavar="ID:HASH", help="A head noted earlier; it must still be in the journal.")
def verify(start: int | None, noted: str | None, client: Client) -> int:
    """Look for changed, removed or moved entries in the journal, the call records and the transcripts.

    Reads the home folder on this machine, or the database of [store] url with the key of this home, whether or not the
    gateway runs, and writes nothing. The exit status is 1 if something is wrong. A change by someone who can read the
    key in the home cannot be detected this way; a head noted elsewhere (`farhand audit head`) reveals even that.

    \b
    Examples:
      farhand audit verify
      farhand audit verify --head 1204:8d1f… --json
    """
    try:
        head = None if noted is None else Head.parse(noted)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--head") from None
    url = config.load(client.home).store.url
    if url:
        shared = importlib.import_module("farhand.store.postgres.audit")
        report: Report = shared.verify(url, load_key(client.home), start=start, noted=head)
    else:
        report = verify_journal(client.home, client.home / STORE_FILE, start=start, noted=head)
    if start is not None and report.ok and not report.checked:
        raise ClientError("not_found", f"there is no event {start} or later; the head is {report.head}")
    show(msgspec.to_builtins(report), lambda _: _show(report))
    return 0 if report.ok else 1


@audit.command()
def head(client: Client) -> None:
    """Print the id and hash of the newest event. Noted elsewhere, it proves later that nothing up to it is missing.

    \b
    Examples:
      farhand audit head
      farhand audit head --url https://gateway.example >> ~/farhand-heads
    """
    store = client.home / STORE_FILE
    if client.url_given or not store.exists() or config.load(client.home).store.url:
        show(client.get("/v1/audit/head"), lambda value: print(plain(str(value["head"]))))
        return
    found = read_head(store)
    show({"id": found.id, "hash": found.hash.hex(), "head": str(found)}, str(found))


def _show(report: Report) -> None:
    for note in report.notes:
        where = f"event {note.id}, {local_time(note.at)}: " if note.at is not None else ""
        remark(plain(f"{where}{note.message}"))
    for fault in report.faults[:MAX_FAULTS]:
        print(paint(wrap(plain(fault.message)), "red"))
    if len(report.faults) > MAX_FAULTS:
        print(f"… and {len(report.faults) - MAX_FAULTS} more")
    verdict = "nothing was changed" if report.ok else f"{len(report.faults)} wrong"
    print(plain(f"{report.checked} events and {report.calls} calls checked: {verdict}; head {report.head}"))
