"""Send messages to a session and follow the runs; a view shows them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ConnectionLost, NoGateway, url_path
from farhand.cli.output import json_value, on_terminal, one_line, paint, plain, printable, remark

# A running agent sends a heartbeat every 15 s; after three missed ones the connection is dead.
SILENCE_SECONDS: Final = 45.0
MAX_ARGUMENT_CHARACTERS: Final = 100
RETRY_SECONDS: Final = 0.3


class View(Protocol):
    """Shows one run after the other."""

    def began(self, session_key: str) -> None:
        """A run has begun."""
        ...

    def text(self, text: str) -> None:
        """The next piece of the answer."""
        ...

    def verbatim(self, text: str) -> None:
        """The answer to a command, which is not formatted."""
        ...

    def tool_called(self, use: dict[str, Any]) -> None: ...

    def tool_ended(self, use: dict[str, Any], outcome: dict[str, Any], seconds: float) -> None: ...

    def pause(self) -> None:
        """Something else writes to the terminal until the next call of another method."""
        ...

    def note(self, text: str) -> None:
        """A line about the run."""
        ...

    def ended(self) -> None:
        """The run has ended, or is no longer followed."""
        ...


class PlainView:
    """Plain text: the answer on standard output, tool calls on standard error."""

    def __init__(self, output: TextIO | None) -> None:
        """`output`: where answers go; None to show nothing."""
        self._output = output
        self._line_open = False

    def began(self, session_key: str) -> None:
        pass

    def text(self, text: str) -> None:
        if self._output is not None:
            self._output.write(printable(text) if on_terminal() else text)
            self._output.flush()
            self._line_open = not text.endswith("\n")

    def verbatim(self, text: str) -> None:
        self.text(text)

    def tool_called(self, use: dict[str, Any]) -> None:
        self.note(paint(f"· {plain(use['name'])} {arguments_line(use['arguments'])}", dim=True))

    def tool_ended(self, use: dict[str, Any], outcome: dict[str, Any], seconds: float) -> None:  # noqa: ARG002
        if outcome.get("is_error"):
            first = json_value(outcome["content"]).strip().partition("\n")[0]
            self.note(paint(f"  {plain(use['name'])}: {one_line(first, 2 * MAX_ARGUMENT_CHARACTERS)}", dim=True))

    def pause(self) -> None:
        if self._line_open:
            self.text("\n")

    def note(self, text: str) -> None:
        self.pause()
        remark(text)

    def ended(self) -> None:
        self.pause()


class ChatExchange:
    """Sends messages to one session and shows the runs."""

    def __init__(self, client: Client, key: str, view: View, *, ask: bool, quiet: bool = False) -> None:
        """`ask`: ask for approvals on the terminal. `quiet`: do not show the error of a failed run."""
        self._client = client
        self._path = url_path("/v1/sessions/{}", key)
        self._view = view
        self._ask = ask
        self._quiet = quiet
        self._prompt = ApprovalPrompt(client, ask=False)
        # Whether the answer of the current step is already shown.
        self._shown = False
        # Whether events are shown as they arrive; after a reconnect only the answer is.
        self._live = True

    def send(self, text: str, options: dict[str, Any], record: str | None = None) -> dict[str, Any]:
        """Send a message, show its run and return the outcome. Raises ClientError.

        Ctrl-C stops the run; a second one exits at once.
        """
        body = {"message": text, **options, **({} if record is None else {"record": True})}
        outcome: dict[str, Any] = self._client.post(f"{self._path}/messages", body).value
        self._shown, self._live = False, True
        at_work = outcome["state"] == "running"
        try:
            if at_work:
                self._view.began(outcome["session_key"])
                with ApprovalPrompt(self._client, ask=self._ask) as self._prompt:
                    outcome = self._follow(outcome["run_id"], record)
        except KeyboardInterrupt:
            self._view.note("stopping … (Ctrl-C again leaves)")
            self._client.post(f"{self._path}/stop", {})
            outcome = self._client.get("/v1/runs/{}", outcome["run_id"]).value
        if outcome.get("reply") and not self._shown:
            (self._view.text if at_work else self._view.verbatim)(outcome["reply"])
        self._view.ended()
        error = outcome.get("error")
        if error is not None and "reply" not in outcome and not self._quiet:
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
                self._view.note(f"farhand: {error}; waiting for the gateway")
            # The stream starts again from the beginning; only the answer is still to be shown.
            self._live, self._shown, record = False, False, None
            time.sleep(RETRY_SECONDS)

    def _show(self, event: dict[str, Any], record: str | None) -> None:
        if not self._live:
            return
        match event["type"]:
            case "step_started":
                self._shown = False
            case "text_delta":
                self._shown = True
                self._view.text(event["text"])
            case "tool_called":
                self._view.tool_called(event["use"])
            case "approval_requested":
                self._view.pause()
                self._prompt.announce(event)
            case "tool_ended":
                self._view.tool_ended(event["use"], event["outcome"], event["seconds"])
            case "retrying":
                self._shown = self._shown and not event["void"]
                self._view.note(f"farhand: {plain(event['reason'])}; asking {plain(event['model'])} again")
            case "compacted":
                self._view.note("farhand: the conversation was long; its older part is now a summary")
            case "recorded" if record is not None:
                with Path(record).open("a") as file:
                    file.write(event["line"])


def plain_exchange(client: Client, key: str, *, as_json: bool) -> ChatExchange:
    """Return an exchange that prints plain text, or nothing for --json."""
    return ChatExchange(client, key, PlainView(None if as_json else sys.stdout), ask=not as_json, quiet=as_json)


def arguments_line(text: str, longest: int = MAX_ARGUMENT_CHARACTERS) -> str:
    """Return the arguments of a call in one line."""
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    if isinstance(values, dict):
        values = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return one_line(str(values), longest)
