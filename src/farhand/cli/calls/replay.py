"""`replay`: a run once more, from what was written down of it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import click
import msgspec

from farhand.cli.client import Client, client_command
from farhand.cli.output import paint, plain, plain_lines, show_json
from farhand.gateway.sessions import replay as replaying
from farhand.store.sqlite.audit import reading
from farhand.store.sqlite.snapshots import STORE_FILE


@click.command()
@click.argument("run_id", metavar="RUN")
@client_command
def replay(run_id: str, client: Client, as_json: bool) -> int:
    """Repeat a run of the agent with the code there is now, and show the first difference.

    The model's replies and the tools' results come from the record: no tool runs, no network is used, nothing is
    changed, and no gateway need be running. The prompt, the messages and the tools offered are put together anew, and
    each request is held against the one that was made. The status is 1 when something came out otherwise.

    \b
    Examples:
      farhand log --kind run
      farhand replay 7f0c3a52-0a51-4b7e-9c8b-0d6e4f6e1a11
    """
    store = client.home / STORE_FILE
    if client.named or not store.exists():
        told: Any = client.get(f"/v1/runs/{quote(run_id, safe='')}/replay").value
    else:
        with reading(store) as connection:
            record = replaying.recorded(connection, run_id)
        told = msgspec.to_builtins(asyncio.run(replaying.replay(record)))
    if as_json:
        show_json(told)
    else:
        _show(told)
    return 0 if told["identical"] else 1


def _show(told: dict[str, Any]) -> None:
    compared = f"{told['requests']} requests to the model and {told['calls']} calls"
    if told["identical"]:
        print(plain(f"identical: {compared} of run {told['run_id']} ({told['state']})"))
        return
    difference = told["difference"]
    print(plain(f"different at step {difference['step']}, in the {difference['what']} (after {compared})"))
    print(paint(plain_lines(f"expected  {difference['expected']}"), "green"))
    print(paint(plain_lines(f"got       {difference['got']}"), "red"))
