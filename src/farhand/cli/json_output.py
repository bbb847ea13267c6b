"""`--json`: exactly one JSON document on standard output. Light: nodes have it too."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click

_ASKED: Final = "farhand.json"


def _asked(context: click.Context, _parameter: click.Parameter, value: bool) -> bool:
    """A command takes over what was said to its group: `farhand calls --json show ID` means what it says."""
    context.meta[_ASKED] = value or asked_for_json(context)
    return asked_for_json(context)


def asked_for_json(context: click.Context) -> bool:
    return bool(context.meta.get(_ASKED))


def json_option(
    text: str = "One JSON document on standard output.", **attributes: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, callback=_asked, help=text, **attributes)


# For a group that does nothing by itself.
group_json_option = json_option("As with each of its commands.", expose_value=False)
# For a command whose standard output belongs to somebody else.
without_effect = json_option(
    "Taken, without effect: standard output is that of the command that runs.", expose_value=False
)


def show_only(document: dict[str, Any]) -> None:
    """Print the one document of a program that stays; from now on what it prints goes to standard error."""
    print(json.dumps(document), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
