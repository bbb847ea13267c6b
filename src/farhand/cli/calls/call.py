"""`call`: call one tool, on one node or on many."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any

import click

from farhand.cli.calls.approval_prompt import ApprovalPrompt
from farhand.cli.calls.arguments import ToolSchema, read_arguments
from farhand.cli.calls.fanout import call_many
from farhand.cli.calls.resumable_streams import command_output, write
from farhand.cli.client import Answer, Client, ClientError, ConnectionLost
from farhand.cli.commands import client_command, complete_parameters, complete_tools, options_given
from farhand.cli.json_output import wants_json
from farhand.cli.output import duration, json_text, plain, plain_lines, remark, show, show_failure, show_text

# How much longer than --timeout a call may be silent: the gateway tells the node to stop it and reports the result.
GRACE_SECONDS = 15.0
FIRST_POLL_SECONDS = 0.02
MAX_POLL_SECONDS = 1.0
ANNOUNCE_SECONDS = 2.0
# The ends of the names of tools that run a command.
SHELL_TOOLS = ("bash", "exec")


@client_command
@click.argument("tool", shell_complete=complete_tools)
@click.argument(
    "arguments",
    nargs=-1,
    shell_complete=complete_parameters,
    metavar="[KEY=VALUE | KEY=@FILE | KEY:=JSON]... | JSON | -",
)
@click.option("--timeout", "seconds", type=float, metavar="SECONDS", help="Time limit of the call, such as 20 or 0.5.")
@click.option("--session", "session_key", metavar="KEY", help="Session of the call.")
@click.option("--background", is_flag=True, help="Do not wait; print the id of the call.")
@click.option("--follow", "-f", is_flag=True, help="Print the output of the command as it arrives.")
@click.option("--idempotency-key", metavar="KEY", help="Run only once in 24 hours, however often it is repeated.")
@click.option("--on", "targets", multiple=True, metavar="NODES", help="Nodes to call: ids and tag:NAME, with commas.")
@click.option("--concurrency", type=click.IntRange(1, 100), metavar="N", help="With --on: calls at a time.  [10]")
@click.option(
    "--canary", type=click.IntRange(1, 1000), metavar="N", help="With --on: N nodes first, the rest if they succeed."
)
@click.option("--stop-on-failure", is_flag=True, help="With --on: start no more calls after a failure.")
@click.option("--skip-offline", is_flag=True, help="With --on: offline nodes do not count as failures.")
@click.option("--when-online", is_flag=True, help="If the node is offline, wait for it; print the id of the call.")
@click.option("--before", metavar="WHEN", help="With --when-online: until 18:00, 'tomorrow 9am', 'in 2 hours'.")
def call(
    tool: str,
    arguments: tuple[str, ...],
    seconds: float | None,
    background: bool,
    follow: bool,
    idempotency_key: str | None,
    targets: tuple[str, ...],
    client: Client,
    **options: Any,
) -> int:
    """Call a tool and print its result; with --on, call it on many nodes and print one table.

    A VALUE has the type that the tool gives to KEY: command=false is text for a command, limit=5 a number. KEY=@FILE
    takes the content of a file (@- standard input, @@ a text that starts with @), KEY:=JSON any JSON. A list is
    repeated keys or JSON. A single argument that starts with { or [ holds all arguments; - reads them from standard
    input.

    --follow prints the output of a command as it arrives (with --json on standard error), and then how the call ended.

    The exit status is 0 only if the call succeeds and, for a shell tool, the command ends with status 0; with --on,
    only if that holds for every node. `farhand run` passes on the status of a command. Ctrl-C cancels the
    call, unless it is in the background or has an idempotency key.

    \b
    Examples:
      farhand call laptop__Read path=/etc/hostname limit=5
      farhand call laptop__Bash command='uname -a' --timeout 20
      farhand call laptop__Bash command='make test' --follow
      farhand call --when-online --before 18:00 laptop__Bash command='git pull'
      farhand call laptop__Write path=notes.txt content=@notes.txt
      farhand call laptop__Read '{"path": "/etc/hostname", "limit": 5}'
      jq -n '{path: "/etc/hostname"}' | farhand call laptop__Read -
      farhand call --on tag:web --canary 1 Bash command='systemctl reload nginx'
    """
    body: dict[str, Any] = {"tool": tool, "args": read_arguments(arguments, ToolSchema.of(client, tool, arguments))}
    if seconds is not None:
        if not math.isfinite(seconds) or not 0.001 <= seconds <= 86_400:
            raise click.UsageError(f"--timeout takes 0.001 to 86400 seconds, not {seconds:g}.")
        body["timeout_ms"] = round(seconds * 1000)
    if background and follow:
        raise click.UsageError("--background and --follow exclude each other.")
    if options["before"] is not None and not options["when_online"]:
        raise click.UsageError("--before requires --when-online.")
    if options["when_online"] and follow:
        raise click.UsageError("--when-online and --follow exclude each other.")
    if idempotency_key is not None and not (idempotency_key.isascii() and idempotency_key.isprintable()):
        raise click.UsageError(f"--idempotency-key {idempotency_key!r}: use printable ASCII characters.")
    body |= options_given(
        session_key=options["session_key"],
        background=background or follow or None,
        when_online=options["when_online"] or None,
        before=options["before"],
    )
    headers = options_given(**{"Idempotency-Key": idempotency_key})
    fanout = {name: options[name] for name in ("concurrency", "canary", "stop_on_failure", "skip_offline")}
    fanout = {name: value for name, value in fanout.items() if value}
    if targets:
        if background or follow:
            raise click.UsageError("--on waits for all nodes; --background and --follow are for single calls.")
        return call_many(client, {**body, **fanout}, targets, headers)
    if fanout:
        raise click.UsageError(f"--{next(iter(fanout)).replace('_', '-')} requires --on.")
    if follow:
        return _follow(client, body, headers)
    try:
        answer = _invoke(client, body, headers, None if seconds is None else seconds + GRACE_SECONDS)
    except ConnectionLost as lost:
        raise ConnectionLost(f"{lost}; `farhand calls` shows whether the call ran", lost.code) from None
    except KeyboardInterrupt:
        fate = "the call continues: see `farhand calls`" if background or headers else "the gateway cancels the call"
        raise ClientError("interrupted", f"interrupted; {fate}") from None
    show(answer, lambda ended: _show_call(client, tool, ended))
    return 0 if answer.value["ok"] and _command_succeeded(tool, answer.value.get("result")) else 1


def _command_succeeded(tool: str, result: Any) -> bool:
    """Return False for a command of a shell tool that did not end with exit status 0."""
    if not isinstance(result, dict) or not tool.casefold().endswith(SHELL_TOOLS):
        return True
    content = result.get("content")
    if isinstance(content, str) and content.startswith("exit code: "):
        return content.split("\n", 1)[0] == "exit code: 0"
    return result.get("exitCode", 0) in (0, None) and not result.get("signal") and not result.get("timedOut")


def _suggest(client: Client, tool: str, message: str) -> None:
    """Name the tools that are spelled like an unknown one."""
    with contextlib.suppress(ClientError):
        found = client.get("/v1/tools", name=tool).value
        # `Read` alone names the tool of no node, but the gateway finds `laptop__Read`.
        near = [offer["name"] for offer in found["tools"] if offer["name"] != tool] or found.get("similar")
        if near and "did you mean" not in message:
            remark(f"did you mean {' or '.join(map(plain, near))}?")


def _show_call(client: Client, tool: str, ended: dict[str, Any]) -> None:
    if not ended["ok"]:
        show_failure(ended["error"])
        if ended["error"]["kind"] == "not_found":
            _suggest(client, tool, ended["error"]["message"])
    elif ended["state"] == "waiting":
        print(ended["request_id"])
        _announce(client, ended["request_id"])
        remark(f"waiting; cancel it with `farhand calls cancel {ended['request_id']}`")
    elif ended["state"] == "running":
        print(ended["request_id"])
        remark(f"running; `farhand calls show {ended['request_id']}` shows the result")
    else:
        _show_result(ended.get("result"))


def _invoke(client: Client, body: dict[str, Any], headers: dict[str, str], seconds: float | None) -> Answer:
    """Make a call and return its answer, announcing a required approval. Raises ClientError.

    `seconds` limits the time without data.
    """
    waiting = ""
    try:
        with (
            ApprovalPrompt(client, ask=not wants_json()) as prompt,
            client.stream("/v1/tools/invoke", {**body, "stream": True}, headers=headers, seconds=seconds) as events,
        ):
            for name, answer in events:
                if name == "approval_requested":
                    waiting = answer.value["call_id"]
                    prompt.announce(answer.value)
                elif name == "done":
                    return answer
    except KeyboardInterrupt:
        if waiting:  # the gateway keeps it
            fate = f"the call stays open; cancel it with `farhand calls cancel {waiting}`"
            raise ClientError("interrupted", f"interrupted; {fate}") from None
        raise
    raise ConnectionLost("the gateway closed the connection without an answer")


def _announce(client: Client, call_id: str) -> None:
    """Announce the approval of a background call. It may be created a moment after the call is accepted."""
    end = time.monotonic() + ANNOUNCE_SECONDS
    while time.monotonic() < end:
        try:
            record = client.get("/v1/calls/{}", call_id).value
            if record["state"] != "waiting" or record.get("waits_for") != "approval":
                return
            if record.get("approval_id"):
                ApprovalPrompt(client, ask=False).announce_call(record)
                return
        except ClientError:  # this token may not see the call
            return
        time.sleep(0.1)


def _follow(client: Client, body: dict[str, Any], headers: dict[str, str]) -> int:
    """Make a call, print the output of its command until it ends, and report how the call ended."""
    started = client.post("/v1/tools/invoke", body, headers=headers)
    if not started.value["ok"]:
        show(started, lambda value: _show_call(client, body["tool"], value))
        return 1
    path = f"/v1/calls/{started.value['request_id']}"
    printed = False
    try:
        if started.value["state"] == "waiting":
            with ApprovalPrompt(client, ask=not wants_json()) as prompt:
                _poll(client, path, ("waiting",), prompt)
        try:
            for piece in command_output(client, f"{path}/output"):
                printed = True
                write(piece, sys.stderr if wants_json() else sys.stdout)
        except ClientError as error:
            if error.code != "not_found":  # the tool runs no command
                raise
        answer = _poll(client, path, ("running", "waiting"))
    except KeyboardInterrupt:
        if headers:
            raise ClientError("interrupted", "interrupted; the call continues: see `farhand calls`") from None
        ended = client.delete(path).value
        fate = ended["error"]["message"] if "error" in ended else f"the call had already ended: {ended['state']}"
        raise ClientError("interrupted", f"interrupted; {plain_lines(fate)}") from None
    show(answer, lambda record: _show_followed(record, printed))
    succeeded = _command_succeeded(body["tool"], answer.value.get("result"))
    return 0 if answer.value["state"] == "ok" and succeeded else 1


def _poll(client: Client, path: str, states: tuple[str, ...], prompt: ApprovalPrompt | None = None) -> Answer:
    """Return the record of a call once it is in none of `states`, announcing its approval on the way."""
    pause = FIRST_POLL_SECONDS
    while (answer := client.get(path)).value["state"] in states:
        if prompt is not None and answer.value.get("approval_id"):
            prompt.announce_call(answer.value)
            prompt = None
        time.sleep(pause)
        pause = min(pause * 2, MAX_POLL_SECONDS)
    return answer


def _show_followed(record: dict[str, Any], printed: bool) -> None:
    result = record.get("result")
    if record["state"] != "ok":
        show_failure(record["error"])
    elif isinstance(result, dict) and "output" in result:
        # These values come from the node and may be anything.
        signal, milliseconds = result.get("signal"), result.get("durationMs")
        how = f"ended by {signal}" if signal else f"exit status {result.get('exitCode')}"
        lasted = f" after {duration(milliseconds)}" if isinstance(milliseconds, int | float) else ""
        remark(plain(f"{result.get('status', 'ok')}: {how}{lasted}"))
    elif printed:
        remark("ok")
    else:
        _show_result(result)


def _show_result(result: Any) -> None:
    if isinstance(result, dict) and result.keys() == {"content"}:
        result = result["content"]
    show_text(result if isinstance(result, str) else json_text(result))
