"""The page of all commands, from the command line itself."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator

import click

from farhand.cli.main import COMMANDS


def markdown() -> str:
    return "\n".join(line for name in COMMANDS for line in section(load(name), f"farhand {name}", 2))


def load(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: click.Command = getattr(importlib.import_module(f"farhand.cli.{module}"), attribute)
    return found


def section(command: click.Command, path: str, level: int) -> Iterator[str]:
    """Yield the Markdown of a command and those inside it."""
    context = click.Context(command, info_name=path)
    yield f"{'#' * level} {path}"
    yield ""
    yield escaped(click.unstyle(command.help or command.short_help or ""))
    yield ""
    yield "```text"
    yield " ".join([path, *command.collect_usage_pieces(context)])
    yield "```"
    yield ""
    rows = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    if rows:
        yield "| option | |"
        yield "|---|---|"
        for option, text in rows:
            yield f"| `{cell(option)}` | {cell(escaped(text))} |"
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from section(inner, f"{path} {name}", min(level + 1, 4))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def escaped(text: str) -> str:
    """Return help text as Markdown: paragraphs, with what looks like markup shown as it is."""
    paragraphs = [" ".join(part.split()) for part in text.replace("\b\n", "").split("\n\n")]
    return "\n\n".join(
        html.escape(part, quote=False).replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
        for part in paragraphs
    )
