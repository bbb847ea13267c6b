"""Open a terminal on a node, and attach to it."""

from __future__ import annotations

import sys
from typing import Any

from farhand.cli.client import Client, ClientError
from farhand.cli.json_output import wants_json
from farhand.cli.output import remark, show
from farhand.cli.remote.start import FAILED, exit_status, own_size, started


def open_terminal(client: Client, node_id: str, args: dict[str, Any], *, detach: bool) -> int:
    """Open a terminal and attach to it; return the exit status. Raises ClientError."""
    cols, rows = own_size()
    body = {"tool": f"{node_id}__Bash", "args": {**args, "terminal": f"{cols}x{rows}"}}
    ended = started(client, body, ask=not wants_json())
    if not ended["ok"]:
        raise ClientError(ended["error"]["kind"], ended["error"]["message"])
    terminal_id: str = ended["request_id"]
    if detach:
        show({"terminal_id": terminal_id, "node": node_id, "pid": ended["result"]["pid"]}, terminal_id)
        return 0
    return attach(client, terminal_id)


def attach(client: Client, terminal_id: str, *, again: bool = False) -> int:
    """Attach to a terminal until it ends or the user detaches; return the exit status. Raises ClientError."""
    from farhand.cli.remote.terminal import TerminalClient  # noqa: PLC0415 - loads asyncio

    if sys.stdin.isatty():
        remark(f"farhand: terminal {terminal_id}; Ctrl-] detaches")
    end = TerminalClient(client, terminal_id, again=again).run()
    if end is None:
        remark(f"\r\nfarhand: detached; `farhand shell --attach {terminal_id}` attaches again")
        return 0
    return exit_status(end.get("exit_code"), end.get("signal")) if end else FAILED
