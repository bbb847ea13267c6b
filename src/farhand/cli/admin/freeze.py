"""`freeze` and `thaw`: stop everything now, and end that."""

from __future__ import annotations

import asyncio
import getpass
import time
from pathlib import Path
from typing import Any

import click

from farhand.cli.client import TOKEN_FILE, Answer, Client, ClientError, ConnectionLost, NoGateway
from farhand.cli.commands import client_command
from farhand.cli.output import Column, ago, local_time, plain, remark, show, show_table
from farhand.machine.freeze_file import FREEZE_FILE, FreezeFile
from farhand.machine.jobs.jobs import Jobs
from farhand.protocol.freeze import FreezeOrder, clean_reason

TIMEOUT_SECONDS = 20.0
COLUMNS = [
    Column("NODE", "node_id"),
    Column("CONFIRMED", lambda node: "yes" if node["confirmed"] else "NO"),
    Column("ENDED", "ended_processes", right=True),
    Column("REMARK", lambda node: node.get("error"), flexible=True),
]


@client_command
@click.option("--reason", default="", help="Reason, shown with every refused request.")
@click.option("--status", is_flag=True, help="Only show whether everything is frozen.")
def freeze(reason: str, status: bool, client: Client) -> int:
    """Stop everything now: no new calls, no scheduled work; every process on every machine is ended.

    The freeze lasts until `farhand thaw`, across restarts, and on each machine by itself. If no gateway answers, its
    home on this machine is frozen: processes it left running here are ended, and it starts frozen.

    The exit status is 0 only if every connected machine has confirmed.

    \b
    Examples:
      farhand freeze --reason 'it emails everyone'
      farhand freeze --status
    """
    if status:
        show(client.get("/v1/freeze"), lambda state: _show(state) if state["frozen"] else print("not frozen"))
        return 0
    try:
        answer = client.post("/v1/freeze", {"reason": reason}, seconds=TIMEOUT_SECONDS)
    except (NoGateway, ConnectionLost) as error:
        return _freeze_home(_local_home(client, error), reason, error)
    show(answer, _show)
    return _status(answer)


@client_command
def thaw(client: Client) -> int:
    """End a freeze: calls and scheduled work continue on every machine.

    Processes that were ended stay ended. If no gateway runs, its home on this machine is thawed.

    The exit status is 0 only if every connected machine has confirmed.

    \b
    Example:
      farhand thaw
    """

    def render(state: dict[str, Any]) -> None:
        print("thawed: everything may run again")
        for node in state["nodes"]:
            if not node["confirmed"]:
                remark(f"{plain(node['node_id'])}: {plain(node.get('error', 'did not confirm'))}")

    try:
        answer = client.post("/v1/thaw", {}, seconds=TIMEOUT_SECONDS)
    except NoGateway as error:
        return _thaw_home(_local_home(client, error), error)
    show(answer, render)
    return _status(answer)


def _status(answer: Answer) -> int:
    return 0 if all(node["confirmed"] for node in answer.value["nodes"] if node["online"]) else 1


def _show(state: dict[str, Any]) -> None:
    why = f": {plain(state['reason'])}" if state["reason"] else ""
    print(f"frozen since {local_time(state['since'])} ({ago(state['since'])}) by {plain(state['by'])}{why}")
    own = state.get("gateway")
    if own is not None:
        print(
            f"gateway: {own['cancelled_calls']} calls and {own['cancelled_transfers']} transfers cancelled, "
            f"{own['stopped_runs']} runs stopped, {own['ended_processes']} processes ended"
        )
        if "error" in own:
            remark(f"gateway: {plain(own['error'])}")
    if state["nodes"]:
        show_table(COLUMNS, state["nodes"])
    remark("nothing runs until `farhand thaw`")


# -- without a gateway ------------------------------------------------------------------------------------


def _local_home(client: Client, error: ClientError) -> Path:
    """Return the home to freeze or thaw if its gateway does not answer; raise `error` if there is none."""
    if client.url_given or not (client.home / TOKEN_FILE).exists():
        raise error
    return client.home


def _freeze_home(home: Path, reason: str, error: ClientError) -> int:
    """Store the freeze for the gateway's next start, and end the processes it left running here."""
    stored = FreezeFile(home / FREEZE_FILE)
    order = stored.order or FreezeOrder(time.time_ns() // 1_000_000, _user(), clean_reason(reason))
    try:
        stored.freeze(order)
    except OSError as problem:
        reason = f"cannot write {home / FREEZE_FILE}: {problem}"
        raise ClientError("not_recorded", f"NOT frozen: {error}; and {reason}") from None
    ended = asyncio.run(_end_commands(home))
    state = {"frozen": True, "since": order.since, "by": order.by, "reason": order.reason, "nodes": []}
    show(
        {**state, "gateway": {"ended_processes": ended}, "pending": str(error)},
        f"frozen: the gateway on {home} will start frozen; {ended} processes were ended on this machine",
        f"other machines are not frozen, as no gateway answered: {plain(str(error))}",
    )
    return 0


def _thaw_home(home: Path, error: ClientError) -> int:
    stored = FreezeFile(home / FREEZE_FILE)
    frozen = stored.order
    try:
        stored.thaw(time.time_ns() // 1_000_000)
    except OSError as problem:
        raise ClientError("not_recorded", f"cannot write {home / FREEZE_FILE}: {problem}") from None
    show(
        {"frozen": False, "since": None, "by": None, "reason": None, "nodes": [], "pending": str(error)},
        f"{'thawed' if frozen else 'it was not frozen'}: the gateway on {home} will start as usual",
        "frozen machines thaw when they connect to it",
    )
    return 0


async def _end_commands(home: Path) -> int:
    ended = 0
    for folder in (home / "jobs", *(home / "nodes").glob("*/jobs")):
        if folder.is_dir():
            async with Jobs(folder, eager=False) as jobs:
                ended += len((await jobs.end_all()).ended)
    return ended


def _user() -> str:
    try:
        return f"{getpass.getuser()} at the command line"
    except (OSError, KeyError):
        return "the command line"
