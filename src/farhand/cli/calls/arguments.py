"""The arguments of a tool on the command line: KEY=VALUE, KEY=@FILE, KEY:=JSON, JSON, or standard input.

A VALUE has the type that the tool's schema gives to the parameter, so that `command=false` is text for a command.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from farhand.cli.client import Client, ClientError

# The types of JSON as schemas call them.
TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
MAX_DEPTH: Final = 8


def read_arguments(arguments: Sequence[str], tool: ToolSchema | None = None) -> Any:
    """Return the arguments of a tool. Raises click.UsageError that names the invalid argument."""
    if len(arguments) == 1 and (arguments[0] == "-" or arguments[0][:1] in ("{", "[")):
        source = "standard input" if arguments[0] == "-" else "the argument"
        text = sys.stdin.read() if arguments[0] == "-" else arguments[0]
        try:
            return _parse_json(text)
        except ValueError as error:
            reason = "it is empty" if not text.strip() else str(error)
            raise click.UsageError(f"{source} is not JSON: {reason}") from None
    tool = tool or ToolSchema({})
    values: dict[str, Any] = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key.removesuffix(":"):
            raise click.UsageError(f"{argument!r} is not KEY=VALUE; JSON must be the only argument, in quotes.")
        if not argument.isprintable() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise click.UsageError(f"the value of {key!r} is not UTF-8 text.")
        value = _read_json(key, text) if key.endswith(":") else tool.read(key, *_content(key, text))
        key = key.removesuffix(":")
        if key in values and isinstance(values[key], list) and isinstance(value, list):
            value = [*values[key], *value]
        elif key in values:
            raise click.UsageError(f"{key!r} is given twice.")
        values[key] = value
    return values


class ToolSchema:
    """The parameters of a tool, as its node announces them: the schema may be anything."""

    def __init__(self, schema: Any, aliases: Mapping[str, str] | None = None) -> None:
        self._schema = schema if isinstance(schema, dict) else {}
        self._aliases = aliases or {}

    @classmethod
    def of(cls, client: Client, name: str, arguments: Sequence[str]) -> ToolSchema:
        """Return the schema of a tool if the arguments need it; an empty one for a tool that is not known."""
        if not any("=" in argument and argument[:1] not in ("{", "[") for argument in arguments):
            return cls({})
        try:
            found = client.get("/v1/tools", name=name).value
        except ClientError as error:
            if error.code in ("forbidden", "not_found"):  # the call itself is refused, too, or needs no types
                return cls({})
            raise
        named = [offer for offer in found["tools"] if isinstance(offer.get("parameters"), dict)]
        return cls(named[0]["parameters"], found.get("aliases")) if len(found["tools"]) == 1 and named else cls({})

    def read(self, key: str, text: str, file: str | None) -> Any:
        """Return the value of a parameter, given as text or as the content of a file. Raises click.UsageError."""
        properties = self._schema.get("properties")
        known = properties.get(self._aliases.get(key, key)) if isinstance(properties, dict) else None
        types = self._types(known, 0) if isinstance(known, dict) else set()
        others = types - {"string", "null"}
        if not types:
            return text if file is not None else _guessed(text)
        if not others:
            return text
        try:
            value = _parse_json(text)
        except ValueError:
            value = None
        kind = TYPES.get(type(value), "null")
        if kind in others or (kind == "integer" and "number" in others):
            return value
        if "string" in types:
            return text
        if "array" in others and kind != "object":
            items = known.get("items") if isinstance(known, dict) else None
            return [text if "string" in self._types(items, 0) else _guessed(text)]
        if kind == "null" and "null" in types and text.strip() == "null":
            return None
        source = f"the content of {file}" if file is not None else repr(text[:100])
        wanted = " or ".join(sorted(types))
        raise click.UsageError(f"{key!r} takes a value of type {wanted}, and {source} is not one.")

    def _types(self, schema: Any, depth: int) -> set[str]:
        """Return the names of the types that a schema allows; none if that is not known."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return set()
        kind = schema.get("type")
        if isinstance(kind, str):
            return {kind}
        if isinstance(kind, list):
            return {one for one in kind if isinstance(one, str)}
        reference, definitions = schema.get("$ref"), self._schema.get("$defs")
        if isinstance(reference, str) and isinstance(definitions, dict):
            return self._types(definitions.get(reference.removeprefix("#/$defs/")), depth + 1)
        if "const" in schema or isinstance(schema.get("enum"), list):
            return {TYPES.get(type(one), "null") for one in schema.get("enum", [schema.get("const")])}
        choices: list[Any] = next(
            (schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), []
        )
        found = [self._types(choice, depth + 1) for choice in choices]
        return set().union(*found) if all(found) else set()


def _content(key: str, text: str) -> tuple[str, str | None]:
    """Return the text of a value and, for `@FILE`, the name of the file; `@@` stands for one `@`."""
    if not text.startswith("@"):
        return text, None
    if text.startswith("@@"):
        return text[1:], None
    name = text[1:]
    try:
        return (sys.stdin.read() if name == "-" else Path(name).expanduser().read_text()), name
    except UnicodeDecodeError:
        raise click.UsageError(f"{key!r}: {name} is not UTF-8 text; `farhand cp` copies any file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        where = name or "a file without a name"
        hint = f"text that begins with @ is written {key}=@{text}"
        raise click.UsageError(f"{key!r}: cannot read {where}: {reason}; {hint}") from None


def _read_json(key: str, text: str) -> Any:
    try:
        return _parse_json(_content(key.removesuffix(":"), text)[0])
    except ValueError as error:
        raise click.UsageError(f"{key}= takes JSON, and {text[:100]!r} is not: {error}") from None


def _guessed(text: str) -> Any:
    """Return JSON as its value, and anything else as text."""
    try:
        return _parse_json(text)
    except ValueError:
        return text


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
