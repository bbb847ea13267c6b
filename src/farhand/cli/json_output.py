"""The `--json` option: exactly one JSON document on standard output. Imports nothing that a node does not need."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click

_META_KEY: Final = "farhand.json"


def _remember(context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    """Store the flag for subcommands: `farhand calls --json show ID` is the same as `farhand calls show ID --json`."""
    context.meta[_META_KEY] = value or wants_json(context)
    return wants_json(context)


def wants_json(context: click.Context | None = None) -> bool:
    """Return whether --json was given to the running command or to a group above it."""
    return bool((context or click.get_current_context()).meta.get(_META_KEY))


def json_option(
    text: str = "Print one JSON document on standard output.", **attributes: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option as a decorator; it passes `as_json` unless `expose_value` is False."""
    return click.option("--json", "as_json", is_flag=True, callback=_remember, help=text, **attributes)


# For a group that does nothing by itself.
group_json_option = json_option("Applies to the subcommand.", expose_value=False)


def print_only(document: dict[str, Any]) -> None:
    """Print the one document of a long-running program; everything it prints later goes to standard error."""
    print(json.dumps(document), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
