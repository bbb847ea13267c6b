"""`message`: send messages on channels, and follow their delivery."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli import output
from farhand.cli.client import Client, url_path
from farhand.cli.commands import command_group
from farhand.cli.output import Column, show

COLUMNS = [
    Column("ID", "id"),
    Column("WHEN", lambda one: output.ago(one["created_at"]), narrow=output.hide),
    Column("TO", lambda one: f"{one['channel']}:{one['to']}"),
    Column("STATE", "state"),
    Column("TEXT", lambda one: one["error"] or output.one_line(one["text"]), flexible=True),
]


@command_group
def message() -> None:
    """Send messages to people; list, show and resend them.

    \b
    Examples:
      farhand message send "The build is done" --channel telegram --to 123456
      farhand message list --state waiting
    """


@message.command()
@click.argument("text")
@click.option("--channel", help="The channel.  [default: where the agent last received a message]")
@click.option("--to", help="The recipient: a number, a name, an id.  [default: the last sender]")
@click.option(
    "--kind", "peerKind", type=click.Choice(["dm", "group", "channel", "thread"]), help="Kind of --to.  [default: dm]"
)
@click.option("--account", "accountId", help="Account of the channel.")
@click.option("--reply-to", "replyToId", metavar="ID", help="The message to reply to.")
@click.option("--media", multiple=True, metavar="PATH", help="File of the agent's workspace to attach. Repeatable.")
@click.option("--agent", default="main", show_default=True, help="Agent whose session and workspace are used.")
@click.option("--id", "message_id", metavar="ID", help="Send only once, however often the id is repeated.")
def send(text: str, agent: str, message_id: str | None, client: Client, **options: Any) -> None:
    """Send TEXT. The exit status is 0 once the gateway has stored it; delivery may follow later.

    \b
    Examples:
      farhand message send "Dinner is ready" --channel signal --to +15551234567
      farhand message send "see attached" --media report.pdf
    """
    if message_id is not None and not (message_id.isascii() and message_id.isprintable()):
        raise click.UsageError(f"--id {message_id!r}: use printable ASCII characters.")
    args = {"text": text, **{name: value for name, value in options.items() if value}}
    headers = {"Idempotency-Key": message_id} if message_id else None
    result = client.invoke("gsv__Message", args, agent_id=agent, headers=headers)
    where = f"{result['channel']}:{result['to']}"
    if result["sent"]:
        show(result, f"sent to {where}")
    else:
        hint = f"follow it with: farhand message show {result['id']}"
        show(result, f"accepted for {where}; not delivered yet", hint)


@message.command("list")
@click.option("--channel")
@click.option("--to")
@click.option("--state", type=click.Choice(["waiting", "sending", "sent", "failed", "unknown"]))
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
def list_(limit: int, client: Client, **filters: str | None) -> None:
    """List messages, newest first."""
    empty = "no matching messages" if any(filters.values()) else "no messages yet; send one with `farhand message send`"
    output.show_list(client.get("/v1/messages", limit=limit, **filters), "messages", COLUMNS, empty)


@message.command("show")
@click.argument("message_id", metavar="ID")
def show_message(message_id: str, client: Client) -> None:
    """Show one message and the state of its delivery."""

    def render(one: dict[str, Any]) -> None:
        output.show_fields(
            {
                "id": one["id"],
                "to": f"{one['channel']}:{one['to']} ({one['peerKind']}, account {one['accountId']})",
                "state": one["state"],
                "parts": f"{one['parts_sent']} of {one['parts']} sent",
                "attempts": one["attempts"],
                "error": one["error"],
                "origin": one["origin"],
            }
        )
        print(output.plain_lines(one["text"]))

    show(client.get("/v1/messages/{}", message_id), render)


@message.command()
@click.argument("message_id", metavar="ID")
def retry(message_id: str, client: Client) -> None:
    """Send a message again that failed, or whose delivery is unknown."""
    show(client.post(url_path("/v1/messages/{}/retry", message_id)), f"{message_id} is sent again")
