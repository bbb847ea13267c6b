"""`ps` and `attach`: the commands that run on the nodes."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any, Final
from urllib.parse import quote, urlencode

import click

from farhand.cli.calls.streams import output, write
from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.output import (
    SHORT_ID,
    Column,
    ago,
    fits,
    plain,
    plain_lines,
    remark,
    show_answer,
    show_json,
    show_table,
)

TAIL_BYTES: Final = 4000


@click.command()
@click.option("--node", "node_id", metavar="ID", help="Only commands of this node.")
@click.option("--all", "-a", "everything", is_flag=True, help="Also those that have ended, for 30 minutes.")
@client_command
def ps(node_id: str | None, everything: bool, client: Client, as_json: bool) -> None:
    """List the commands that run on all nodes, newest first.

    \b
    Examples:
      farhand ps
      farhand ps --node laptop --all
      farhand ps --json
    """
    answer = client.get("/v1/jobs" + (f"?{urlencode({'node_id': node_id})}" if node_id else ""))
    jobs = [job for job in answer.value["jobs"] if everything or job["running"]]
    if as_json and everything:
        show_answer(answer)
    elif as_json:
        show_json({**answer.value, "jobs": jobs, "count": len(jobs)})
    elif jobs:
        columns = [Column("NODE"), Column("JOB"), Column("STATE"), Column("STARTED"), Column("COMMAND", flexible=True)]
        rows = [[job["node_id"], job["job_id"], _state(job), ago(job["started_at"]), job["command"]] for job in jobs]
        if not fits(columns, rows):  # the end of an id is enough for `attach`
            for row in rows:
                row[1] = row[1][-SHORT_ID:]
        show_table(columns, rows)
    else:
        remark("no such commands" if node_id or everything else "no commands are running")
    if answer.value["unanswered"] and not as_json:
        remark(f"farhand: no answer from {', '.join(answer.value['unanswered'])}")


def _state(job: dict[str, Any]) -> str:
    if job["running"]:
        return "running"
    if job["lost"]:
        return "unknown: lost"
    if job["exit_code"] == 0:
        return "ok"
    return f"error: {job['signal'] or 'exit ' + str(job['exit_code'])}"


@click.command()
@click.argument("node_id", metavar="NODE")
@click.argument("job_id", metavar="JOB")
@click.option("--tail", is_flag=True, help="Begin near the end of what was printed, not with its beginning.")
@client_command
def attach(node_id: str, job_id: str, tail: bool, client: Client, as_json: bool) -> int:
    """Show what a command prints, and send it the lines that are typed.

    Ctrl-D and Ctrl-C leave; the command goes on. When it ends, so does this, with status 0. JOB is the whole id (the
    sessionId of a Bash call), or the end of it as `farhand ps` shows it on a narrow terminal. With --json the output
    goes to standard error, and how the command ended to standard output.

    \b
    Examples:
      farhand attach laptop 7c0a2b1e-5c2f-4a7e-9d55-0123456789ab
      farhand attach laptop 0123456789ab --tail
    """
    job = _find(client, node_id, job_id)
    path = f"/v1/nodes/{quote(node_id, safe='')}/jobs/{quote(job['job_id'], safe='')}/output"
    offset = max(0, job.get("output_bytes", 0) - TAIL_BYTES) if tail else 0
    events: queue.Queue[bytes | BaseException | None] = queue.Queue(16)
    threading.Thread(target=_read, args=(client, path, offset, events), daemon=True).start()
    if job.get("running", True):
        if sys.stdin.isatty():
            remark("attached; Ctrl-D or Ctrl-C leaves, and the command goes on")
        threading.Thread(target=_feed, args=(client, node_id, job["job_id"], events), daemon=True).start()
    cut = offset > 0
    try:
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            if cut:  # begin with a whole line, if there is one
                event = event.partition(b"\n")[2] or event
                cut = False
            write(event, sys.stderr if as_json else sys.stdout)
    except (KeyboardInterrupt, EOFError):
        if as_json:
            show_json({**job, "detached": True})
        else:
            remark("\ndetached; the command goes on" if sys.stdin.isatty() else "detached; the command goes on")
        return 0
    ended = _find(client, node_id, job["job_id"])
    if as_json:
        show_json(ended)
    elif "running" in ended:
        remark(f"ended: {plain(_state(ended))}")
    return 0


def _find(client: Client, node_id: str, job_id: str) -> dict[str, Any]:
    """The job of that id or end of an id; one that is no longer listed is known by its id alone. Raises ClientError."""
    jobs = client.get(f"/v1/jobs?{urlencode({'node_id': node_id})}").value["jobs"]
    found = [job for job in jobs if job["job_id"] == job_id]
    found = found or [job for job in jobs if job_id and job["job_id"].endswith(job_id)]
    if len(found) > 1:
        raise ClientError("ambiguous", f"{len(found)} commands of {node_id} have ids that end in {job_id!r}")
    return found[0] if found else {"node_id": node_id, "job_id": job_id}


def _read(client: Client, path: str, offset: int, events: queue.Queue[bytes | BaseException | None]) -> None:
    try:
        for piece in output(client, path, offset):
            events.put(piece)
    except BaseException as error:
        events.put(error)
    else:
        events.put(None)


def _feed(client: Client, node_id: str, job_id: str, events: queue.Queue[bytes | BaseException | None]) -> None:
    """Send what is typed, line by line. At a terminal the end of it is the wish to leave."""
    text = b""
    while data := _typed():
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            _send(client, node_id, job_id, "submit", line)
    if text:
        _send(client, node_id, job_id, "write", text)
    if os.isatty(0):
        events.put(EOFError())


def _typed() -> bytes:
    try:
        return os.read(0, 65536)
    except OSError:
        return b""


def _send(client: Client, node_id: str, job_id: str, action: str, data: bytes) -> None:
    args = {"action": action, "sessionId": job_id, "data": data.decode("utf-8", "replace")}
    try:
        answer = client.request("POST", "/v1/tools/invoke", {"tool": f"{node_id}__Process", "args": args})
    except ClientError as error:
        remark(f"farhand: not sent: {error}")
        return
    if not answer.value["ok"]:
        remark(f"farhand: not sent: {plain_lines(answer.value['error']['message'])}")
