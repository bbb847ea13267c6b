"""Start a command with a call of `Bash`, and the exit statuses of `run` and `shell`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final, NoReturn

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.client import Client, ConnectionLost, read_events
from farhand.cli.output import plain_lines, show
from farhand.protocol.errors import FarhandError

# As that of `docker run`: Farhand itself failed.
FAILED: Final = 125


def fail(error: FarhandError) -> NoReturn:
    """Report a failure of Farhand itself, with the status that no command should have."""
    document = {"error": {"code": getattr(error, "code", "failed"), "message": str(error)}}
    show(document, hint=f"farhand: {plain_lines(str(error))}")
    raise SystemExit(FAILED)


def started(
    client: Client, body: dict[str, Any], on_id: Callable[[str], None] = lambda _: None, *, ask: bool
) -> dict[str, Any]:
    """Make a call and return its end; announces a required approval. `on_id` gets the id of the call at once.

    `ask`: on a terminal, the user may decide about the approval. Raises ClientError, and ConnectionLost if the gateway
    stopped meanwhile.
    """
    headers = {"Accept": "text/event-stream"}
    with (
        ApprovalPrompt(client, ask=ask) as prompt,
        client.open("POST", "/v1/tools/invoke", {**body, "stream": True}, headers, None) as (response, explained),
    ):
        on_id(response.headers["X-Request-Id"])
        for name, answer in read_events(response, explained):
            if name == "approval_requested":
                prompt.announce(answer.value)
            elif name == "done":
                return dict(answer.value)
    raise ConnectionLost("the gateway closed the connection without an answer")


def exit_status(code: Any, name: Any) -> int:
    """Return the status of this program for that of a command: 128+N if signal N ended it."""
    if isinstance(code, int):
        return code
    try:
        return 128 + signal.Signals[str(name)]
    except KeyError:
        digits = str(name).removeprefix("SIG")
        return 128 + int(digits) if digits.isdecimal() else FAILED


def own_size() -> tuple[int, int]:
    """Return columns and rows as the terminal has them, whatever COLUMNS and LINES say; 80 and 24 without one."""
    for descriptor in (1, 0, 2):
        try:
            cols, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if cols > 0 and rows > 0:
            return cols, rows
    return 80, 24
