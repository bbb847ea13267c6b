"""`config`: the settings a running gateway works with, secrets masked."""

from __future__ import annotations

from typing import Any

import click

from farhand.cli.client import Client, ClientError, client_command
from farhand.cli.output import json_text, plain_lines, remark, show_json


@click.group(invoke_without_command=True, subcommand_metavar="[COMMAND]")
@client_command
def config(client: Client, as_json: bool) -> None:
    """Show the settings of the running gateway: `farhand.toml` in its home, with what the environment overrides.

    \b
    Examples:
      farhand config
      farhand config get gateway.port
    """
    if click.get_current_context().invoked_subcommand is None:
        _show(client, as_json)


@config.command()
@client_command
def show(client: Client, as_json: bool) -> None:
    """Show all settings."""
    _show(client, as_json)


@config.command()
@click.argument("path")
@client_command
def get(path: str, client: Client, as_json: bool) -> int:
    """Show one setting, by its dotted PATH. The status is 1 where there is none.

    \b
    Example:
      farhand config get gateway.hosts.0
    """
    if not path.strip():
        raise click.UsageError("PATH is blank; `farhand config` shows all settings.")
    result = _ask(client, {"path": path})
    value = result["value"]
    if as_json:
        show_json(result)
    elif value is not None:
        print(plain_lines(value) if isinstance(value, str) else json_text(value))
    else:
        remark(f"farhand: nothing is set at {path!r}; `farhand config` shows all settings")
    return 0 if value is not None else 1


def _show(client: Client, as_json: bool) -> None:
    result = _ask(client, {})
    if as_json:
        show_json(result)
    else:
        print(json_text(result["config"]))


def _ask(client: Client, args: dict[str, Any]) -> Any:
    answer = client.request("POST", "/v1/tools/invoke", {"tool": "gsv__ConfigGet", "args": args}).value
    if not answer["ok"]:
        raise ClientError(answer["error"]["kind"], answer["error"]["message"])
    return answer["result"]
