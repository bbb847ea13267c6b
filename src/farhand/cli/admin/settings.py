"""`config`: the settings of a running gateway, secrets masked."""

from __future__ import annotations

import contextlib
import difflib
from typing import Any

import click

from farhand.cli.client import Client, ClientError
from farhand.cli.commands import client_group
from farhand.cli.json_output import wants_json
from farhand.cli.output import json_text, plain, plain_lines, remark, show_json

TOOL = "gsv__ConfigGet"


@client_group
def config(client: Client) -> None:
    """Show the settings of the running gateway: `farhand.toml` in its home, and overrides from the environment.

    \b
    Examples:
      farhand config
      farhand config get gateway.port
    """
    result = client.invoke(TOOL, {})
    if wants_json():
        show_json(result)
    else:
        print(json_text(result["config"]))
        with contextlib.suppress(ClientError):  # a token without the scope `read`
            if waiting := client.get("/v1/health").value.get("restart_needed"):
                remark(f"changed in the file, and applied after a restart: {', '.join(map(plain, waiting))}")


config.add_alias("show", "Show all settings.")


@config.command()
@click.argument("path")
def get(path: str, client: Client) -> int:
    """Show one setting by its dotted PATH. The exit status is 1 if it is not set.

    \b
    Example:
      farhand config get gateway.hosts.0
    """
    if not path.strip():
        raise click.UsageError("PATH is blank; `farhand config` shows all settings.")
    result = client.invoke(TOOL, {"path": path})
    value = result["value"]
    if wants_json():
        show_json(result)
    elif value is None:
        near = difflib.get_close_matches(path, _paths(client.invoke(TOOL, {})["config"]), 1)
        hint = f"did you mean {plain(near[0])}?" if near else "`farhand config` shows all settings"
        remark(f"farhand: {path!r} is not set; {hint}")
    else:
        print(plain_lines(value) if isinstance(value, str) else json_text(value))
    return 1 if value is None else 0


def _paths(values: Any, above: str = "") -> list[str]:
    """Return the dotted path of every setting."""
    if not isinstance(values, dict) or not values:
        return [above]
    return [path for name, value in values.items() for path in _paths(value, f"{above}.{name}" if above else str(name))]
