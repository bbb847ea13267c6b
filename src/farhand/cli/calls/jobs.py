"""`ps`, `attach` and `kill`: the commands that run on the nodes."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

import click

from farhand.cli.calls.resumable_streams import command_output, read_input, write
from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.commands import client_command, complete_nodes
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, ago, id_column, plain, plain_lines, remark, show, show_table

TAIL_BYTES: Final = 4000
# How many ids an error names.
MOST_NAMED: Final = 5

Events = queue.Queue[bytes | BaseException | None]


def _state(job: dict[str, Any]) -> str:
    if job["running"]:
        return "running"
    if job["lost"]:
        return "unknown: lost"
    if job["exit_code"] == 0:
        return "ok"
    return f"error: {job['signal'] or 'exit ' + str(job['exit_code'])}"


COLUMNS = [
    Column("NODE", "node_id"),
    id_column("JOB", "job_id"),
    Column("STATE", _state),
    Column("STARTED", lambda job: ago(job["started_at"])),
    Column("COMMAND", "command", flexible=True),
]


@client_command
@click.option("--node", "node_id", metavar="ID", help="Only commands of this node.")
@click.option("--all", "-a", "every", is_flag=True, help="Include commands that ended in the last 30 minutes.")
def ps(node_id: str | None, every: bool, client: Client) -> None:
    """List the commands that run on the nodes, newest first.

    \b
    Examples:
      farhand ps
      farhand ps --node laptop --all
      farhand ps --json
    """
    answer = client.get("/v1/jobs", node_id=node_id or None)
    jobs = [job for job in answer.value["jobs"] if every or job["running"]]

    def render(_: Any) -> None:
        if jobs:
            show_table(COLUMNS, jobs)
        else:
            remark("no matching commands" if node_id or every else "no commands are running")
        if answer.value["unanswered"]:
            remark(f"farhand: no answer from {', '.join(answer.value['unanswered'])}")

    show(answer if every else {**answer.value, "jobs": jobs, "count": len(jobs)}, render)


@client_command
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.argument("job_id", metavar="JOB")
@click.option("--tail", is_flag=True, help="Start near the end of the output instead of the beginning.")
def attach(node_id: str, job_id: str, tail: bool, client: Client) -> int:
    """Show the output of a command, and send it the lines you type.

    Ctrl-D and Ctrl-C detach; the command continues. When the command ends, so does this, with status 0. JOB is an id of
    `farhand ps` or of a call, or any unique beginning of one. With --json the output
    goes to standard error, and the state of the command to standard output.

    \b
    Examples:
      farhand attach laptop 7c0a2b1e-5c2f-4a7e-9d55-0123456789ab
      farhand attach laptop 7c0a --tail
    """
    job = _find(client, node_id, job_id)
    path = url_path("/v1/nodes/{}/jobs/{}/output", node_id, job["job_id"])
    offset = max(0, job.get("output_bytes", 0) - TAIL_BYTES) if tail else 0
    events: Events = queue.Queue(16)
    threading.Thread(target=_read_output, args=(client, path, offset, events), daemon=True).start()
    if job.get("running", True):
        if sys.stdin.isatty():
            remark("attached; Ctrl-D or Ctrl-C detaches, and the command continues")
        threading.Thread(target=_send_input, args=(client, node_id, job["job_id"], events), daemon=True).start()
    cut = offset > 0
    try:
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            if cut:  # start with a whole line if there is one
                event = event.partition(b"\n")[2] or event
                cut = False
            write(event, sys.stderr if wants_json() else sys.stdout)
    except (KeyboardInterrupt, EOFError):
        show({**job, "detached": True}, hint="\n" * sys.stdin.isatty() + "detached; the command continues")
        return 0
    try:
        ended = _find(client, node_id, job["job_id"])
    except ClientError:  # its node has just disconnected
        ended = job
    show(ended, hint="" if ended["running"] else f"ended: {plain(_state(ended))}")
    return 0


@client_command
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.argument("job_id", metavar="JOB")
@click.option("--signal", "name", default="TERM", show_default=True, metavar="NAME", help="TERM, KILL, INT, HUP, …")
def kill(node_id: str, job_id: str, name: str, client: Client) -> None:
    """End a command on a node, with everything it started.

    TERM gives it five seconds before SIGKILL; KILL ends it at once; other signals are only sent. JOB is an id of
    `farhand ps` or of a call or terminal, or any unique beginning of one.

    \b
    Examples:
      farhand kill laptop 7c0a2b1e
      farhand kill laptop 7c0a2b1e --signal INT
    """
    job = _find(client, node_id, job_id)
    if not job["running"] and name.upper().removeprefix("SIG") not in ("TERM", "KILL"):
        raise ClientError("failed", f"the command {job['job_id']} has ended: {plain(_state(job))}")
    args = {"action": "kill", "sessionId": job["job_id"], "signal": name}
    answer = client.post("/v1/tools/invoke", {"tool": f"{node_id}__Process", "args": args}, seconds=None)
    if not answer.value["ok"]:
        raise ClientError(answer.value["error"]["kind"], answer.value["error"]["message"])
    show(answer, lambda ended: print(plain(ended["result"]["message"])))


def _find(client: Client, node_id: str, job_id: str) -> dict[str, Any]:
    """Return the job with this id, or a unique part of it. Raises ClientError."""
    jobs = client.get("/v1/jobs", node_id=node_id).value["jobs"]
    found = matching(jobs, job_id, "job", "job_id", "call_id")
    if found is None:
        if not any(node["node_id"] == node_id for node in client.get("/v1/nodes").value["nodes"]):
            raise ClientError("not_found", f"there is no node {node_id!r}; `farhand nodes` lists the known ones")
        raise ClientError("not_found", f"there is no command {job_id!r} on {node_id}; `farhand ps --all` lists them")
    return dict(found)


def matching(found: Iterable[Mapping[str, Any]], given: str, what: str, *fields: str) -> Mapping[str, Any] | None:
    """Return the one whose id is `given`, or begins or, as tables cut ids, ends with it. None if there is none.

    `fields`: those that hold an id. Raises ClientError if there are several.
    """
    everything = list(found)

    def ids(one: Mapping[str, Any]) -> list[str]:
        return [str(one[field]) for field in fields if one.get(field)]

    for matches in (str.__eq__, str.startswith, str.endswith):
        near = [one for one in everything if given and any(matches(known, given) for known in ids(one))]
        if len(near) == 1:
            return near[0]
        if near:
            names = ", ".join(ids(one)[0] for one in near[:MOST_NAMED]) + (", …" if len(near) > MOST_NAMED else "")
            raise ClientError("ambiguous", f"{len(near)} {what} ids match {given!r}: {names}; give more of the id")
    return None


def _read_output(client: Client, path: str, offset: int, events: Events) -> None:
    try:
        for piece in command_output(client, path, offset):
            events.put(piece)
    except BaseException as error:
        events.put(error)
    else:
        events.put(None)


def _send_input(client: Client, node_id: str, job_id: str, events: Events) -> None:
    """Send standard input line by line. On a terminal the end of input detaches."""
    text = b""
    while data := read_input():
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            _send(client, node_id, job_id, "submit", line)
    if text:
        _send(client, node_id, job_id, "write", text)
    if os.isatty(0):
        events.put(EOFError())


def _send(client: Client, node_id: str, job_id: str, action: str, data: bytes) -> None:
    args = {"action": action, "sessionId": job_id, "data": data.decode("utf-8", "replace")}
    try:
        client.invoke(f"{node_id}__Process", args)
    except ClientError as error:
        remark(f"farhand: input not sent: {plain_lines(str(error))}")
