"""`shell` and `terminals`: terminals on other machines, which keep running without viewers."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.calls.jobs import matching
from farhand.cli.client import Client
from farhand.cli.commands import client_command, complete_nodes
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, ago, id_column, remark, show_list
from farhand.cli.remote.attach import attach, open_terminal
from farhand.cli.remote.start import fail
from farhand.protocol.errors import FarhandError

LOGIN_SHELL = 'exec "$SHELL" -l'
COLUMNS = [
    Column("NODE", "node"),
    id_column("TERMINAL", "terminal_id"),
    Column("STATE", lambda one: "running" if one["running"] else f"ended: {one['signal'] or one['exit_code']}"),
    Column("VIEWERS", lambda one: str(one["viewers"])),
    Column("STARTED", lambda one: ago(one["started_at"])),
    Column("COMMAND", lambda one: "login shell" if one["command"] == LOGIN_SHELL else one["command"], flexible=True),
]


@client_command
@click.argument("node_id", metavar="NODE", required=False, shell_complete=complete_nodes)
@click.option("--attach", "terminal_id", metavar="ID", help="Attach to a terminal of `farhand terminals` instead.")
@click.option("--cwd", metavar="DIR", help="Folder of the shell, on the node.  [the node's workspace]")
@click.option("--detach", "-d", is_flag=True, help="Do not attach; print the id of the terminal.")
def shell(node_id: str | None, terminal_id: str | None, cwd: str | None, detach: bool, client: Client) -> int:
    """Open a login shell in a terminal on a node.

    Ctrl-] detaches: the terminal continues, even when this machine, the gateway or the node program is restarted.
    `farhand shell --attach ID` attaches again, from any machine. Any number of people can attach to one terminal.

    The exit status is that of the shell, 0 after detaching, and 125 if Farhand failed.

    \b
    Examples:
      farhand shell laptop
      farhand terminals
      farhand shell --attach 0198c
    """
    try:
        if terminal_id is not None:
            if node_id is not None:
                raise click.UsageError("--attach names the terminal; leave NODE out.")
            found = matching(client.get("/v1/terminals").value["terminals"], terminal_id, "terminal", "terminal_id")
            return attach(client, terminal_id if found is None else found["terminal_id"], again=True)
        if node_id is None:
            raise click.UsageError("name a node, or a terminal with --attach.")
        args: dict[str, Any] = {"command": LOGIN_SHELL, "timeout": 0}
        if cwd is not None:
            args["workdir"] = cwd
        return open_terminal(client, node_id, args, detach=detach)
    except FarhandError as error:
        fail(error)


@client_command
def terminals(client: Client) -> None:
    """List the terminals on the nodes, newest first; ended ones for 30 minutes.

    \b
    Examples:
      farhand terminals
      farhand terminals --json
    """
    answer = client.get("/v1/terminals")
    show_list(answer, "terminals", COLUMNS, "no terminals; `farhand shell NODE` opens one")
    if answer.value["unanswered"] and not wants_json():
        remark(f"farhand: no answer from {', '.join(answer.value['unanswered'])}")
