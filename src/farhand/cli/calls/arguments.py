"""The arguments of a tool on the command line: KEY=VALUE, JSON, or standard input."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import click


def read_arguments(arguments: Sequence[str]) -> Any:
    """Return the arguments of a tool. Raises click.UsageError that names the invalid argument."""
    if len(arguments) == 1 and (arguments[0] == "-" or arguments[0][:1] in ("{", "[")):
        source = "standard input" if arguments[0] == "-" else "the argument"
        text = sys.stdin.read() if arguments[0] == "-" else arguments[0]
        try:
            return _parse_json(text)
        except ValueError as error:
            reason = "it is empty" if not text.strip() else str(error)
            raise click.UsageError(f"{source} is not JSON: {reason}") from None
    values: dict[str, Any] = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{argument!r} is not KEY=VALUE; JSON must be the only argument, in quotes.")
        if key in values:
            raise click.UsageError(f"{key!r} is given twice.")
        if not argument.isprintable() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise click.UsageError(f"the value of {key!r} is not UTF-8 text.")
        try:
            values[key] = _parse_json(text)
        except ValueError:
            values[key] = text
    return values


def _parse_json(text: str) -> Any:
    """Parse JSON strictly: NaN, infinities and numbers too large for a float raise ValueError."""

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is not a JSON number")
        return value

    try:
        return json.loads(text, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
