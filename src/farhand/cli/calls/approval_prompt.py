"""Announce approvals while a command waits for them, and ask for the decision on a terminal."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
from typing import Any, Final

from farhand.cli.calls.approvals import decide, show_approval
from farhand.cli.client import Client, ClientError
from farhand.cli.output import local_time, plain, remark

POLL_SECONDS: Final = 1.0
ALWAYS: Final = "always"
ANSWERS: Final = {
    **dict.fromkeys(("y", "yes"), "approve"),
    **dict.fromkeys(("n", "no"), "deny"),
    **dict.fromkeys(("a", "always"), ALWAYS),
}


class ApprovalPrompt:
    """Announces approvals on standard error. Use as a context manager.

    On a terminal it also asks for the decision, in a thread of its own, so that the command continues when the call is
    decided elsewhere. Until `close` returns, that thread may read standard input.
    """

    def __init__(self, client: Client, *, ask: bool = True) -> None:
        self._client = client
        self._ask = ask and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
        self._questions: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = -1
        self._stopped = -1

    def __enter__(self) -> ApprovalPrompt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce_call(self, record: dict[str, Any]) -> None:
        """Announce the approval that a recorded call waits for."""
        one = self._client.get("/v1/approvals/{}", record["approval_id"]).value
        self.announce({**one, "approval_id": one["id"]})

    def announce(self, request: dict[str, Any]) -> None:
        """Show an `approval_requested` event: what waits, why, until when, and how to decide."""
        approval_id = plain(request["approval_id"])
        remark(f"farhand: {plain(request['tool'])} waits for approval {approval_id}")
        try:
            approval = self._client.get("/v1/approvals/{}", request["approval_id"]).value
        except ClientError:  # this token may not see approvals
            approval = None
            rule = plain(request["rule"]) + (f": {plain(request['reason'])}" if request["reason"] else "")
            remark(f"rule      {rule}\nuntil     {local_time(request['deadline_at'])}")
        else:
            with contextlib.redirect_stdout(sys.stderr):
                show_approval(approval)
                print()
        remark(f"decide with `farhand approve {approval_id}` or `farhand deny {approval_id}`; Ctrl-C stops waiting")
        if approval is not None and self._ask:
            self._start()
            self._questions.put(approval)

    def close(self) -> None:
        """Stop asking; undecided approvals stay open on the gateway."""
        if self._thread is not None:
            os.write(self._stop, b"x")
            self._questions.put(None)
            self._thread.join()
            self._thread = None
            os.close(self._stop)
            os.close(self._stopped)

    def _start(self) -> None:
        if self._thread is None:
            self._stopped, self._stop = os.pipe()
            self._thread = threading.Thread(target=self._work, name="approvals", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (approval := self._questions.get()) is not None:
            try:
                self._decide(approval)
            except (ClientError, OSError) as error:
                remark(f"farhand: {error}")

    def _decide(self, approval: dict[str, Any]) -> None:
        while True:
            print(
                f"Run {approval['id']}? [y]es / [n]o / [a]lways for exactly this: ", end="", file=sys.stderr, flush=True
            )
            line = self._read_line(approval["id"])
            if line is None:
                return
            decision = ANSWERS.get(line.strip().lower())
            if decision is not None:
                always = decision == ALWAYS
                body = {"decision": "approve" if always else decision, "hash": approval["hash"], "always": always}
                try:
                    decided = decide(self._client, approval["id"], **body).value
                except ClientError as error:
                    if not always:
                        raise
                    remark(f"farhand: {error}")  # it can still be approved once
                    continue
                remark(f"{decided['state']}: {plain(decided['tool'])} ({decided['id']})")
                if always:
                    remark("such calls run without an approval from now on; `farhand policy` lists and removes them")
                return

    def _read_line(self, approval_id: str) -> str | None:
        """Return the next line typed, or None if the approval is decided elsewhere or the prompt is closed."""
        while True:
            readable = select.select([sys.stdin, self._stopped], [], [], POLL_SECONDS)[0]
            if self._stopped in readable:
                remark("")
                return None
            if readable:
                # Not through `sys.stdin`: what it buffers would be lost to the next reader of the terminal.
                return os.read(sys.stdin.fileno(), 4096).decode(errors="replace") or None
            decided = self._client.get("/v1/approvals/{}", approval_id).value
            if decided["state"] != "pending":
                by = f" by {plain(decided['decided_by'])}" if decided["decided_by"] else ""
                remark(f"\n{decided['state']}{by}")
                return None
