"""`freeze` and `thaw`: stop everything now, and lift it."""

from __future__ import annotations

import asyncio
import getpass
import time
from pathlib import Path
from typing import Any

import click

from farhand.cli.client import Client, ClientError, ConnectionLost, NoGateway, client_command
from farhand.cli.output import Column, ago, moment, plain, remark, show_answer, show_json, show_table
from farhand.machine.freeze_file import FREEZE_FILE, FreezeFile
from farhand.machine.jobs.jobs import Jobs
from farhand.protocol.freeze import FreezeOrder, clean_reason

PATIENCE_SECONDS = 20.0


@click.command()
@click.option("--reason", default="", help="Why; it is shown to everybody who is refused.")
@click.option("--status", is_flag=True, help="Only tell whether everything is frozen.")
@client_command
def freeze(reason: str, status: bool, client: Client, as_json: bool) -> int:
    """Stop everything now: no new calls, no scheduled work, every process tree on every machine is ended.

    It holds until `farhand thaw`, through restarts and on each machine by itself. Where no gateway answers, its home
    here is frozen: what it left running on this machine is ended, and it starts frozen.

    The status is 0 only when every connected machine has confirmed.

    \b
    Examples:
      farhand freeze --reason 'it mails everybody'
      farhand freeze --status
    """
    if status:
        return _status(client, as_json)
    try:
        answer = client.request("POST", "/v1/freeze", {"reason": reason}, seconds=PATIENCE_SECONDS)
    except (NoGateway, ConnectionLost) as error:
        if client.named or not _is_home(client.home):
            raise
        return _freeze_home(client.home, reason, error, as_json)
    if as_json:
        show_answer(answer)
    else:
        _show(answer.value)
    return 0 if all(node["confirmed"] for node in answer.value["nodes"] if node["online"]) else 1


@click.command()
@client_command
def thaw(client: Client, as_json: bool) -> int:
    """Lift a freeze: calls and scheduled work go on, on every machine.

    What was ended stays ended. Where no gateway runs, its home here is thawed.

    \b
    Example:
      farhand thaw
    """
    try:
        answer = client.request("POST", "/v1/thaw", {}, seconds=PATIENCE_SECONDS)
    except NoGateway as error:
        if client.named or not _is_home(client.home):
            raise
        return _thaw_home(client.home, error, as_json)
    if as_json:
        show_answer(answer)
        return 0
    print("thawed: everything may run again")
    for node in answer.value["nodes"]:
        if not node["confirmed"]:
            remark(f"{plain(node['node_id'])}: {plain(node.get('error', 'did not confirm'))}")
    return 0 if all(node["confirmed"] for node in answer.value["nodes"] if node["online"]) else 1


def _status(client: Client, as_json: bool) -> int:
    answer = client.get("/v1/freeze")
    if as_json:
        show_answer(answer)
    elif answer.value["frozen"]:
        _show(answer.value)
    else:
        print("not frozen")
    return 0


def _show(state: dict[str, Any]) -> None:
    why = f": {plain(state['reason'])}" if state["reason"] else ""
    print(f"frozen since {moment(state['since'])} ({ago(state['since'])}) by {plain(state['by'])}{why}")
    own = state.get("gateway")
    if own is not None:
        print(
            f"here: {own['cancelled_calls']} calls and {own['cancelled_transfers']} transfers cancelled, "
            f"{own['stopped_runs']} runs stopped, {own['ended_processes']} processes ended"
        )
        if "error" in own:
            remark(f"here: {plain(own['error'])}")
    if state["nodes"]:
        columns = [Column("NODE"), Column("CONFIRMED"), Column("ENDED", right=True), Column("REMARK", flexible=True)]
        rows = [
            [
                node["node_id"],
                "yes" if node["confirmed"] else "NO",
                str(node["ended_processes"]),
                node.get("error", ""),
            ]
            for node in state["nodes"]
        ]
        show_table(columns, rows)
    remark("nothing runs until `farhand thaw`")


# -- without a gateway ------------------------------------------------------------------------------------


def _is_home(home: Path) -> bool:
    return (home / "token").exists()


def _freeze_home(home: Path, reason: str, error: ClientError, as_json: bool) -> int:
    """Write the order where the gateway finds it at its start, and end what it left running here."""
    freeze_state = FreezeFile(home / FREEZE_FILE)
    order = freeze_state.order or FreezeOrder(time.time_ns() // 1_000_000, _who(), clean_reason(reason))
    try:
        freeze_state.freeze(order)
    except OSError as problem:
        reason = f"{home / FREEZE_FILE} cannot be written: {problem}"
        raise ClientError("not_recorded", f"NOT frozen: {error}; and {reason}") from None
    ended = asyncio.run(_end_commands(home))
    if as_json:
        state = {"frozen": True, "since": order.since, "by": order.by, "reason": order.reason, "nodes": []}
        show_json({**state, "gateway": {"ended_processes": ended}, "pending": str(error)})
    else:
        print(f"frozen: the gateway on {home} will start frozen; {ended} processes were ended on this machine")
        remark(f"no gateway was there to tell other machines: {plain(str(error))}")
    return 0


def _thaw_home(home: Path, error: ClientError, as_json: bool) -> int:
    freeze_state = FreezeFile(home / FREEZE_FILE)
    was = freeze_state.order
    try:
        freeze_state.thaw(time.time_ns() // 1_000_000)
    except OSError as problem:
        raise ClientError("not_recorded", f"{home / FREEZE_FILE} cannot be written: {problem}") from None
    if as_json:
        show_json({"frozen": False, "since": None, "by": None, "reason": None, "nodes": [], "pending": str(error)})
    else:
        print(f"{'thawed' if was else 'it was not frozen'}: the gateway on {home} will start as usual")
        remark("machines that are frozen are told when they connect to it")
    return 0


async def _end_commands(home: Path) -> int:
    ended = 0
    for folder in (home / "jobs", *(home / "nodes").glob("*/jobs")):
        if folder.is_dir():
            async with Jobs(folder, eager=False) as jobs:
                ended += len((await jobs.end_all()).ended)
    return ended


def _who() -> str:
    try:
        return f"{getpass.getuser()} at the command line"
    except (OSError, KeyError):
        return "the command line"
