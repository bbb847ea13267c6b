"""`call`, and `calls` with its `show` and `cancel`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.calls.fanout import call_many
from farhand.cli.calls.streams import show_output
from farhand.cli.client import Answer, Client, ClientError, ConnectionLost, client_command, read_json
from farhand.cli.output import (
    SHORT_ID,
    Column,
    ago,
    fits,
    json_text,
    moment,
    moment_briefly,
    paint,
    plain,
    plain_lines,
    remark,
    show_answer,
    show_fields,
    show_table,
    show_text,
    took,
)

# How much longer than its --timeout a call may stay silent: the gateway asks the node to stop and says what it did.
GRACE_SECONDS = 15.0

ANNOUNCE_TRIES = 20
# Seconds between two looks at a call whose question is about to be put.
ANNOUNCE_PAUSE = 0.1

# How many of the newest calls are searched for one whose id ends as given.
SEARCHED = 1000


@click.command()
@click.argument("tool")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]... | JSON | -")
@click.option("--timeout", "seconds", type=float, metavar="SECONDS", help="How long the call may take; 0.5 is fine.")
@click.option("--session", "session_key", metavar="KEY", help="Session the call belongs to.")
@click.option("--background", is_flag=True, help="Do not wait: print the call's id.")
@click.option("--follow", "-f", is_flag=True, help="Print what its command prints, as it comes.")
@click.option("--idempotency-key", metavar="KEY", help="Run once however often this is repeated, for 24 hours.")
@click.option("--on", "targets", multiple=True, metavar="NODES", help="On these nodes: ids and tag:NAME, with commas.")
@click.option("--concurrency", type=click.IntRange(1, 100), metavar="N", help="With --on: so many at once.  [10]")
@click.option(
    "--canary", type=click.IntRange(1, 1000), metavar="N", help="With --on: N first; the rest if they succeed."
)
@click.option("--stop-on-failure", is_flag=True, help="With --on: begin nothing more after a failure.")
@click.option("--skip-offline", is_flag=True, help="With --on: a node that is offline is no failure.")
@click.option("--when-online", is_flag=True, help="If its node is offline, wait for it: print the call's id.")
@click.option("--before", metavar="WHEN", help="With --when-online, until when: 18:00, 'tomorrow 9am', 'in 2 hours'.")
@client_command
def call(
    tool: str,
    arguments: tuple[str, ...],
    seconds: float | None,
    session_key: str | None,
    background: bool,
    follow: bool,
    idempotency_key: str | None,
    targets: tuple[str, ...],
    concurrency: int | None,
    canary: int | None,
    stop_on_failure: bool,
    skip_offline: bool,
    when_online: bool,
    before: str | None,
    client: Client,
    as_json: bool,
) -> int:
    """Call one tool, and print its result; with --on, the same tool on many nodes, and print one table.

    A VALUE that is JSON is taken as JSON (5, true, null, [1,2]), anything else as text; n='"5"' is the text 5. One
    argument that begins with { or [ is all the arguments; - reads them from standard input.

    With --follow the output of a command comes as it is printed (with --json on standard error), then how the call
    ended.

    The status is 0 only when the call succeeded, with --on only when it did on every node. Ctrl-C cancels the call,
    unless it is in the background or has an idempotency key.

    \b
    Examples:
      farhand call node.ping
      farhand call node.fs.read_text path=notes/today.txt
      farhand call laptop__Bash command='uname -a' --timeout 20
      farhand call laptop__Bash command='make test' --follow
      farhand call --when-online --before 18:00 laptop__Bash command='git pull'
      farhand call node.echo '{"text": "hello", "times": 3}'
      date | jq -R '{now: .}' | farhand call node.echo -
      farhand call --on tag:web --canary 1 --stop-on-failure Bash command='systemctl reload nginx'
    """
    body: dict[str, Any] = {"tool": tool, "args": read_arguments(arguments)}
    if seconds is not None:
        if not math.isfinite(seconds) or not 0.001 <= seconds <= 86_400:
            raise click.UsageError(f"--timeout takes seconds from 0.001 to 86400, not {seconds:g}.")
        body["timeout_ms"] = round(seconds * 1000)
    if session_key is not None:
        body["session_key"] = session_key
    if background and follow:
        raise click.UsageError("--background leaves the call and --follow stays with it; choose one.")
    if background or follow:
        body["background"] = True
    if before is not None and not when_online:
        raise click.UsageError("--before says how long --when-online waits; give both.")
    if when_online and follow:
        raise click.UsageError("--when-online may leave the call waiting and --follow stays with it; choose one.")
    if when_online:
        body["when_online"] = True
    if before is not None:
        body["before"] = before
    if idempotency_key is not None and not (idempotency_key.isascii() and idempotency_key.isprintable()):
        raise click.UsageError("--idempotency-key takes printable ASCII characters.")
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    lasting = background or idempotency_key is not None
    fanning = {"concurrency": concurrency, "canary": canary, "stop_on_failure": stop_on_failure or None}
    fanning |= {"skip_offline": skip_offline or None}
    chosen = {name: value for name, value in fanning.items() if value is not None}
    if targets:
        if background or follow:
            raise click.UsageError("--on waits for all nodes; --background and --follow are for one call.")
        return call_many(client, {**body, **chosen}, targets, headers, as_json)
    if chosen:
        option = next(iter(chosen)).replace("_", "-")
        raise click.UsageError(f"--{option} is for a call to many nodes; name them with --on.")
    if follow:
        return _follow(client, body, headers, as_json)
    try:
        answer = _invoke(client, body, headers, None if seconds is None else seconds + GRACE_SECONDS, as_json)
    except ConnectionLost as lost:
        raise ConnectionLost(f"{lost}; whether the call ran is in `farhand calls`", lost.code) from None
    except KeyboardInterrupt:
        fate = "the call goes on: see `farhand calls`" if lasting else "the gateway cancels the call"
        raise ClientError("interrupted", f"interrupted; {fate}") from None
    ended = answer.value
    if as_json:
        show_answer(answer)
    elif not ended["ok"]:
        _show_failure(ended["error"])
    elif ended["state"] == "waiting":
        print(ended["request_id"])
        _announce(client, ended["request_id"])
        remark(f"waiting; `farhand calls cancel {ended['request_id']}` cancels it")
    elif ended["state"] == "running":
        print(ended["request_id"])
        remark(f"running; `farhand calls show {ended['request_id']}` tells how it ends")
    else:
        _show_result(ended.get("result"))
    return 0 if ended["ok"] else 1


def _invoke(
    client: Client, body: dict[str, Any], headers: dict[str, str], seconds: float | None, as_json: bool
) -> Answer:
    """Make a call and return its answer; say on standard error if it waits to be approved. Raises ClientError.

    `seconds` is the longest silence to bear while the call runs.
    """
    sent = {**body, "stream": True}
    waiting = ""
    try:
        with (
            ApprovalPrompt(client, ask=not as_json) as prompt,
            client.named_events("/v1/tools/invoke", sent, headers, seconds) as events,
        ):
            for name, data in events:
                if name == "approval_requested":
                    request = read_json(data)
                    waiting = request["call_id"]
                    prompt.announce(request)
                elif name == "done":
                    return Answer(data, read_json(data))
    except KeyboardInterrupt:
        if waiting:  # the gateway keeps it
            fate = f"the call stays open: `farhand calls cancel {waiting}` cancels it"
            raise ClientError("interrupted", f"interrupted; {fate}") from None
        raise
    raise ConnectionLost("the gateway ended the connection before it answered")


def _announce(client: Client, call_id: str) -> None:
    """Say what a call in the background waits for. The question may be put a moment after the call was accepted."""
    for _ in range(ANNOUNCE_TRIES):
        try:
            record = client.get(f"/v1/calls/{call_id}").value
            if record["state"] != "waiting" or record.get("waits_for") != "approval":
                return
            if record.get("approval_id"):
                one = client.get(f"/v1/approvals/{record['approval_id']}").value
                ApprovalPrompt(client, ask=False).announce({**one, "approval_id": one["id"]})
                return
        except ClientError:  # this token may not see it
            return
        time.sleep(ANNOUNCE_PAUSE)


def _follow(client: Client, body: dict[str, Any], headers: dict[str, str], as_json: bool) -> int:
    """Make a call, print what its command prints until it has ended, and say how the call ended."""
    begun = client.request("POST", "/v1/tools/invoke", body, headers=headers)
    if not begun.value["ok"]:
        if as_json:
            show_answer(begun)
        else:
            _show_failure(begun.value["error"])
        return 1
    path = f"/v1/calls/{begun.value['request_id']}"
    try:
        if begun.value["state"] == "waiting":
            _wait_for_approval(client, path, as_json)
        try:
            printed = show_output(client, f"{path}/output", to=sys.stderr if as_json else sys.stdout)
        except ClientError as error:
            if error.code != "not_found":
                raise
            printed = 0  # it runs no command
        answer = _end_of(client, path)
    except KeyboardInterrupt:
        if headers:
            raise ClientError("interrupted", "interrupted; the call goes on: see `farhand calls`") from None
        ended = client.request("DELETE", path).value
        fate = ended["error"]["message"] if "error" in ended else f"the call was over before: {ended['state']}"
        raise ClientError("interrupted", f"interrupted; {plain_lines(fate)}") from None
    record = answer.value
    if as_json:
        show_answer(answer)
    elif record["state"] != "ok":
        _show_failure(record["error"])
    else:
        result = record.get("result")
        if not isinstance(result, dict) or "output" not in result:
            if not printed:
                _show_result(result)
            else:
                remark("ok")
        else:
            remark(_command_end(result))
    return 0 if record["state"] == "ok" else 1


def _command_end(result: dict[str, Any]) -> str:
    """Describe how a command ended, in one line. All of this is what the node says, and may be anything."""
    signal, milliseconds = result.get("signal"), result.get("durationMs")
    how = f"ended by {signal}" if signal else f"exit status {result.get('exitCode')}"
    lasted = f" after {took(milliseconds)}" if isinstance(milliseconds, int | float) else ""
    return plain(f"{result.get('status', 'ok')}: {how}{lasted}")


def _wait_for_approval(client: Client, path: str, as_json: bool) -> None:
    """Return once a call no longer waits; say what it waits for, and ask."""
    with ApprovalPrompt(client, ask=not as_json) as prompt:
        announced, pause = False, ANNOUNCE_PAUSE
        while (record := client.get(path).value)["state"] == "waiting":
            if record.get("approval_id") and not announced:
                one = client.get(f"/v1/approvals/{record['approval_id']}").value
                prompt.announce({**one, "approval_id": one["id"]})
                announced = True
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)


def _end_of(client: Client, path: str) -> Answer:
    """The record of a call once it has ended."""
    pause = 0.02
    while (answer := client.get(path)).value["state"] in ("running", "waiting"):
        time.sleep(pause)
        pause = min(pause * 2, 1.0)
    return answer


def read_arguments(arguments: Sequence[str]) -> Any:
    """The arguments of a tool from those of the command. Raises click.UsageError naming the one at fault."""
    if len(arguments) == 1 and (arguments[0] == "-" or arguments[0][:1] in ("{", "[")):
        source = "standard input" if arguments[0] == "-" else "the argument"
        text = sys.stdin.read() if arguments[0] == "-" else arguments[0]
        try:
            return _json(text)
        except ValueError as error:
            reason = "it is empty" if not text.strip() else str(error)
            raise click.UsageError(f"{source} is not JSON: {reason}") from None
    values: dict[str, Any] = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{argument!r} is not KEY=VALUE; JSON must be the only argument, in quotes.")
        if key in values:
            raise click.UsageError(f"{key!r} is given twice.")
        if not argument.isprintable() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise click.UsageError(f"the value of {key!r} is not UTF-8 text.")
        try:
            values[key] = _json(text)
        except ValueError:
            values[key] = text
    return values


def _json(text: str) -> Any:
    """Raises ValueError, also for numbers that JSON does not have."""

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is not a number of JSON")
        return value

    try:
        return json.loads(text, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _show_result(result: Any) -> None:
    if isinstance(result, dict) and result.keys() == {"content"}:
        result = result["content"]
    show_text(result if isinstance(result, str) else json_text(result))


def _show_failure(error: dict[str, str]) -> None:
    remark(f"{error['kind']}: {plain_lines(error['message'])}")


# -- the record -------------------------------------------------------------------------------------------


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--node", "node_id", metavar="ID", help="Only calls that went to this node.")
@click.option("--tool", metavar="NAME", help="Only calls of this tool.")
@click.option("--group", metavar="ID", help="Only calls of this call to many nodes.")
@click.option("--state", metavar="STATE", help="waiting, running, ok, error, timeout, cancelled, denied or unknown.")
@click.option("--waiting", is_flag=True, help="Only calls that wait for their node, or to be approved.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, metavar="N", help="How many.  [default: 20, at most 1000]"
)
@client_command
def calls(
    node_id: str | None,
    tool: str | None,
    group: str | None,
    state: str | None,
    waiting: bool,
    limit: int,
    client: Client,
    as_json: bool,
) -> None:
    """List what ran and what runs, newest first; show or cancel one call.

    \b
    Examples:
      farhand calls
      farhand calls --state running
      farhand calls --waiting
      farhand calls --tool node.ping --limit 5 --json
      farhand calls show 0198c0de-7a11-7000-8000-0123456789ab
      farhand calls cancel 0123456789ab
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    if waiting and state not in (None, "waiting"):
        raise click.UsageError("--waiting is --state waiting; choose one state.")
    state = "waiting" if waiting else state
    bodies = None if as_json else 0
    filters = {"node_id": node_id, "tool": tool, "state": state, "group": group, "limit": limit, "bodies": bodies}
    answer = client.get("/v1/calls?" + urlencode({key: value for key, value in filters.items() if value is not None}))
    if as_json:
        show_answer(answer)
    elif not answer.value["calls"]:
        remark("no such calls" if node_id or tool or state or group else "no calls yet")
    else:
        _show_calls(answer.value["calls"])


def _show_calls(records: Sequence[dict[str, Any]]) -> None:
    columns = [
        Column("ID"),
        Column("TOOL"),
        Column("NODE"),
        Column("STATE"),
        Column("TOOK", right=True),
        Column("STARTED"),
    ]
    rows = [
        [
            record["id"],
            record["tool"],
            record["route"].get("node_id") or "",
            _state(record),
            took(record["duration_ms"]),
            ago(record["created_at"]),
        ]
        for record in records
    ]
    if not fits(columns, rows):  # the end of an id is its random part, and enough for `show` and `cancel`
        for row in rows:
            row[0] = row[0][-SHORT_ID:]
    show_table(columns, rows)


def _state(record: dict[str, Any]) -> str:
    if record["state"] == "error":
        return f"error: {record['error']['kind']}"
    if record["state"] == "waiting":
        return f"waiting: {record['waits_for']} until {moment_briefly(record['deadline_at'])}"
    return str(record["state"])


@calls.command()
@click.argument("call_id", metavar="ID")
@client_command
def show(call_id: str, client: Client, as_json: bool) -> None:
    """Show one call: its arguments, and how it ended.

    ID is the whole id, or the end of it as the list shows it on a narrow terminal.

    \b
    Examples:
      farhand calls show 0198c0de-7a11-7000-8000-0123456789ab
      farhand calls show 0123456789ab --json
    """
    answer = client.get(call_path(client, call_id))
    if as_json:
        show_answer(answer)
        return
    record = answer.value
    show_fields(
        [
            ("call", record["id"]),
            ("tool", record["tool"]),
            ("node", record["route"].get("node_id") or ""),
            ("state", record["state"] + (" (in the background)" if record["background"] else "")),
            ("waits", f"for {record['waits_for']}" if record.get("waits_for") else ""),
            ("approval", record.get("approval_id") or ""),
            ("session", record["session_key"] or ""),
            ("agent", record["agent_id"] or ""),
            ("started", f"{moment(record['created_at'])} ({ago(record['created_at'])})"),
            ("deadline", "" if record["ended_at"] else moment(record["deadline_at"])),
            ("took", took(record["duration_ms"])),
        ]
    )
    _show_section("arguments", json_text(record["args"]))
    if "error" in record:
        _show_section("error", plain_lines(f"{record['error']['kind']}: {record['error']['message']}"))
    elif record["state"] not in ("running", "waiting"):
        _show_section("result", json_text(record.get("result")))


def _show_section(title: str, text: str) -> None:
    print(f"\n{paint(title, bold=True)}\n{text}")


@calls.command()
@click.argument("call_id", metavar="ID")
@client_command
def cancel(call_id: str, client: Client, as_json: bool) -> int:
    """Cancel a call that runs or waits; its node is told to stop it.

    The status is 0 when this cancelled the call, and 1 when the call was over before, however it ended.

    \b
    Example:
      farhand calls cancel 0198c0de-7a11-7000-8000-0123456789ab
    """
    answer = client.request("DELETE", call_path(client, call_id))
    record = answer.value
    cancelled = record["state"] == "cancelled" and not record.get("already_over")
    if as_json:
        show_answer(answer)
    elif cancelled:
        print(f"cancelled: {plain_lines(record['error']['message'])}")
    else:
        remark(f"farhand: the call was over before: {record['state']}")
    return 0 if cancelled else 1


def call_path(client: Client, call_id: str) -> str:
    """The resource of a call named by its id or the end of it. Raises ClientError when that is not one call."""
    if len(call_id) != 36:
        recent: Answer = client.get(f"/v1/calls?limit={SEARCHED}&bodies=0")
        found = [record["id"] for record in recent.value["calls"] if call_id and record["id"].endswith(call_id)]
        if len(found) > 1:
            raise ClientError("ambiguous", f"{len(found)} calls have ids that end in {call_id!r}")
        if found:
            call_id = found[0]
    return f"/v1/calls/{quote(call_id, safe='')}"
