"""`audit`: is the journal what was written?"""

from __future__ import annotations

import click
import msgspec

from farhand.cli.client import Client, client_command
from farhand.cli.json_output import group_json_option
from farhand.cli.output import moment, paint, plain, remark, show_answer, show_json, wrap
from farhand.store.history.verify import Report
from farhand.store.journal.seal import Head
from farhand.store.sqlite.audit import read_head
from farhand.store.sqlite.audit import verify as verify_journal
from farhand.store.sqlite.snapshots import STORE_FILE


@click.group()
@group_json_option
def audit() -> None:
    """Check that nobody changed what was written down; show the journal's head."""


@audit.command()
@click.option("--from", "start", type=click.IntRange(1, 2**62), metavar="ID", help="Begin with this event.")
@click.option("--head", "noted", metavar="ID:HASH", help="A head noted earlier: it must still be there.")
@client_command
def verify(start: int | None, noted: str | None, client: Client, as_json: bool) -> int:
    """Look for anything that was changed, removed or moved in the journal, the record of calls and the transcripts.

    Works on the home, which must be on this machine, while the gateway runs or not, and writes nothing. The status is 1
    when something is wrong. What cannot be seen from here: a change by somebody who can read the key in the home; a
    head noted elsewhere (`farhand audit head`) shows even that.

    \b
    Examples:
      farhand audit verify
      farhand audit verify --head 1204:8d1f… --json
    """
    try:
        head = None if noted is None else Head.parse(noted)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--head") from None
    report = verify_journal(client.home, client.home / STORE_FILE, start=start, noted=head)
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        _show(report)
    return 0 if report.ok else 1


@audit.command()
@client_command
def head(client: Client, as_json: bool) -> None:
    """Print the newest event's id and hash. Noted elsewhere, it shows later that everything up to it is still there.

    \b
    Examples:
      farhand audit head
      farhand audit head --url https://gateway.example >> ~/farhand-heads
    """
    store = client.home / STORE_FILE
    if client.named or not store.exists():
        answer = client.get("/v1/audit/head")
        if as_json:
            show_answer(answer)
            return
        text = str(answer.value["head"])
    else:
        found = read_head(store)
        text = str(found)
        if as_json:
            show_json({"id": found.id, "hash": found.hash.hex(), "head": text})
            return
    print(plain(text))


def _show(report: Report) -> None:
    for note in report.notes:
        where = f"event {note.id}, {moment(note.at)}: " if note.at is not None else ""
        remark(plain(f"{where}{note.message}"))
    for fault in report.faults[:10]:
        print(paint(wrap(plain(fault.message)), "red"))
    if len(report.faults) > 10:
        print(f"… and {len(report.faults) - 10} more")
    verdict = "nothing was changed" if report.ok else f"{len(report.faults)} wrong"
    print(plain(f"{report.checked} events and {report.calls} calls checked: {verdict}; head {report.head}"))
