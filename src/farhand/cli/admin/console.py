"""`console`: open the console in a browser; list and end its sessions."""

from __future__ import annotations

import webbrowser

import click

from farhand.cli.client import Client
from farhand.cli.commands import client_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, ago, hide, local_time, remark, show, show_json, show_list

COLUMNS = [
    Column("ID", "id"),
    Column("SIGNED IN", lambda entry: ago(entry["created_at"]), narrow=hide),
    Column("LAST USED", lambda entry: ago(entry["last_used_at"])),
    Column("ENDS", lambda entry: local_time(entry["expires_at"]), narrow=lambda text: text[5:-3]),
    Column("FROM", "address"),
    Column("BROWSER", "user_agent", flexible=True),
]


@client_group
@click.option("--print", "print_link", is_flag=True, help="Print the link instead of opening a browser.")
def console(print_link: bool, client: Client) -> None:
    """Open the console in a browser, signed in with a one-time link; list and end console sessions.

    \b
    Examples:
      farhand console
      farhand console --print
      farhand console sessions
      farhand console end console-1a2b3c4d
    """
    link = client.find().url.rstrip("/") + client.post("/v1/signin", {}).value["path"]
    if wants_json():
        show_json({"url": link})
    elif print_link or not webbrowser.open(link):
        print(link)
        remark("The link works once, within ten minutes.")
    else:
        print("opened the console in the browser")


@console.command()
def sessions(client: Client) -> None:
    """List the browsers that are signed in.

    \b
    Example:
      farhand console sessions
    """
    empty = "no browser is signed in; open one with `farhand console`"
    show_list(client.get("/v1/console/sessions"), "sessions", COLUMNS, empty)


@console.command()
@click.argument("session_id", metavar="ID", required=False)
@click.option("--all", "every", is_flag=True, help="End every console session.")
def end(session_id: str | None, every: bool, client: Client) -> None:
    """Sign a browser out, or every browser with --all.

    \b
    Examples:
      farhand console end console-1a2b3c4d
      farhand console end --all
    """
    if session_id is not None and not every:
        show(client.delete("/v1/console/sessions/{}", session_id), f"ended: {session_id}")
    elif every and session_id is None:
        answer = client.delete("/v1/console/sessions")
        show(answer, f"ended: {answer.value['ended']}")
    else:
        raise click.UsageError("give either the ID of a console session or --all.")
