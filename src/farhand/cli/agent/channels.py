"""`channels`: which there are, who may talk on them, and the hooks other programs post to."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import Column, ago, plain, remark, show_answer, show_table

CHANNEL = click.option("--channel", help="On which channel, when somebody wrote on several.")


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def channels(client: Client, as_json: bool) -> None:
    """List the channels; let people in; manage hooks.

    \b
    Examples:
      farhand channels
      farhand channels pair
      farhand channels pair approve K7PQ2MXW
      farhand channels hook add ci --deliver telegram:123456
    """
    if click.get_current_context().invoked_subcommand is None:
        _list(client, as_json)


@channels.command("list")
@client_command
def list_(client: Client, as_json: bool) -> None:
    """List the channels and how they are."""
    _list(client, as_json)


@channels.command()
@client_command
def status(client: Client, as_json: bool) -> None:
    """As `list`."""
    _list(client, as_json)


def _list(client: Client, as_json: bool) -> None:
    answer = client.get("/v1/channels")
    if as_json:
        show_answer(answer)
        return
    columns = [
        Column("NAME"),
        Column("CHANNEL"),
        Column("ACCOUNT"),
        Column("WHO MAY TALK"),
        Column("WAITING", right=True),
    ]
    rows = [
        [one["name"], one["channel"], one["accountId"], one["policy"], str(one["waiting"])]
        for one in answer.value["channels"]
    ]
    show_table(
        [*columns, Column("TROUBLE", flexible=True)],
        [[*row, one["trouble"] or ""] for row, one in zip(rows, answer.value["channels"], strict=True)],
    )
    if len(rows) == 1:
        remark("add a channel to farhand.toml: [channels.telegram], [channels.email], …")


# -- people ---------------------------------------------------------------------------------------------------


@channels.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def pair(client: Client, as_json: bool) -> None:
    """List who asked to be let in, and decide.

    \b
    Examples:
      farhand channels pair
      farhand channels pair approve K7PQ2MXW
      farhand channels pair approve +15551234567 --channel signal
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get("/v1/channels/pairings")
    if as_json:
        show_answer(answer)
    elif not answer.value["pairings"]:
        remark("nobody has asked yet")
    else:
        columns = [Column("CODE"), Column("STATE"), Column("CHANNEL"), Column("WHO"), Column("WHEN")]
        show_table(
            [*columns, Column("FIRST WORDS", flexible=True)], [_pairing(one) for one in answer.value["pairings"]]
        )


def _pairing(one: dict[str, Any]) -> list[str]:
    who = f"{one['sender']} ({one['name']})" if one["name"] else one["sender"]
    first = " ".join(one["first_text"].split())
    return [one["code"], one["state"], one["channel"], who, ago(one["requested_at"]), first]


@pair.command()
@click.argument("who", metavar="CODE_OR_ADDRESS")
@CHANNEL
@client_command
def approve(who: str, channel: str | None, client: Client, as_json: bool) -> None:
    """Let somebody talk to the agent."""
    _decide(client, "POST", f"{quote(who, safe='')}/approve", channel, as_json, "may talk now")


@pair.command()
@click.argument("who", metavar="CODE_OR_ADDRESS")
@CHANNEL
@client_command
def reject(who: str, channel: str | None, client: Client, as_json: bool) -> None:
    """Do not let somebody in; they are not asked about again."""
    _decide(client, "POST", f"{quote(who, safe='')}/reject", channel, as_json, "may not talk")


@pair.command()
@click.argument("who", metavar="CODE_OR_ADDRESS")
@CHANNEL
@client_command
def forget(who: str, channel: str | None, client: Client, as_json: bool) -> None:
    """Take a decision back: whoever it is has to ask again."""
    _decide(client, "DELETE", quote(who, safe=""), channel, as_json, "was forgotten")


def _decide(client: Client, method: str, path: str, channel: str | None, as_json: bool, told: str) -> None:
    query = f"?{urlencode({'channel': channel})}" if channel else ""
    answer = client.request(method, f"/v1/channels/pairings/{path}{query}")
    if as_json:
        show_answer(answer)
    else:
        value = answer.value
        print(plain(f"{value.get('sender') or value.get('removed')} {told} on {value['channel']}"))


# -- hooks ----------------------------------------------------------------------------------------------------


@channels.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def hook(client: Client, as_json: bool) -> None:
    """Addresses that other programs post to: list, add, remove.

    \b
    Examples:
      farhand channels hook
      farhand channels hook add ci --deliver telegram:123456
      farhand channels hook remove ci
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get("/v1/hooks")
    if as_json:
        show_answer(answer)
        return
    if not answer.value["hooks"]:
        remark("no hooks yet: `farhand channels hook add ID` makes one")
        return
    columns = [
        Column("PATH"),
        Column("SIGNED"),
        Column("AGENT"),
        Column("TOOLS"),
        Column("ANSWERS GO TO", flexible=True),
    ]
    show_table(
        columns,
        [
            [
                one["path"],
                "yes" if one["signed"] else "no",
                one["agent"],
                one["tools"],
                one["deliver"] or "the transcript",
            ]
            for one in answer.value["hooks"]
        ],
    )


@hook.command()
@click.argument("hook_id", metavar="ID")
@click.option("--secret", help="Posts are signed with it.  [default: one is made]")
@click.option("--unsigned", is_flag=True, help="Anybody who knows the address may post.")
@click.option("--agent", default="main", show_default=True)
@click.option("--session", default="", help="Which session its posts go to.  [default: one of its own]")
@click.option("--format", "shape", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--tools", type=click.Choice(["none", "read", "write", "all"]), help="What the agent may do.  [default: read]"
)
@click.option("--deliver", default="", metavar="CHANNEL:PEER", help="Where the answers go.")
@client_command
def add(
    hook_id: str,
    secret: str | None,
    unsigned: bool,
    agent: str,
    session: str,
    shape: str,
    tools: str | None,
    deliver: str,
    client: Client,
    as_json: bool,
) -> None:
    """Make a hook, or change one. Its secret is shown this once."""
    wanted = {
        "secret": "" if unsigned else secret,
        "agent": agent,
        "session": session,
        "format": shape,
        "tools": tools,
        "deliver": deliver,
    }
    answer = client.request("PUT", f"/v1/hooks/{quote(hook_id, safe='')}", wanted)
    if as_json:
        show_answer(answer)
        return
    print(plain(f"post to {answer.value['path']}"))
    if answer.value["secret"]:
        print(plain(f"secret: {answer.value['secret']}"))
        remark("sign the body: X-Webhook-Signature: sha256=<hex of HMAC-SHA256>")


@hook.command()
@click.argument("hook_id", metavar="ID")
@client_command
def remove(hook_id: str, client: Client, as_json: bool) -> None:
    """Remove a hook."""
    answer = client.request("DELETE", f"/v1/hooks/{quote(hook_id, safe='')}")
    if as_json:
        show_answer(answer)
    else:
        print(plain(f"removed {hook_id}"))
