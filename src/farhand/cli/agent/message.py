"""`message`: send to somebody on a channel, and see what became of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.json_output import group_json_option
from farhand.cli.output import Column, ago, plain, plain_lines, remark, show_answer, show_fields, show_json, show_table

TOOL = "gsv__Message"


@click.group()
@group_json_option
def message() -> None:
    """Messages to people: send one, list them, see one, send one again.

    \b
    Examples:
      farhand message send "The build is done" --channel telegram --to 123456
      farhand message list --state waiting
    """


@message.command()
@click.argument("text")
@click.option("--channel", help="Which channel.  [default: where the agent was last written to]")
@click.option("--to", help="Whom: a number, a name, an id.  [default: who last wrote]")
@click.option("--kind", type=click.Choice(["dm", "group", "channel", "thread"]), help="What `--to` is.  [default: dm]")
@click.option("--account", help="Which account of the channel.")
@click.option("--reply-to", metavar="ID", help="The message this one answers.")
@click.option("--media", multiple=True, metavar="PATH", help="A file of the agent's workspace to send along.")
@click.option("--agent", default="main", show_default=True, help="Whose conversation and workspace.")
@click.option("--id", "message_id", metavar="ID", help="Sending again with the same id sends nothing new.")
@client_command
def send(
    text: str,
    channel: str | None,
    to: str | None,
    kind: str | None,
    account: str | None,
    reply_to: str | None,
    media: tuple[str, ...],
    agent: str,
    message_id: str | None,
    client: Client,
    as_json: bool,
) -> None:
    """Send TEXT. Exit status 0 once the gateway has it for good; it may still wait for the service.

    \b
    Examples:
      farhand message send "Dinner is ready" --channel signal --to +15551234567
      farhand message send "see attached" --media report.pdf
    """
    given = {
        "text": text,
        "channel": channel,
        "to": to,
        "peerKind": kind,
        "accountId": account,
        "replyToId": reply_to,
        "media": list(media),
    }
    if message_id is not None and not (message_id.isascii() and message_id.isprintable()):
        raise click.UsageError("--id takes printable ASCII characters.")
    args = {name: value for name, value in given.items() if value}
    headers = {"Idempotency-Key": message_id} if message_id else None
    answer = client.request(
        "POST", "/v1/tools/invoke", {"tool": TOOL, "args": {"text": "", **args}, "agent_id": agent}, headers=headers
    )
    outcome = answer.value
    if not outcome["ok"]:
        raise ClientError(outcome["error"]["kind"], outcome["error"]["message"])
    result = outcome["result"]
    if as_json:
        show_json(result)
        return
    where = f"{result['channel']}:{result['to']}"
    if result["sent"]:
        print(plain(f"sent to {where}"))
    else:
        print(plain(f"accepted for {where}; it waits for the service"))
        remark(f"follow it with: farhand message show {result['id']}")


@message.command("list")
@click.option("--channel")
@click.option("--to")
@click.option("--state", type=click.Choice(["waiting", "sending", "sent", "failed", "unknown"]))
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@client_command
def list_(channel: str | None, to: str | None, state: str | None, limit: int, client: Client, as_json: bool) -> None:
    """List messages, newest first."""
    asked = {"channel": channel, "to": to, "state": state, "limit": limit}
    answer = client.get(
        f"/v1/messages?{urlencode({name: value for name, value in asked.items() if value is not None})}"
    )
    if as_json:
        show_answer(answer)
        return
    if not answer.value["messages"]:
        remark("no such messages" if channel or to or state else "no messages yet: `farhand message send` sends one")
        return
    columns = [Column("ID"), Column("WHEN"), Column("TO"), Column("STATE"), Column("TEXT", flexible=True)]
    show_table(columns, [_row(one) for one in answer.value["messages"]])


def _row(one: dict[str, Any]) -> list[str]:
    text = " ".join(one["text"].split())
    return [one["id"], ago(one["created_at"]), f"{one['channel']}:{one['to']}", one["state"], one["error"] or text]


@message.command()
@click.argument("message_id", metavar="ID")
@client_command
def show(message_id: str, client: Client, as_json: bool) -> None:
    """Show one message, and why it waits."""
    answer = client.get(f"/v1/messages/{quote(message_id, safe='')}")
    if as_json:
        show_answer(answer)
        return
    one = answer.value
    show_fields(
        [
            ("id", one["id"]),
            ("to", f"{one['channel']}:{one['to']} ({one['peerKind']}, account {one['accountId']})"),
            ("state", one["state"]),
            ("parts", f"{one['parts_sent']} of {one['parts']} sent"),
            ("attempts", str(one["attempts"])),
            ("error", one["error"] or ""),
            ("origin", one["origin"]),
        ]
    )
    print(plain_lines(one["text"]))


@message.command()
@click.argument("message_id", metavar="ID")
@client_command
def retry(message_id: str, client: Client, as_json: bool) -> None:
    """Send a message again that failed, or of which nobody knows whether it arrived."""
    answer = client.request("POST", f"/v1/messages/{quote(message_id, safe='')}/retry")
    if as_json:
        show_answer(answer)
    else:
        print(plain(f"{message_id} is sent again"))
