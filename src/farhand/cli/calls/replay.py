"""`replay`: repeat a recorded agent run."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from farhand.cli.client import Client
from farhand.cli.commands import client_command
from farhand.cli.output import paint, plain, plain_lines, show
from farhand.cli.store_reader import reading
from farhand.config import load
from farhand.gateway.sessions import replay as replaying
from farhand.store.sqlite.snapshots import STORE_FILE


@client_command
@click.argument("run_id", metavar="RUN")
def replay(run_id: str, client: Client) -> int:
    """Repeat an agent run with the current code, and show the first difference.

    The model's replies and the tools' results come from the record: no tool runs, no network is used, nothing changes,
    and the gateway need not be running. The prompt, the messages and the offered tools are built again, and each
    request is compared with the recorded one. The exit status is 1 if there is a difference.

    \b
    Examples:
      farhand log --kind run
      farhand replay 7f0c3a52-0a51-4b7e-9c8b-0d6e4f6e1a11
    """
    settings = load(client.home)
    stored = settings.store.url or (client.home / STORE_FILE).exists()
    if client.url_given or not stored:
        report: Any = client.get("/v1/runs/{}/replay", run_id).value
    else:
        with reading(client.home, settings) as connection:
            record = replaying.recorded(connection, run_id)
        report = msgspec.to_builtins(asyncio.run(replaying.replay(record)))
    show(report, _show)
    return 0 if report["identical"] else 1


def _show(report: dict[str, Any]) -> None:
    compared = f"{report['requests']} requests to the model and {report['calls']} calls".replace(" 1 calls", " 1 call")
    if report["identical"]:
        print(plain(f"identical: {compared} of run {report['run_id']} ({report['state']})"))
        return
    difference = report["difference"]
    print(plain(f"different at step {difference['step']}, in the {difference['what']} (after {compared})"))
    print(paint(plain_lines(f"expected  {difference['expected']}"), "green"))
    print(paint(plain_lines(f"got       {difference['got']}"), "red"))
