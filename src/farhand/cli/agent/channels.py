"""`channels`: list channels, admit people, and manage the hooks that other programs post to."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, ago, one_line, plain, remark, show, show_list

CHANNEL = click.option("--channel", help="The channel, if the person wrote on several.")
PERSON = click.argument("who", metavar="CODE_OR_ADDRESS")
CHANNEL_COLUMNS = [
    Column("NAME", "name"),
    Column("CHANNEL", "channel"),
    Column("ACCOUNT", "accountId"),
    Column("WHO MAY TALK", "policy"),
    Column("WAITING", "waiting", right=True),
    Column("TROUBLE", "trouble", flexible=True),
]
PAIRING_COLUMNS = [
    Column("CODE", "code"),
    Column("STATE", "state"),
    Column("CHANNEL", "channel"),
    Column("WHO", lambda one: f"{one['sender']} ({one['name']})" if one["name"] else one["sender"]),
    Column("WHEN", lambda one: ago(one["requested_at"])),
    Column("FIRST WORDS", lambda one: one_line(one["first_text"]), flexible=True),
]
HOOK_COLUMNS = [
    Column("PATH", "path"),
    Column("SIGNED", lambda one: "yes" if one["signed"] else "no"),
    Column("AGENT", "agent"),
    Column("TOOLS", "tools"),
    Column("ANSWERS GO TO", lambda one: one["deliver"] or "the transcript", flexible=True),
]


@client_group
def channels(client: Client) -> None:
    """List channels; admit people; manage hooks.

    \b
    Examples:
      farhand channels
      farhand channels pair
      farhand channels pair approve K7PQ2MXW
      farhand channels hook add ci --deliver telegram:123456
    """
    answer = client.get("/v1/channels")
    show_list(answer, "channels", CHANNEL_COLUMNS, "no channels")
    if len(answer.value["channels"]) == 1 and not wants_json():
        remark("add a channel to farhand.toml: [channels.telegram], [channels.email], …")


channels.add_alias("list", "List the channels and their status.")
channels.add_alias("status", "The same as `list`.")


# -- people ---------------------------------------------------------------------------------------------------


@channels.client_group
def pair(client: Client) -> None:
    """List the people who asked to talk to the agent, and decide.

    \b
    Examples:
      farhand channels pair
      farhand channels pair approve K7PQ2MXW
      farhand channels pair approve +15551234567 --channel signal
    """
    show_list(client.get("/v1/channels/pairings"), "pairings", PAIRING_COLUMNS, "no requests yet")


@pair.command()
@PERSON
@CHANNEL
def approve(who: str, channel: str | None, client: Client) -> None:
    """Allow a person to talk to the agent."""
    _decide(client, "POST", url_path("{}/approve", who, channel=channel), "may talk now")


@pair.command()
@PERSON
@CHANNEL
def reject(who: str, channel: str | None, client: Client) -> None:
    """Refuse a person; later requests from the same person are ignored."""
    _decide(client, "POST", url_path("{}/reject", who, channel=channel), "may not talk")


@pair.command()
@PERSON
@CHANNEL
def forget(who: str, channel: str | None, client: Client) -> None:
    """Withdraw a decision: the person has to ask again."""
    _decide(client, "DELETE", url_path("{}", who, channel=channel), "was forgotten")


def _decide(client: Client, method: str, path: str, outcome: str) -> None:
    answer = client.request(method, f"/v1/channels/pairings/{path}")
    who = answer.value.get("sender") or answer.value.get("removed")
    show(answer, f"{who} {outcome} on {answer.value['channel']}")


# -- hooks ----------------------------------------------------------------------------------------------------


@channels.client_group
def hook(client: Client) -> None:
    """Manage the addresses that other programs post to.

    \b
    Examples:
      farhand channels hook
      farhand channels hook add ci --deliver telegram:123456
      farhand channels hook remove ci
    """
    empty = "no hooks yet; create one with `farhand channels hook add ID`"
    show_list(client.get("/v1/hooks"), "hooks", HOOK_COLUMNS, empty)


@hook.command()
@click.argument("hook_id", metavar="ID")
@click.option("--secret", help="Secret that signs the posts.  [default: a new one]")
@click.option("--unsigned", is_flag=True, help="Accept posts from everyone who knows the address.")
@click.option("--agent", default="main", show_default=True)
@click.option("--session", default="", help="Session that receives the posts.  [default: one per hook]")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--tools", type=click.Choice(["none", "read", "write", "all"]), help="What the agent may do.  [default: read]"
)
@click.option("--deliver", default="", metavar="CHANNEL:PEER", help="Where the answers go.")
def add(hook_id: str, unsigned: bool, client: Client, **settings: Any) -> None:
    """Create or change a hook. Its secret is shown only once."""
    if unsigned:
        settings["secret"] = ""

    def render(value: dict[str, Any]) -> None:
        print(plain(f"post to {value['path']}"))
        if value["secret"]:
            print(plain(f"secret: {value['secret']}"))
            remark("sign the body: X-Webhook-Signature: sha256=<hex of HMAC-SHA256>")

    show(client.request("PUT", url_path("/v1/hooks/{}", hook_id), settings), render)


@hook.command()
@click.argument("hook_id", metavar="ID")
def remove(hook_id: str, client: Client) -> None:
    """Remove a hook."""
    show(client.delete("/v1/hooks/{}", hook_id), f"removed {hook_id}")
