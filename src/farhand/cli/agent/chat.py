"""`chat`: talk to the agent and watch its tool calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from farhand.cli.agent.chat_exchange import plain_exchange
from farhand.cli.client import Client, ClientError, NoGateway
from farhand.cli.commands import client_command, options_given
from farhand.cli.json_output import wants_json
from farhand.cli.output import remark, show_json


@client_command
@click.option("--message", "-m", metavar="TEXT", help="Send TEXT, print the answer and exit; - reads standard input.")
@click.option("--session", "key", default="main", metavar="KEY", show_default=True, help="The session.")
@click.option("--model", metavar="NAME", help="Use this model for this chat.")
@click.option(
    "--record", type=click.Path(dir_okay=False), help="Record the run to repeat it: FARHAND_MODEL=replay:FILE."
)
def chat(message: str | None, key: str, model: str | None, record: str | None, client: Client) -> int:
    """Talk to the agent.

    On a terminal: a chat with history, commands (/help lists them), formatted answers, and a card for each tool call
    with its live output. Ctrl-C stops the run and every process it started, a second one leaves the chat; on an empty
    line Ctrl-C and Ctrl-D leave. With -m, or without a terminal: one message, its answer as plain text on standard
    output, and the tool calls on standard error.

    The exit status of a single message is 0 only if it was answered.

    \b
    Examples:
      farhand chat
      farhand chat -m 'Which of my machines has the least free disk?'
      git diff | farhand chat -m - --session review
      farhand chat -m hello --record hello.jsonl
    """
    options = options_given(model=model)
    if record is not None:
        try:
            Path(record).write_bytes(b"")
        except OSError as error:
            raise click.UsageError(f"cannot write --record {record}: {error.strerror}") from None
    if message is None and not sys.stdin.isatty():
        message = "-"
    if message is None:
        if wants_json():
            raise click.UsageError("--json requires a single message: -m TEXT.")
        return _converse(client, key, options, record)
    text = sys.stdin.read() if message == "-" else message
    if not text.strip():
        raise click.UsageError("the message is blank.")
    outcome = plain_exchange(client, key, as_json=wants_json()).send(text, options, record)
    if wants_json():
        show_json(outcome)
    return 0 if outcome["state"] == "ok" else 1


def _converse(client: Client, key: str, options: dict[str, Any], record: str | None) -> int:
    # Loaded only here: these libraries take longer to load than a single message needs.
    from farhand.cli.agent.chat_terminal import TerminalChat, can_converse  # noqa: PLC0415

    if can_converse():
        return TerminalChat(client, key, options, record).run()
    exchange = plain_exchange(client, key, as_json=False)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line.strip().lower() in ("/exit", "/quit"):
            return 0
        if line.strip():
            try:
                exchange.send(line, options, record)
            except ClientError as error:
                if isinstance(error, NoGateway):
                    raise
                remark(f"farhand: {error}")
