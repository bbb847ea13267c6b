"""`tools`, `nodes`, `fleet` and `logs`: what a gateway offers, its machines, and the gateways beside it."""

from __future__ import annotations

import json
import shlex
from fnmatch import fnmatchcase
from typing import Any

import click

from farhand.cli.client import Client
from farhand.cli.commands import client_command, client_group, complete_nodes, complete_tools
from farhand.cli.json_output import wants_json
from farhand.cli.output import (
    Column,
    ago,
    one_line,
    paint,
    plain,
    plain_lines,
    remark,
    show,
    show_json,
    show_list,
    show_table,
    wrap,
)

# Limits of a node that are one word, and how they are called in the list.
LIMITS = (*((name, name) for name in ("sandbox", "network", "memory", "cpus", "processes", "disk")), ("by", "limits"))

# Hosts of the gateway's own tools.
OWN_HOSTS = ("gsv", "local")
ADD_NODE = "add one with `farhand node pair`"


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _limits(node: dict[str, Any]) -> str:
    """Return the limits that a node announces; it may announce anything."""
    limits = node["runtime"].get("limits") if isinstance(node["runtime"], dict) else None
    if not isinstance(limits, dict):
        return ""

    def names(key: str) -> str:
        value = limits.get(key)
        return " ".join(str(name)[:200] for name in value[:20]) if isinstance(value, list) else ""

    parts = [f"{word} {names(key)}" for word, key in (("only", "root"),) if names(key)]
    parts += ["read-only"] if limits.get("read_only") is True else []
    parts += [f"{word} {names(key)}" for word, key in (("also", "allow_tools"), ("no", "deny_tools")) if names(key)]
    parts += [f"{word} {limits[key][:200]}" for word, key in LIMITS if isinstance(limits.get(key), str) and limits[key]]
    return ", ".join(parts)


TOOL_COLUMNS = [
    Column("TOOL", "name"),
    Column("NODE", "host"),
    Column("DESCRIPTION", lambda offer: next(iter(offer["description"].strip().splitlines()), ""), flexible=True),
]
PARAMETER_COLUMNS = [
    Column("PARAMETER", "name"),
    Column("TYPE", lambda one: _type(one["schema"])),
    Column("NEEDED", lambda one: "yes" if one["needed"] else "no"),
    Column(
        "DEFAULT",
        lambda one: json.dumps(one["schema"]["default"], ensure_ascii=False) if "default" in one["schema"] else "",
        optional=True,
    ),
    Column("DESCRIPTION", lambda one: one_line(str(one["schema"].get("description", ""))), optional=True),
]
COST_COLUMNS = [
    Column("TOOL", "name"),
    Column("TOKENS", "tokens", right=True),
    Column("COUNTED", lambda tool: "each request" if tool["offered"] else "once found"),
]
NODE_COLUMNS = [
    Column("NODE", "node_id"),
    Column("STATE", lambda node: "online" if node["online"] else "offline"),
    Column("SEEN", lambda node: "now" if node["online"] else ago(node["last_seen"])),
    Column("TYPE", "node_type"),
    Column("VERSION", "version"),
    Column("TOOLS", lambda node: len(node["tools"]) or "?", right=True),
    Column("RUNNING", "running", right=True),
    Column(
        "CAPABILITIES",
        lambda node: " ".join(
            [*node["capabilities"], *(f"({one} refused)" for one in node.get("refused_capabilities", ()))]
        ),
        flexible=True,
        optional=True,
    ),
    Column("TAGS", lambda node: " ".join(node["tags"]), flexible=True, optional=True),
    Column("LIMITS", _limits, flexible=True, optional=True),
]

FLEET_COLUMNS = [
    Column("GATEWAY", lambda one: f"{one['id']}{' *' if one['self'] else ''}"),
    Column("VERSION", "version"),
    Column("STARTED", lambda one: ago(one["started_at"])),
    Column("SEEN", lambda one: ago(one["beat_at"])),
    Column("EPOCH", "epoch", right=True),
    Column("NODES", "nodes", right=True),
]
LOG_COLOURS = {"ERROR": "red", "WARN": "yellow"}


@client_command
@click.argument("pattern", required=False, shell_complete=complete_tools)
@click.option("--cost", is_flag=True, help="Show the tokens that the agent's tools and prompt cost per request.")
def tools(pattern: str | None, cost: bool, client: Client) -> None:
    """List the tools that can be called now.

    PATTERN is a part of the name, or a pattern with * and ?. The full name of a tool shows its parameters.

    \b
    Examples:
      farhand tools
      farhand tools read
      farhand tools 'laptop__*'
      farhand tools laptop__Read
      farhand tools --cost
    """
    if cost:
        show(client.get("/v1/tools/cost"), lambda value: _show_cost(value, pattern))
        return
    answer = client.get("/v1/tools")
    offers: list[dict[str, Any]] = answer.value["tools"]
    found = [offer for offer in offers if offer["name"] == pattern]
    found = found or [offer for offer in offers if _matches(offer["name"], pattern)]
    if wants_json():
        show_json(answer if pattern is None else {"tools": found})
    elif not found:
        near = client.get("/v1/tools", name=pattern).value.get("similar") if pattern else None
        hint = f"; did you mean {' or '.join(map(plain, near))}?" if near else f"; there are {len(offers)} tools"
        remark(f"no tool matches {pattern!r}{hint}")
    elif len(found) == 1 and found[0]["name"] == pattern:
        _show_tool(found[0])
    else:
        show_table(TOOL_COLUMNS, found)
        if pattern is None and all(offer["host"] in OWN_HOSTS for offer in offers):
            remark(f"no node is connected; {ADD_NODE}")


def _show_cost(value: dict[str, Any], pattern: str | None) -> None:
    found = [tool for tool in value["tools"] if _matches(tool["name"], pattern)]
    show_table(COST_COLUMNS, sorted(found, key=lambda tool: not tool["offered"]))
    prompt, total = value["prompt_tokens"], value["total_tokens"]
    print(f"\nEach request: {total} tokens, {prompt} for the prompt and {total - prompt} for the tools (estimated).")


def _matches(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    name, pattern = name.casefold(), pattern.casefold()
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def _show_tool(offer: dict[str, Any]) -> None:
    print(f"{paint(plain(offer['name']), bold=True)} on {plain(offer['host'])}")
    if offer["description"]:
        print(wrap(plain_lines(offer["description"].strip())))
    # The schema comes from the node and may be anything.
    properties = offer["parameters"].get("properties")
    required = offer["parameters"].get("required")
    required = required if isinstance(required, list) else []
    if isinstance(properties, dict) and properties:
        print()
        parameters = [
            {"name": name, "schema": schema if isinstance(schema, dict) else {}, "needed": name in required}
            for name, schema in properties.items()
        ]
        show_table(PARAMETER_COLUMNS, parameters)
    example = " ".join(f"{shlex.quote(plain(str(name)))}=…" for name in required)
    print(f"\nfarhand call {shlex.quote(plain(offer['name']))} {example}".rstrip())


@client_group
def nodes(client: Client) -> None:
    """List the registered nodes, including those offline; forget one.

    \b
    Examples:
      farhand nodes
      farhand nodes --json
      farhand nodes forget old-laptop
    """
    show_list(client.get("/v1/nodes"), "nodes", NODE_COLUMNS, f"no nodes yet; {ADD_NODE}")


@nodes.command()
@click.argument("node_id", metavar="ID", shell_complete=complete_nodes)
def forget(node_id: str, client: Client) -> None:
    """Remove an offline node from the list. Its token stays valid; revoke it with `farhand token revoke`.

    \b
    Example:
      farhand nodes forget old-laptop
    """
    show(client.delete("/v1/nodes/{}", node_id), f"forgotten: {node_id}")


@client_command
def fleet(client: Client) -> None:
    """List the gateways that share the store, with the number of nodes connected to each; * is the one that answered.

    \b
    Examples:
      farhand fleet
      farhand fleet --json
    """

    def render(answer: dict[str, Any]) -> None:
        show_table(FLEET_COLUMNS, answer["replicas"])
        if len({one["settings"] for one in answer["replicas"]}) > 1:
            remark("the settings of these gateways differ; give all of them the same farhand.toml and environment")

    show(client.get("/v1/fleet"), render)


@client_command
@click.argument("node_id", metavar="NODE", shell_complete=complete_nodes)
@click.option("-n", "--lines", type=click.IntRange(1, 5000), default=100, show_default=True, help="How many, at most.")
@click.option("--raw", is_flag=True, help="Print the JSON lines as the node wrote them.")
def logs(node_id: str, lines: int, raw: bool, client: Client) -> None:
    """Show the newest lines of a node's log.

    \b
    Examples:
      farhand logs laptop
      farhand logs laptop -n 20 --raw
    """

    def render(value: dict[str, Any]) -> None:
        for line in value["lines"]:
            print(plain(line) if raw else _log_line(line))
        if value["truncated"]:
            count = value["count"]
            remark(f"only the newest {'line' if count == 1 else f'{count} lines'}; --lines shows more")

    show(client.get("/v1/nodes/{}/logs", node_id, lines=lines), render)


def _log_line(line: str) -> str:
    try:
        entry: Any = json.loads(line)
        level = str(entry["level"])
        text = f"{entry['ts']} {level:<5} {entry['event']}: {entry.get('message', '')}"
        more = " ".join(f"{name}={entry[name]}" for name in ("tool", "callId", "durationMs") if name in entry)
    except (ValueError, KeyError, TypeError):
        return plain(line)
    return paint(plain(f"{text} {more}".rstrip()), LOG_COLOURS.get(level))
