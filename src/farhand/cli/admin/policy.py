"""`policy`: the rules for calls, which rule decides a call, and what other rules would have decided."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import click

from farhand.cli.calls.arguments import ToolSchema, read_arguments
from farhand.cli.client import Client, ClientError
from farhand.cli.commands import Age, client_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import Column, ago, hide, id_column, remark, show, show_fields, show_json, show_table

CALL_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
CONDITIONS = ("tool", "node", "route", "args", "origin", "credential", "on_behalf_of", "session")


def _conditions(rule: dict[str, Any]) -> str:
    given = [f"{name} {json.dumps(rule[name], ensure_ascii=False)}" for name in CONDITIONS if rule.get(name)]
    return ", ".join(given) or "anything"


def _caller(one: dict[str, Any]) -> str:
    behalf = f" for {one['on_behalf_of']}" if one["on_behalf_of"] else ""
    return f"{one['credential']}{behalf}, {' < '.join(one['origins'])}"


RULE_COLUMNS = [
    Column("RULE", lambda rule: rule["name"]),
    Column("DECISION", "decision"),
    Column("MATCHES", _conditions, flexible=True),
]
ALWAYS_COLUMNS = [
    Column("ALWAYS", "id"),
    Column("TOOL", "tool"),
    Column("NODE", "node_id", optional=True),
    Column("ARGUMENTS", lambda one: json.dumps(one["args"], ensure_ascii=False), flexible=True),
    Column("CALLER", _caller, flexible=True),
    Column("MADE", lambda one: ago(one["created_at"]), narrow=hide),
]
REPLAY_COLUMNS = [
    id_column("CALL", "call_id"),
    Column("TOOL", "tool"),
    Column("DECISION", "decision"),
    Column("RULE", "rule"),
    Column("STATE", "state"),
    Column("MADE", lambda one: ago(one["at"])),
]


@client_group
def policy(client: Client) -> None:
    """Show the rules; explain which one decides a call; test other rules on recorded calls.

    The rules are in `[policy]` of farhand.toml; a change applies to the next call. Below them are the calls that are
    approved permanently and run without asking; `farhand policy forget` removes one.

    \b
    Examples:
      farhand policy
      farhand policy explain 0198c0de-7a11-7000-8000-0123456789ab
      farhand policy explain laptop__Bash command='rm -rf build'
      farhand policy replay --since 7d --policy new.toml
      farhand policy forget 3f2a91c0
    """
    answer, standing = client.get("/v1/policy"), client.get("/v1/policy/always").value["approvals"]
    if wants_json():
        show_json({**answer.value, "always": standing})
        return
    settings = answer.value
    rules = [{**rule, "name": rule["name"] or f"rule {n}"} for n, rule in enumerate(settings["rules"], 1)]
    if rules:
        show_table(RULE_COLUMNS, [*rules, {"name": "default", "decision": settings["default"]}])
    else:
        remark(f"no rules: {settings['default']} everything")
    if standing:
        print()
        show_table(ALWAYS_COLUMNS, standing)


@policy.command()
@click.argument("standing_id", metavar="ID")
def forget(standing_id: str, client: Client) -> None:
    """Remove a permanent approval; the next such call needs an approval again.

    \b
    Example:
      farhand policy forget 3f2a91c0
    """
    show(client.delete("/v1/policy/always/{}", standing_id), f"removed: {standing_id}")


@policy.command()
@click.argument("what", metavar="CALL | TOOL")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]... | JSON")
@click.option("--origin", default="http", show_default=True, help="Origin of the call, such as cron:backup.")
@click.option("--credential", metavar="ID", help="Credential that makes the call.")
@click.option("--on-behalf-of", metavar="ID", help="Credential on whose behalf an agent acts.")
@click.option("--session", "session_key", metavar="KEY", help="Session of the call.")
def explain(what: str, arguments: tuple[str, ...], client: Client, **principal: str | None) -> None:
    """Show which rule decides a call: a recorded one, by its id, or a hypothetical one.

    \b
    Examples:
      farhand policy explain 0198c0de-7a11-7000-8000-0123456789ab
      farhand policy explain laptop__Write path=/etc/hosts --origin telegram
    """

    def render(found: dict[str, Any]) -> None:
        show_fields(
            {
                "decision": found["decision"],
                "rule": found["rule"] + (f": {found['reason']}" if found["reason"] else ""),
                "tool": found["tool"],
                "node": found["node_id"],
                "origin": " < ".join(found["origins"]),
                "credential": found["credential"],
                "on behalf of": found["on_behalf_of"],
                "also match": ", ".join(one["rule"] for one in found["fitting"][1:-1]),
                "call": found["call_id"],
                "ended": found["state"],
                "decided then": found["decided_by_rule"],
                "approval": found["approval"],
            }
        )

    body: dict[str, Any] = {"call_id": what}
    if not CALL_ID.fullmatch(what):
        body = {"tool": what, "args": read_arguments(arguments, ToolSchema.of(client, what, arguments)), **principal}
    show(client.post("/v1/policy/explain", body), render)


@policy.command()
@click.option("--since", type=Age(), default="7d", show_default=True, metavar="AGE", help="How far back: 90m, 12h, 2w.")
@click.option(
    "--policy", "file", type=click.Path(exists=True, dir_okay=False), help="TOML file with the [policy] to test."
)
def replay(since: float, file: str | None, client: Client) -> None:
    """Show which recorded calls a policy would have denied or asked about. Nothing is run.

    \b
    Examples:
      farhand policy replay --since 7d
      farhand policy replay --since 24h --policy new.toml --json
    """

    def render(report: dict[str, Any]) -> None:
        if report["stopped"]:
            show_table(REPLAY_COLUMNS, report["stopped"])
        counts = f"{report['allow']} allowed, {report['ask']} asked about, {report['deny']} denied"
        counts += f", {report['trial']} as a trial only" if report["trial"] else ""
        remark(f"{report['calls']} calls: {counts}")

    body: dict[str, Any] = {"since": round(max(0.0, time.time() - since) * 1000)}
    if file is not None:
        body["policy"] = _read_policy(Path(file))
    show(client.post("/v1/policy/replay", body), render)


def _read_policy(path: Path) -> Any:
    """Return the table [policy] of a file, or the whole file if it has none."""
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClientError("usage", f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ClientError("usage", f"cannot read {path}: {error.strerror}") from None
    return values.get("policy", values)
