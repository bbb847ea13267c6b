"""`tools` and `nodes`: what there is."""

from __future__ import annotations

import json
import shlex
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

import click

from farhand.cli.client import Client, client_command
from farhand.cli.output import Column, ago, paint, plain, plain_lines, remark, show_answer, show_json, show_table, wrap

# Tools the gateway has without any node.
OWN_HOSTS = ("gsv", "local")


@click.command()
@click.argument("pattern", required=False)
@click.option("--cost", is_flag=True, help="What the agent's tools and prompt cost in each request, in tokens.")
@client_command
def tools(pattern: str | None, cost: bool, client: Client, as_json: bool) -> None:
    """List the tools that can be called now.

    PATTERN is a part of the name, or a pattern with * and ?. The whole name of a tool shows its parameters.

    \b
    Examples:
      farhand tools
      farhand tools read
      farhand tools 'laptop__*'
      farhand tools node.fs.read_text
      farhand tools --cost
    """
    if cost:
        _show_cost(client, pattern, as_json)
        return
    answer = client.get("/v1/tools")
    offers: list[dict[str, Any]] = answer.value["tools"]
    if pattern is None:
        found = offers
    else:
        found = [offer for offer in offers if offer["name"] == pattern] or [
            offer for offer in offers if _matches(offer["name"], pattern)
        ]
    if as_json:
        if pattern is None:
            show_answer(answer)
        else:
            show_json({"tools": found})
    elif not found:
        remark(f"no tool matches {pattern!r}; there are {len(offers)}")
    elif len(found) == 1 and found[0]["name"] == pattern:
        _show_tool(found[0])
    else:
        columns = [Column("TOOL"), Column("NODE"), Column("DESCRIPTION", flexible=True)]
        show_table(columns, [[offer["name"], offer["host"], _first_line(offer["description"])] for offer in found])
        if pattern is None and all(offer["host"] in OWN_HOSTS for offer in offers):
            remark("no node is connected: `farhand token create --node NAME` lets one join.")


def _show_cost(client: Client, pattern: str | None, as_json: bool) -> None:
    answer = client.get("/v1/tools/cost")
    if as_json:
        show_answer(answer)
        return
    found = [tool for tool in answer.value["tools"] if pattern is None or _matches(tool["name"], pattern)]
    offered = [tool for tool in found if tool["offered"]]
    rows = [[tool["name"], str(tool["tokens"]), "each request"] for tool in offered]
    rows += [[tool["name"], str(tool["tokens"]), "once found"] for tool in found if not tool["offered"]]
    show_table([Column("TOOL"), Column("TOKENS", right=True), Column("COUNTED")], rows)
    prompt, total = answer.value["prompt_tokens"], answer.value["total_tokens"]
    print(f"\nEach request: {total} tokens, {prompt} of the prompt and {total - prompt} of its tools (estimated).")


def _matches(name: str, pattern: str) -> bool:
    name, pattern = name.casefold(), pattern.casefold()
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _show_tool(offer: dict[str, Any]) -> None:
    print(f"{paint(plain(offer['name']), bold=True)} on {plain(offer['host'])}")
    if offer["description"]:
        print(wrap(plain_lines(offer["description"].strip())))
    properties = offer["parameters"].get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = offer["parameters"].get("required")
    required = required if isinstance(required, list) else []
    if properties:
        print()
        columns = [Column("PARAMETER"), Column("TYPE"), Column("NEEDED"), Column("DEFAULT"), Column("DESCRIPTION")]
        rows = [
            [name, _type(schema), "yes" if name in required else "no", _default(schema), _description(schema)]
            for name, schema in properties.items()
        ]
        used = [place for place in range(5) if place < 3 or any(row[place] for row in rows)]
        show_table([columns[place] for place in used], [[row[place] for place in used] for row in rows])
    example = " ".join(f"{shlex.quote(plain(str(name)))}=…" for name in required)
    print(f"\nfarhand call {shlex.quote(plain(offer['name']))} {example}".rstrip())


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _default(schema: Any) -> str:
    if isinstance(schema, dict) and "default" in schema:
        return json.dumps(schema["default"], ensure_ascii=False)
    return ""


def _description(schema: Any) -> str:
    return " ".join(str(schema.get("description", "")).split()) if isinstance(schema, dict) else ""


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def nodes(client: Client, as_json: bool) -> None:
    """List the machines that joined, those that are offline too; forget one.

    \b
    Examples:
      farhand nodes
      farhand nodes --json
      farhand nodes forget old-laptop
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    answer = client.get("/v1/nodes")
    if as_json:
        show_answer(answer)
    elif not answer.value["nodes"]:
        remark("no node has joined yet. `farhand token create --node NAME` lets one join.")
    else:
        _show_nodes(answer.value["nodes"])


def _show_nodes(entries: list[dict[str, Any]]) -> None:
    columns = [
        Column("NODE"),
        Column("STATE"),
        Column("SEEN"),
        Column("TYPE"),
        Column("VERSION"),
        Column("TOOLS", right=True),
        Column("RUNNING", right=True),
        Column("CAPABILITIES", flexible=True),
        Column("TAGS", flexible=True),
        Column("LIMITS", flexible=True),
    ]
    rows = [
        [
            node["node_id"],
            "online" if node["online"] else "offline",
            "now" if node["online"] else ago(node["last_seen"]),
            node["node_type"] or "",
            node["version"] or "",
            str(len(node["tools"])) if node["tools"] else "?",
            str(node["running"]),
            " ".join([*node["capabilities"], *(f"({one} refused)" for one in node.get("refused_capabilities", ()))]),
            " ".join(node["tags"]),
            _limits(node["runtime"]),
        ]
        for node in entries
    ]
    shown = [place for place, column in enumerate(columns) if not column.flexible or any(row[place] for row in rows)]
    show_table([columns[place] for place in shown], [[row[place] for place in shown] for row in rows])


def _limits(runtime: Any) -> str:
    """Return what a node says of its limits; it may say anything."""
    limits = runtime.get("limits") if isinstance(runtime, dict) else None
    if not isinstance(limits, dict):
        return ""

    def names(key: str) -> list[str]:
        value = limits.get(key)
        return [str(name)[:200] for name in value[:20]] if isinstance(value, list) else []

    parts = [f"only {' '.join(names('root'))}"] if names("root") else []
    parts += ["read-only"] if limits.get("read_only") is True else []
    parts += [f"also {' '.join(names('allow_tools'))}"] if names("allow_tools") else []
    parts += [f"no {' '.join(names('deny_tools'))}"] if names("deny_tools") else []
    return ", ".join(parts)


@nodes.command()
@click.argument("node_id", metavar="ID")
@client_command
def forget(node_id: str, client: Client, as_json: bool) -> None:
    """Take an offline node off the list. Its token stays valid: `farhand token revoke` ends that.

    \b
    Example:
      farhand nodes forget old-laptop
    """
    answer = client.request("DELETE", f"/v1/nodes/{quote(node_id, safe='')}")
    if as_json:
        show_answer(answer)
    else:
        print(f"forgotten: {plain(node_id)}")
