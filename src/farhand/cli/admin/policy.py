"""`policy`: the rules in force, which of them decides a call, and what a new policy would have stopped."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import click

from farhand.cli.calls.calls import read_arguments
from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.output import Column, ago, remark, show_answer, show_fields, show_table

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_CALL_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def policy(client: Client, as_json: bool) -> None:
    """Show the rules in force; tell which decides a call; try a policy on the calls that were made.

    The rules are `[policy]` of farhand.toml; a change of the file holds for the next call.

    \b
    Examples:
      farhand policy
      farhand policy explain 0198c0de-7a11-7000-8000-0123456789ab
      farhand policy explain laptop__Bash command='rm -rf build'
      farhand policy replay --since 7d --policy new.toml
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get("/v1/policy")
    if as_json:
        show_answer(answer)
        return
    settings = answer.value
    if not settings["rules"]:
        remark(f"no rules: {settings['default']} everything")
        return
    columns = [Column("RULE"), Column("DECISION"), Column("FITS", flexible=True)]
    rows = [
        [rule["name"] or f"rule {number}", rule["decision"], _conditions(rule)]
        for number, rule in enumerate(settings["rules"], 1)
    ]
    show_table(columns, [*rows, ["default", settings["default"], "anything else"]])


def _conditions(rule: dict[str, Any]) -> str:
    names = ("tool", "node", "route", "args", "origin", "credential", "on_behalf_of", "session")
    return (
        ", ".join(f"{name} {json.dumps(rule[name], ensure_ascii=False)}" for name in names if rule.get(name))
        or "anything"
    )


@policy.command()
@click.argument("what", metavar="CALL | TOOL")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]... | JSON")
@click.option("--origin", default="http", show_default=True, help="Where the call would come from, as cron:backup.")
@click.option("--credential", metavar="ID", help="Whose it would be.")
@click.option("--on-behalf-of", metavar="ID", help="Credential on whose behalf an agent would act.")
@click.option("--session", "session_key", metavar="KEY", help="Session it would belong to.")
@client_command
def explain(
    what: str,
    arguments: tuple[str, ...],
    origin: str,
    credential: str | None,
    on_behalf_of: str | None,
    session_key: str | None,
    client: Client,
    as_json: bool,
) -> None:
    """Name the rule that decides a call: one that was made, by its id, or one that might be.

    \b
    Examples:
      farhand policy explain 0198c0de-7a11-7000-8000-0123456789ab
      farhand policy explain laptop__Write path=/etc/hosts content=x --origin telegram
    """
    body: dict[str, Any] = {"call_id": what}
    if not _CALL_ID.fullmatch(what):
        body = {"tool": what, "args": read_arguments(arguments), "origin": origin}
        body |= {"credential": credential, "on_behalf_of": on_behalf_of, "session_key": session_key}
    answer = client.request("POST", "/v1/policy/explain", body)
    if as_json:
        show_answer(answer)
        return
    found = answer.value
    others = [one["rule"] for one in found["fitting"][1:-1]]
    show_fields(
        [
            ("decision", found["decision"]),
            ("rule", found["rule"] + (f": {found['reason']}" if found["reason"] else "")),
            ("tool", found["tool"]),
            ("node", found["node_id"] or ""),
            ("origin", " < ".join(found["origins"])),
            ("credential", found["credential"]),
            ("on behalf of", found["on_behalf_of"] or ""),
            ("also fit", ", ".join(others)),
            ("call", found["call_id"] or ""),
            ("it ended", found["state"] or ""),
            ("decided then", found["decided_by_rule"] or ""),
            ("approval", found["approval"] or ""),
        ]
    )


@policy.command()
@click.option("--since", default="7d", show_default=True, metavar="AGE", help="How far back: 90m, 12h, 7d, 2w.")
@click.option(
    "--policy", "file", type=click.Path(exists=True, dir_okay=False), help="TOML with the [policy] to try instead."
)
@client_command
def replay(since: str, file: str | None, client: Client, as_json: bool) -> None:
    """Show which of the recorded calls a policy would have stopped or asked about. Nothing is run.

    \b
    Examples:
      farhand policy replay --since 7d
      farhand policy replay --since 24h --policy new.toml --json
    """
    found = re.fullmatch(r"(\d{1,6})([smhdw])", since.strip().lower())
    if found is None:
        raise click.UsageError(f"--since takes an age like 90m, 12h, 7d or 2w, not {since!r}.")
    body: dict[str, Any] = {"since": round((time.time() - int(found[1]) * UNITS[found[2]]) * 1000)}
    if file is not None:
        body["policy"] = _read(Path(file))
    answer = client.request("POST", "/v1/policy/replay", body)
    if as_json:
        show_answer(answer)
        return
    told = answer.value
    if told["stopped"]:
        names = ("call_id", "tool", "decision", "rule", "state")
        columns = [Column("CALL"), Column("TOOL"), Column("DECISION"), Column("RULE"), Column("STATE"), Column("MADE")]
        show_table(columns, [[*(one[name] for name in names), ago(one["at"])] for one in told["stopped"]])
    remark(f"{told['calls']} calls: {told['allow']} allowed, {told['ask']} asked about, {told['deny']} denied")


def _read(path: Path) -> Any:
    """The policy in a file: its table [policy], or the whole of it."""
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClientError("usage", f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ClientError("usage", f"{path} cannot be read: {error.strerror}") from None
    return values.get("policy", values)
