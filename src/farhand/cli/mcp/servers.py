"""`mcp`: serve the gateway's tools to MCP clients, and use other MCP servers behind the gateway."""

from __future__ import annotations

import asyncio
import shlex
import time
import webbrowser
from typing import Any, Final

import click

from farhand.cli.client import Client, ClientError, url_path
from farhand.cli.commands import client_group
from farhand.cli.json_output import wants_json
from farhand.cli.mcp.bridge import Bridge
from farhand.cli.mcp.install import install
from farhand.cli.output import (
    Column,
    ago,
    hide,
    on_terminal,
    paint,
    plain,
    remark,
    show,
    show_fields,
    show_json,
    show_list,
)

READY_SECONDS: Final = 30.0
LOGIN_SECONDS: Final = 600.0


def _place(entry: dict[str, Any]) -> str:
    where = entry["url"] or shlex.join(entry["command"])
    return f"{where} on {entry['node']}" if entry["node"] else where


def _tools(entry: dict[str, Any]) -> str:
    held = f", {entry['held']} held back" if entry["held"] else ""
    return f"{len(entry['tools']) - entry['held']}{held}" if entry["state"] == "ready" else "-"


COLUMNS = [
    Column("NAME", "name"),
    Column("STATE", "state"),
    Column("TOOLS", _tools),
    Column("SINCE", lambda entry: ago(entry["since"]) if entry["since"] else "", narrow=hide),
    Column("SERVER", _place),
    Column("ERROR", lambda entry: entry["error"] or "", optional=True),
]


@client_group
def mcp(client: Client) -> None:
    """Use MCP servers behind the gateway, or serve the gateway's tools to an MCP client.

    Without a command: serve the tools on standard input and output, for clients that start a program. Clients that
    accept a URL use /mcp of the gateway itself. Input and output are lines of JSON-RPC, with or without --json.

    \b
    Examples:
      farhand mcp add time -- uvx mcp-server-time
      farhand mcp add notes --url https://notes.example.com/mcp
      farhand mcp list
      farhand mcp install claude-code
    In the settings of a client that starts a program:
      {"mcpServers": {"farhand": {"command": "farhand", "args": ["mcp"]}}}
    """
    asyncio.run(Bridge(client.find()).run())


mcp.add_command(install)


@mcp.command(address=False)
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--url", "server_url", metavar="URL", help="The server's address (streamable HTTP), instead of a command."
)
@click.option(
    "--node", default="", metavar="ID", help="Run the command on this node.  [default: the gateway's machine]"
)
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="A variable for the command. Repeatable.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="A header for --url. Repeatable.")
@click.option("--cwd", default="", metavar="DIR", help="The folder the command runs in.  [default: the workspace]")
@click.option("--read-only", "read_only", multiple=True, metavar="PATTERN", help="Tools that only read. Repeatable.")
@click.option("--hold-new", is_flag=True, help="Hold back tools that appear later until you accept them.")
@click.option(
    "--elicitation",
    type=click.Choice(["no", "decline", "defaults"]),
    default="no",
    show_default=True,
    help="How requests for input are answered.",
)
@click.option(
    "--sampling",
    type=click.Choice(["no", "model"]),
    default="no",
    show_default=True,
    help="Whether the server may use the agent's model.",
)
def add(client: Client, name: str, command: tuple[str, ...], server_url: str | None, **options: Any) -> None:
    """Add an MCP server: its tools are called NAME__TOOL, through the gateway like any other.

    \b
    Examples:
      farhand mcp add time -- uvx mcp-server-time
      farhand mcp add files --node laptop -- mcp-server-filesystem /src
      farhand mcp add notes --url https://notes.example.com/mcp
    """
    if bool(command) == bool(server_url):
        raise click.UsageError("Give either --url URL, or -- COMMAND ARGUMENT...")
    body: dict[str, Any] = {
        **options,
        "name": name,
        "env": _pairs(options["env"], "=", "--env"),
        "headers": _pairs(options["headers"], ":", "--header"),
        "read_only": list(options["read_only"]),
    }
    body |= {"url": server_url} if server_url else {"command": list(command)}
    client.post("/v1/mcp/servers", body)
    entry = _settled(client, name)
    names = ", ".join(f"{name}__{tool['name']}" for tool in entry["tools"])
    texts = {
        "ready": f"added: {name} with {len(entry['tools'])} tools" + (f": {names}" if names else ""),
        "login_required": f"added: {name}; it requires a login: run `farhand mcp login {name}`",
        "starting": f"added: {name}; it is still starting, see `farhand mcp list`",
    }
    if entry["state"] not in texts and not wants_json():
        raise ClientError(
            "mcp_server_failed",
            f"the MCP server {name!r} was added, but cannot be used: {entry['error']}; it is tried again, and "
            f"`farhand mcp remove {name}` removes it",
        )
    show(entry, texts.get(entry["state"], ""))


@mcp.command("list")
def list_(client: Client) -> None:
    """List the MCP servers and their state.

    \b
    Example:
      farhand mcp list
    """
    empty = "no MCP servers; `farhand mcp add NAME -- COMMAND` adds one"
    answer = client.get("/v1/mcp/servers")
    show_list(answer, "servers", COLUMNS, empty)
    held = [entry["name"] for entry in answer.value["servers"] if entry["held"]]
    if held and not wants_json():
        remark(f"\nTools are held back because they changed: see `farhand mcp show {held[0]}`.")


@mcp.command("show")
@click.argument("name")
def show_server(client: Client, name: str) -> None:
    """Show one MCP server with its tools, and what has changed in those that are held back.

    \b
    Example:
      farhand mcp show time
    """

    def render(entry: dict[str, Any]) -> None:
        show_fields(
            {
                "name": entry["name"],
                "state": entry["state"],
                "error": entry["error"],
                "server": _place(entry),
                "env": " ".join(entry["env"]),
                "headers": " ".join(entry["headers"]),
                "restarts": entry["restarts"],
            }
        )
        for tool in entry["tools"]:
            _show_tool(entry["name"], tool)
        if entry["held"]:
            hint = f"`farhand mcp accept {name}`, or some with `farhand mcp accept {name} TOOL`"
            remark(f"\nAccept the changes with {hint}.")

    show(client.get("/v1/mcp/servers/{}", name), render)


def _show_tool(server: str, tool: dict[str, Any]) -> None:
    name = plain(f"{server}__{tool['name']}")
    print(f"\n{paint(name, bold=True)}")
    if tool["held"]:
        print(f"  {paint('held back', 'yellow')}: {plain(tool['held'])}")
    if tool["accepted_description"] is not None:
        print(f"  {paint('before:', dim=True)} {plain(tool['accepted_description'])}")
        print(f"  {paint('now:', dim=True)}    {plain(tool['description'])}")
    else:
        print(f"  {plain(tool['description'])}")


@mcp.command()
@click.argument("name")
@click.argument("tools", nargs=-1, metavar="[TOOL]...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def accept(client: Client, name: str, tools: tuple[str, ...], yes: bool) -> None:
    """Accept the tools of an MCP server that are held back, as they are described now.

    \b
    Examples:
      farhand mcp accept time
      farhand mcp accept time convert_time --yes
    """
    entry = client.get("/v1/mcp/servers/{}", name).value
    chosen = [tool for tool in entry["tools"] if (tool["name"] in tools if tools else tool["held"])]
    if on_terminal() and not yes and not wants_json() and chosen:
        for tool in chosen:
            _show_tool(name, tool)
        click.confirm("\nOffer these tools to models and callers?", abort=True)
    body = {"tools": list(tools), "digests": {tool["name"]: tool["digest"] for tool in chosen}}
    answer = client.post(url_path("/v1/mcp/servers/{}/accept", name), body)
    show(answer, f"accepted: {', '.join(tool['name'] for tool in chosen) or 'nothing was held back'}")


@mcp.command()
@click.argument("name")
def remove(client: Client, name: str) -> None:
    """Disconnect an MCP server and forget it, with what was accepted and its login.

    \b
    Example:
      farhand mcp remove time
    """
    show(client.delete("/v1/mcp/servers/{}", name), f"removed: {name}")


@mcp.command()
@click.argument("name")
def restart(client: Client, name: str) -> None:
    """Reconnect an MCP server.

    \b
    Example:
      farhand mcp restart time
    """
    answer = client.post(url_path("/v1/mcp/servers/{}/restart", name))
    show(answer, f"restarted: {name}; see `farhand mcp list`")


@mcp.command()
@click.argument("name")
@click.option("--browser/--no-browser", default=True, help="Open the page in a browser of this machine.")
@click.option("--redirected", metavar="URL", help="The address of the page that the browser could not open.")
def login(client: Client, name: str, browser: bool, redirected: str | None) -> None:
    """Log in to a remote MCP server with OAuth.

    The browser returns to the gateway. If it cannot reach the gateway, copy the address of the page that failed and
    pass it with --redirected.

    \b
    Examples:
      farhand mcp login notes
      farhand mcp login notes --redirected 'http://localhost:3210/…'
    """
    path = url_path("/v1/mcp/servers/{}/login", name)
    if redirected is None:
        url = client.post(path, {}).value["authorize_url"]
        if wants_json():
            show_json({"authorize_url": url})
            return
        print(f"Open this page to log in:\n  {plain(url)}")
        if browser and on_terminal():
            webbrowser.open(url)
    else:
        client.post(path, {"url": redirected})
    entry = _settled(client, name, LOGIN_SECONDS, ("ready", "failed", "login_required") if redirected else ("ready",))
    if entry["state"] != "ready":
        raise ClientError("mcp_login_failed", f"the login to {name!r} failed: {entry['error']}")
    show(entry, f"logged in: {name} with {len(entry['tools'])} tools")


def _settled(
    client: Client,
    name: str,
    seconds: float = READY_SECONDS,
    states: tuple[str, ...] = ("ready", "failed", "login_required", "frozen", "disabled"),
) -> Any:
    """Return a server once it is in one of these states, or as it is after some time."""
    deadline = time.monotonic() + seconds
    while True:
        entry = client.get("/v1/mcp/servers/{}", name).value
        if entry["state"] in states or time.monotonic() > deadline:
            return entry
        time.sleep(0.2)


def _pairs(given: tuple[str, ...], separator: str, option: str) -> dict[str, str]:
    found = {}
    for text in given:
        name, found_separator, value = text.partition(separator)
        if not found_separator or not name.strip():
            raise click.UsageError(f"{option} takes NAME{separator}VALUE, not {text!r}.")
        found[name.strip()] = value.strip() if separator == ":" else value
    return found
