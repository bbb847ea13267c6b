"""`chat`: talk to the agent, and see what it does meanwhile."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import quote

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ClientError, ConnectionLost, NoGateway, client_command
from farhand.cli.output import on_terminal, paint, plain, remark, show_json

# A run says at least every 15 s that it goes on; three of these missed, and the line is dead.
SILENCE_SECONDS: Final = 45.0
SHOWN_ARGUMENTS: Final = 100
RETRY_SECONDS: Final = 0.3


@click.command()
@click.option("--message", "-m", metavar="TEXT", help="Say this, print the answer and leave; - reads standard input.")
@click.option("--session", "key", default="main", metavar="KEY", show_default=True, help="The conversation.")
@click.option("--model", metavar="NAME", help="Answer with this model, this once.")
@click.option(
    "--record", type=click.Path(dir_okay=False), help="Write down how to repeat it: FARHAND_MODEL=replay:FILE."
)
@client_command
def chat(
    message: str | None,
    key: str,
    model: str | None,
    record: str | None,
    client: Client,
    as_json: bool,
) -> int:
    """Talk to the agent.

    With -m one message is sent and its answer printed; otherwise you type, line by line. What the agent does with its
    tools is shown meanwhile, on standard error. Ctrl-C stops the run and every process it started; at an empty line,
    as Ctrl-D does, it ends the chat. /new, /stop, /status, /compact, /model and /help are commands to the session.

    The status of a single message is 0 only when it was answered.

    \b
    Examples:
      farhand chat
      farhand chat -m 'Which of my machines has the least free disk?'
      git diff | farhand chat -m - --session review
      farhand chat -m hello --record hello.jsonl
    """
    options: dict[str, Any] = {} if model is None else {"model": model}
    if record is not None:
        try:
            Path(record).write_bytes(b"")
        except OSError as error:
            raise click.UsageError(f"--record {record}: {error.strerror}") from None
    if message is None and not sys.stdin.isatty():
        message = "-"
    if message is None:
        if as_json:
            raise click.UsageError("--json needs one message: -m TEXT.")
        return _converse(client, key, options, record)
    text = sys.stdin.read() if message == "-" else message
    if not text.strip():
        raise click.UsageError("the message is blank.")
    outcome = _Exchange(client, key, as_json=as_json).say(text, options, record)
    if as_json:
        show_json(outcome)
    return 0 if outcome["state"] == "ok" else 1


def _converse(client: Client, key: str, options: dict[str, Any], record: str | None) -> int:
    found = client.get(f"/v1/sessions/{quote(key, safe='')}").value if key == "main" else None
    if found is not None and found["message_count"]:
        remark(f"{found['message_count']} messages so far; /new begins anew, /help lists commands")
    exchange = _Exchange(client, key, as_json=False)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if line.strip():
            try:
                exchange.say(line, options, record)
            except ClientError as error:
                if isinstance(error, NoGateway):
                    raise
                remark(f"farhand: {error}")


class _Exchange:
    """Says things in one session and shows what comes of them."""

    def __init__(self, client: Client, key: str, *, as_json: bool) -> None:
        self._client = client
        self._as_json = as_json
        self._prompt = ApprovalPrompt(client, ask=False)
        self._path = f"/v1/sessions/{quote(key, safe='')}"
        self._answer_to: TextIO | None = None if as_json else sys.stdout
        self._line_open = False
        # The answer of the present step is on the screen.
        self._said = False
        self._live = True

    def say(self, text: str, options: dict[str, Any], record: str | None) -> dict[str, Any]:
        """How the run ended, everything shown. Ctrl-C stops it; a second one leaves at once. Raises ClientError."""
        body = {"message": text, **options}
        if record is not None:
            body["record"] = True
        outcome: dict[str, Any] = self._client.request("POST", f"{self._path}/messages", body).value
        self._said, self._live = False, True
        try:
            if outcome["state"] == "running":
                with ApprovalPrompt(self._client, ask=not self._as_json) as self._prompt:
                    outcome = self._follow(outcome["run_id"], record)
        except KeyboardInterrupt:
            self._close_line()
            remark("stopping …")
            self._client.request("POST", f"{self._path}/stop", {})
            outcome = self._client.get(f"/v1/runs/{outcome['run_id']}").value
        if outcome.get("reply") and not self._said:
            self._write(outcome["reply"])
        self._close_line()
        error = outcome.get("error")
        if error is not None and "reply" not in outcome and self._answer_to is not None:
            remark(f"farhand: {plain(error['message'])}")
        return outcome

    def _follow(self, run_id: str, record: str | None) -> dict[str, Any]:
        """Show a run until it has ended. A gateway that is restarted takes the run up again, and so do we."""
        seen = False
        while True:
            try:
                with self._client.stream(f"/v1/runs/{run_id}/events", SILENCE_SECONDS) as events:
                    for event in events:
                        if "type" not in event:
                            return dict(event)
                        self._show(event, record)
                        seen = True
            except (NoGateway, ConnectionLost) as error:
                if not seen and self._live:
                    raise
                self._close_line()
                remark(f"farhand: {error}; waiting for it")
            # What comes now begins anew; all that is left to show of it is the answer.
            self._live, self._said, record = False, False, None
            time.sleep(RETRY_SECONDS)

    def _show(self, event: dict[str, Any], record: str | None) -> None:
        if not self._live:
            return
        match event["type"]:
            case "step_started":
                self._said = False
            case "text_delta":
                self._said = True
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
                    remark(paint(f"  {plain(event['use']['name'])}: {_first(event['outcome']['content'])}", dim=True))
            case "retrying":
                self._close_line()
                self._said = self._said and not event["void"]
                remark(f"farhand: {plain(event['reason'])}; asking {plain(event['model'])} again")
            case "compacted":
                remark("farhand: the conversation was long; a summary stands for its older part now")
            case "recorded" if record is not None:
                with Path(record).open("a") as file:
                    file.write(event["line"])

    def _write(self, text: str) -> None:
        if self._answer_to is not None:
            self._answer_to.write(_harmless(text) if on_terminal() else text)
            self._answer_to.flush()
            self._line_open = not text.endswith("\n")

    def _close_line(self) -> None:
        if self._line_open and self._answer_to is not None:
            self._answer_to.write("\n")
            self._answer_to.flush()
            self._line_open = False


def _harmless(text: str) -> str:
    """Words as they are, without what a terminal would obey."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _arguments(text: str) -> str:
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    shown = (
        " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
        if isinstance(values, dict)
        else str(values)
    )
    shown = plain(shown)
    return shown if len(shown) <= SHOWN_ARGUMENTS else shown[: SHOWN_ARGUMENTS - 1] + "…"


def _first(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    line = plain(text.strip().partition("\n")[0])
    return line if len(line) <= 2 * SHOWN_ARGUMENTS else line[: 2 * SHOWN_ARGUMENTS - 1] + "…"
