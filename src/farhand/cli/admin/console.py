"""`console`: sign-in links for the browser, and the browsers that are signed in."""

from __future__ import annotations

import webbrowser
from urllib.parse import quote

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import Column, ago, moment, plain, remark, show_answer, show_json, show_table


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--print", "print_only", is_flag=True, help="Print the link instead of opening a browser.")
@client_command
def console(print_only: bool, client: Client, as_json: bool) -> None:
    """Open the console in a browser, signed in by a new one-time link; list and end console sessions.

    \b
    Examples:
      farhand console
      farhand console --print
      farhand console sessions
      farhand console end console-1a2b3c4d
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    path = client.request("POST", "/v1/signin", {}).value["path"]
    link = client.find().url.rstrip("/") + path
    if as_json:
        show_json({"url": link})
    elif print_only or not webbrowser.open(link):
        print(link)
        remark("The link works once, within ten minutes.")
    else:
        print("opened the console in the browser")


@console.command("sessions")
@client_command
def sessions(client: Client, as_json: bool) -> None:
    """List the browsers that are signed in.

    \b
    Example:
      farhand console sessions
    """
    answer = client.get("/v1/console/sessions")
    if as_json:
        show_answer(answer)
        return
    if not answer.value["sessions"]:
        remark("no browser is signed in; `farhand console` opens one")
        return
    columns = [Column("ID"), Column("SIGNED IN"), Column("LAST USED"), Column("ENDS"), Column("FROM")]
    rows = [
        [
            entry["id"],
            ago(entry["created_at"]),
            ago(entry["last_used_at"]),
            moment(entry["expires_at"]),
            entry["address"],
            entry["user_agent"],
        ]
        for entry in answer.value["sessions"]
    ]
    show_table([*columns, Column("BROWSER", flexible=True)], rows)


@console.command("end")
@click.argument("session_id", metavar="ID", required=False)
@click.option("--all", "every", is_flag=True, help="End every console session.")
@client_command
def end(session_id: str | None, every: bool, client: Client, as_json: bool) -> None:
    """Sign a browser out, or with --all every browser.

    \b
    Examples:
      farhand console end console-1a2b3c4d
      farhand console end --all
    """
    if every == (session_id is not None):
        raise click.UsageError("Give either the ID of a console session or --all.")
    path = "/v1/console/sessions" if session_id is None else f"/v1/console/sessions/{quote(session_id, safe='')}"
    answer = client.request("DELETE", path)
    if as_json:
        show_answer(answer)
    else:
        print(f"ended: {answer.value['ended'] if session_id is None else plain(session_id)}")
