"""`sessions`, with `show`, `history`, `stop` and `new`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import (
    Column,
    ago,
    moment,
    paint,
    plain,
    plain_lines,
    remark,
    show_answer,
    show_fields,
    show_table,
)

SHOWN_RESULT = 400


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, metavar="N", help="How many.  [default: 50]")
@click.option("--all", "every", is_flag=True, help="Also those of requests that named no session.")
@client_command
def sessions(limit: int, every: bool, client: Client, as_json: bool) -> None:
    """List conversations with agents, those used last first; read, stop or renew one.

    \b
    Examples:
      farhand sessions
      farhand sessions show main
      farhand sessions history main --limit 5
      farhand sessions stop main
      farhand sessions new main
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get(f"/v1/sessions?limit={limit}&all={int(every)}")
    if as_json:
        show_answer(answer)
        return
    if not answer.value["sessions"]:
        remark("no conversations yet: `farhand chat` begins one")
        return
    columns = [
        Column("SESSION"),
        Column("AGENT"),
        Column("STATE"),
        Column("MESSAGES", right=True),
        Column("TOKENS", right=True),
        Column("COST", right=True),
        Column("USED"),
        Column("TITLE", flexible=True),
    ]
    rows = [
        [
            session["key"],
            session["agent_id"],
            session["state"],
            str(session["message_count"]),
            str(session["usage"]["prompt_tokens"] + session["usage"]["completion_tokens"]),
            _cost(session),
            ago(session["updated_at"]),
            session["title"],
        ]
        for session in answer.value["sessions"]
    ]
    show_table(columns, rows)


@sessions.command()
@click.argument("key", default="main")
@client_command
def show(key: str, client: Client, as_json: bool) -> None:
    """Show one session: its model, what it is doing, what it has used.

    \b
    Example:
      farhand sessions show agent:helper:main
    """
    answer = client.get(_path(key))
    if as_json:
        show_answer(answer)
        return
    session, usage = answer.value, answer.value["usage"]
    waiting = f", {session['waiting']} messages wait" if session["waiting"] else ""
    show_fields(
        [
            ("session", session["session_key"]),
            ("title", session["title"]),
            ("agent", session["agent_id"]),
            ("model", session["model"] or "none is set up"),
            ("state", session["state"] + (f" (run {session['run_id']}{waiting})" if session["run_id"] else "")),
            ("parent", session["parent_key"] or ""),
            ("messages", f"{session['message_count']} ({session['context_tokens']} tokens of context)"),
            ("used", f"{usage['prompt_tokens']} prompt and {usage['completion_tokens']} completion tokens"),
            ("cost", _cost(session)),
            ("compacted", f"{session['compactions']} times" if session["compactions"] else ""),
            ("earlier", " ".join(session["previous_session_ids"])),
            ("used last", f"{moment(session['updated_at'])} ({ago(session['updated_at'])})"),
        ]
    )


@sessions.command()
@click.argument("key", default="main")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, metavar="N", help="How many of the last.")
@click.option("--all", "every", is_flag=True, help="Also what was said before /new.")
@client_command
def history(key: str, limit: int, every: bool, client: Client, as_json: bool) -> None:
    """Show what was said and done in a session.

    \b
    Examples:
      farhand sessions history
      farhand sessions history main --limit 200 --all --json
    """
    query = urlencode({"limit": limit, **({"conversation": "all"} if every else {})})
    answer = client.get(f"{_path(key)}/history?{query}")
    if as_json:
        show_answer(answer)
        return
    for message in answer.value["messages"]:
        _show_message(message)


@sessions.command()
@click.argument("key", default="main")
@client_command
def stop(key: str, client: Client, as_json: bool) -> None:
    """Stop a session's run, every process it started, and what waits behind it.

    \b
    Example:
      farhand sessions stop main
    """
    answer = client.request("POST", f"{_path(key)}/stop", {})
    if as_json:
        show_answer(answer)
    elif answer.value["stopped"]:
        print(f"stopped: {' '.join(answer.value['stopped'])}")
    else:
        remark("nothing was running")


@sessions.command()
@click.argument("key", default="main")
@client_command
def new(key: str, client: Client, as_json: bool) -> None:
    """Begin a new conversation in a session; the old one stays in its history.

    \b
    Example:
      farhand sessions new main
    """
    answer = client.request("POST", f"{_path(key)}/messages", {"message": "/new", "wait_seconds": 20})
    if as_json:
        show_answer(answer)
    else:
        print(plain(answer.value["reply"]))


@sessions.command()
@click.argument("key", default="main")
@click.option("--at", "place", metavar="EVENT", help="Up to this event, or up to a message: m57.  [default: the end]")
@click.option("--to", metavar="KEY", help="Key of the new session.")
@client_command
def fork(key: str, place: str | None, to: str | None, client: Client, as_json: bool) -> None:
    """Make a session that begins with what was said in another, up to a moment. The other one stays as it is.

    Events are the numbers that `farhand log --session KEY` shows. A tool call is never parted from its result.

    \b
    Examples:
      farhand sessions fork main --at 1204
      farhand sessions fork main --at m57 --to another-way
      farhand chat --session another-way -m "Now do it differently"
    """
    body: dict[str, Any] = {} if to is None else {"to": to}
    if place is not None:
        number = place.removeprefix("message:").removeprefix("m")
        if not number.isdecimal() or not 0 < len(number) < 19:
            raise click.BadParameter(f"{place!r} is neither an event (1204) nor a message (m57)", param_hint="--at")
        body["event" if number == place else "message"] = int(number)
    answer = client.request("POST", f"{_path(key)}/fork", body)
    if as_json:
        show_answer(answer)
        return
    made = answer.value
    print(plain(f"{made['key']}: {made['messages']} messages of {made['source']}, up to message {made['at']}"))
    if made["left_out"]:
        remark(f"{made['left_out']} more were left out: a call in them had no result by then")


def _show_message(message: dict[str, Any]) -> None:
    who = f"result of {message.get('name', 'a tool')}" if message["role"] == "tool" else message["role"]
    if message.get("summary"):
        who = "summary of what came before"
    print(paint(f"{plain(who)}  {moment(message['at'])}", bold=True))
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(block.get("text", "[image]") for block in content)
    if message["role"] == "tool" and len(text) > SHOWN_RESULT:
        text = f"{text[:SHOWN_RESULT]} … ({len(text)} characters)"
    if text:
        print(plain_lines(text))
    for use in message.get("tool_calls", ()):
        print(plain(f"· {use['name']} {_arguments(use['arguments'])}"))
    print()


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text


def _cost(session: dict[str, Any]) -> str:
    cost = session["usage"]["cost"]
    return f"${cost:.4f}" if cost else ""


def _path(key: str) -> str:
    return f"/v1/sessions/{quote(key, safe='')}"
