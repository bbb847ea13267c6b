"""`chat`: talk to the agent and watch its tool calls."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, TextIO

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ClientError, ConnectionLost, NoGateway, url_path
from farhand.cli.commands import client_command, options_given
from farhand.cli.json_output import wants_json
from farhand.cli.output import json_value, on_terminal, one_line, paint, plain, printable, remark, show_json

# A running agent sends a heartbeat every 15 s; after three missed ones the connection is dead.
SILENCE_SECONDS: Final = 45.0
MAX_ARGUMENT_CHARACTERS: Final = 100
RETRY_SECONDS: Final = 0.3


@client_command
@click.option("--message", "-m", metavar="TEXT", help="Send TEXT, print the answer and exit; - reads standard input.")
@click.option("--session", "key", default="main", metavar="KEY", show_default=True, help="The session.")
@click.option("--model", metavar="NAME", help="Use this model for this chat.")
@click.option(
    "--record", type=click.Path(dir_okay=False), help="Record the run to repeat it: FARHAND_MODEL=replay:FILE."
)
def chat(message: str | None, key: str, model: str | None, record: str | None, client: Client) -> int:
    """Talk to the agent.

    With -m, send one message and print its answer; otherwise type line by line. The agent's tool calls are shown on
    standard error. Ctrl-C stops the run and every process it started; on an empty line Ctrl-C and Ctrl-D end the chat.
    /new, /stop, /status, /compact, /model and /help are commands to the session.

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
    outcome = _Exchange(client, key).send(text, options, record)
    if wants_json():
        show_json(outcome)
    return 0 if outcome["state"] == "ok" else 1


def _converse(client: Client, key: str, options: dict[str, Any], record: str | None) -> int:
    found = client.get("/v1/sessions/{}", key).value if key == "main" else None
    if found is not None and found["message_count"]:
        remark(f"{found['message_count']} messages so far; /new starts a new conversation, /help lists commands")
    exchange = _Exchange(client, key)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line.strip():
            try:
                exchange.send(line, options, record)
            except ClientError as error:
                if isinstance(error, NoGateway):
                    raise
                remark(f"farhand: {error}")


class _Exchange:
    """Sends messages to one session and shows the runs."""

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._as_json = wants_json()
        self._prompt = ApprovalPrompt(client, ask=False)
        self._path = url_path("/v1/sessions/{}", key)
        self._output: TextIO | None = None if self._as_json else sys.stdout
        self._line_open = False
        # Whether the answer of the current step is already printed.
        self._printed = False
        # Whether events are shown as they arrive; after a reconnect only the answer is.
        self._live = True

    def send(self, text: str, options: dict[str, Any], record: str | None) -> dict[str, Any]:
        """Send a message, show its run and return the outcome. Raises ClientError.

        Ctrl-C stops the run; a second one exits at once.
        """
        body = {"message": text, **options, **({} if record is None else {"record": True})}
        outcome: dict[str, Any] = self._client.post(f"{self._path}/messages", body).value
        self._printed, self._live = False, True
        try:
            if outcome["state"] == "running":
                with ApprovalPrompt(self._client, ask=not self._as_json) as self._prompt:
                    outcome = self._follow(outcome["run_id"], record)
        except KeyboardInterrupt:
            self._close_line()
            remark("stopping …")
            self._client.post(f"{self._path}/stop", {})
            outcome = self._client.get("/v1/runs/{}", outcome["run_id"]).value
        if outcome.get("reply") and not self._printed:
            self._write(outcome["reply"])
        self._close_line()
        error = outcome.get("error")
        if error is not None and "reply" not in outcome and self._output is not None:
            remark(f"farhand: {plain(error['message'])}")
        return outcome

    def _follow(self, run_id: str, record: str | None) -> dict[str, Any]:
        """Show a run until it ends. A restarted gateway resumes the run, and so does this."""
        seen = False
        while True:
            try:
                with self._client.stream(f"/v1/runs/{run_id}/events", seconds=SILENCE_SECONDS) as events:
                    for _, answer in events:
                        if "type" not in answer.value:
                            return dict(answer.value)
                        self._show(answer.value, record)
                        seen = True
            except (NoGateway, ConnectionLost) as error:
                if not seen and self._live:
                    raise
                self._close_line()
                remark(f"farhand: {error}; waiting for the gateway")
            # The stream starts again from the beginning; only the answer is still to be shown.
            self._live, self._printed, record = False, False, None
            time.sleep(RETRY_SECONDS)

    def _show(self, event: dict[str, Any], record: str | None) -> None:
        if not self._live:
            return
        match event["type"]:
            case "step_started":
                self._printed = False
            case "text_delta":
                self._printed = True
                self._write(event["text"])
            case "tool_called":
                self._close_line()
                use = event["use"]
                remark(paint(f"· {plain(use['name'])} {_arguments(use['arguments'])}", dim=True))
            case "approval_requested":
                self._close_line()
                self._prompt.announce(event)
            case "tool_ended":
                if event["outcome"].get("is_error"):
                    self._close_line()
                    first = json_value(event["outcome"]["content"]).strip().partition("\n")[0]
                    shown = one_line(first, 2 * MAX_ARGUMENT_CHARACTERS)
                    remark(paint(f"  {plain(event['use']['name'])}: {shown}", dim=True))
            case "retrying":
                self._close_line()
                self._printed = self._printed and not event["void"]
                remark(f"farhand: {plain(event['reason'])}; asking {plain(event['model'])} again")
            case "compacted":
                remark("farhand: the conversation was long; its older part is now a summary")
            case "recorded" if record is not None:
                with Path(record).open("a") as file:
                    file.write(event["line"])

    def _write(self, text: str) -> None:
        if self._output is not None:
            self._output.write(printable(text) if on_terminal() else text)
            self._output.flush()
            self._line_open = not text.endswith("\n")

    def _close_line(self) -> None:
        if self._line_open:
            self._write("\n")


def _arguments(text: str) -> str:
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    if isinstance(values, dict):
        values = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return one_line(str(values), MAX_ARGUMENT_CHARACTERS)
