"""`sessions`: list sessions; read, stop, restart or fork one."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import click

from farhand.cli.client import Client, url_path
from farhand.cli.commands import client_group, options_given
from farhand.cli.output import (
    Column,
    ago,
    hide,
    local_time,
    paint,
    plain,
    plain_lines,
    remark,
    show,
    show_fields,
    show_list,
)

MAX_RESULT_CHARACTERS = 400
KEY = click.argument("key", default="main")


def _cost(session: dict[str, Any]) -> str:
    cost = session["usage"]["cost"]
    return f"${cost:.4f}" if cost else ""


COLUMNS = [
    Column("SESSION", "key"),
    Column("AGENT", "agent_id"),
    Column("STATE", "state"),
    Column("MESSAGES", "message_count", right=True),
    Column("TOKENS", lambda one: one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"], right=True),
    Column("COST", _cost, right=True, narrow=hide),
    Column("USED", lambda one: ago(one["updated_at"])),
    Column("TITLE", "title", flexible=True),
]


@client_group
@click.option("--limit", type=click.IntRange(1, 1000), default=50, metavar="N", help="How many.  [default: 50]")
@click.option("--all", "every", is_flag=True, help="Include sessions of requests that named none.")
def sessions(limit: int, every: bool, client: Client) -> None:
    """List sessions, most recently used first; read, stop, restart or fork one.

    \b
    Examples:
      farhand sessions
      farhand sessions show main
      farhand sessions history main --limit 5
      farhand sessions stop main
      farhand sessions new main
    """
    answer = client.get("/v1/sessions", limit=limit, all=int(every))
    show_list(answer, "sessions", COLUMNS, "no sessions yet; start one with `farhand chat`")


@sessions.command("show")
@KEY
def show_session(key: str, client: Client) -> None:
    """Show one session: model, state and usage.

    \b
    Example:
      farhand sessions show agent:helper:main
    """

    def render(session: dict[str, Any]) -> None:
        usage = session["usage"]
        waiting = f", {session['waiting']} messages wait" if session["waiting"] else ""
        run = f" (run {session['run_id']}{waiting})" if session["run_id"] else ""
        show_fields(
            {
                "session": session["session_key"],
                "title": session["title"],
                "agent": session["agent_id"],
                "model": session["model"] or "not configured",
                "state": session["state"] + run,
                "parent": session["parent_key"],
                "messages": f"{session['message_count']} ({session['context_tokens']} tokens of context)",
                "used": f"{usage['prompt_tokens']} prompt and {usage['completion_tokens']} completion tokens",
                "cost": _cost(session),
                "compacted": f"{session['compactions']} times" if session["compactions"] else "",
                "earlier": " ".join(session["previous_session_ids"]),
                "last used": f"{local_time(session['updated_at'])} ({ago(session['updated_at'])})",
            }
        )

    show(client.get("/v1/sessions/{}", key), render)


@sessions.command()
@KEY
@click.option("--limit", type=click.IntRange(1, 1000), default=50, metavar="N", help="How many of the last messages.")
@click.option("--all", "every", is_flag=True, help="Include messages from before /new.")
def history(key: str, limit: int, every: bool, client: Client) -> None:
    """Show the messages and tool calls of a session.

    \b
    Examples:
      farhand sessions history
      farhand sessions history main --limit 200 --all --json
    """
    answer = client.get("/v1/sessions/{}/history", key, limit=limit, conversation="all" if every else None)

    def render(value: dict[str, Any]) -> None:
        for message in value["messages"]:
            _show_message(message)
        if not value["messages"]:
            remark(plain(f"the session {key!r} has no messages; `farhand sessions` lists those that have"))

    show(answer, render)


@sessions.command()
@KEY
def stop(key: str, client: Client) -> None:
    """Stop a session's run, the processes it started, and the messages that wait.

    \b
    Example:
      farhand sessions stop main
    """
    answer = client.post(url_path("/v1/sessions/{}/stop", key), {})
    stopped = " ".join(answer.value["stopped"])
    show(answer, f"stopped: {stopped}" if stopped else "", "" if stopped else "nothing was running")


@sessions.command()
@KEY
def new(key: str, client: Client) -> None:
    """Start a new conversation in a session; the old one stays in its history.

    \b
    Example:
      farhand sessions new main
    """
    answer = client.post(url_path("/v1/sessions/{}/messages", key), {"message": "/new", "wait_seconds": 20})
    show(answer, lambda value: print(plain(value["reply"])))


@sessions.command()
@KEY
@click.option("--at", "place", metavar="EVENT", help="Last event, or last message (m57), to copy.  [default: the end]")
@click.option("--to", metavar="KEY", help="Key of the new session.")
def fork(key: str, place: str | None, to: str | None, client: Client) -> None:
    """Create a session that starts with the messages of another one. The other session does not change.

    Events are the numbers that `farhand log --session KEY` shows. A tool call is never separated from its result.

    \b
    Examples:
      farhand sessions fork main --at 1204
      farhand sessions fork main --at m57 --to another-way
      farhand chat --session another-way -m "Now do it differently"
    """
    body = options_given(to=to)
    if place is not None:
        number = place.removeprefix("message:").removeprefix("m")
        if not number.isdecimal() or not 0 < len(number) < 19:
            raise click.BadParameter(f"{place!r} is neither an event (1204) nor a message (m57)", param_hint="--at")
        body["event" if number == place else "message"] = int(number)

    def render(made: dict[str, Any]) -> None:
        print(plain(f"{made['key']}: {made['messages']} messages of {made['source']}, up to message {made['at']}"))
        if made["left_out"]:
            remark(f"left out {made['left_out']} more messages: they contain a call without a result")

    show(client.post(url_path("/v1/sessions/{}/fork", key), body), render)


def _show_message(message: dict[str, Any]) -> None:
    who = f"result of {message.get('name', 'a tool')}" if message["role"] == "tool" else message["role"]
    if message.get("summary"):
        who = "summary of earlier messages"
    print(paint(f"{plain(who)}  {local_time(message['at'])}", bold=True))
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(block.get("text", "[image]") for block in content)
    if message["role"] == "tool" and len(text) > MAX_RESULT_CHARACTERS:
        text = f"{text[:MAX_RESULT_CHARACTERS]} … ({len(text)} characters)"
    if text:
        print(plain_lines(text))
    for use in message.get("tool_calls", ()):
        arguments = use["arguments"]
        with contextlib.suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        print(plain(f"· {use['name']} {arguments}"))
    print()
