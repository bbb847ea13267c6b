"""What people see: tables, times, colours. Programs get JSON, and whoever pipes gets every id in full."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from farhand.cli.client import Answer

STATE_COLOURS: Final = {
    "ok": "green",
    "running": "cyan",
    "waiting": "yellow",
    "pending": "yellow",
    "approved": "green",
    "online": "green",
    "valid": "green",
    "error": "red",
    "timeout": "red",
    "failed": "red",
    "skipped": "yellow",
    "denied": "red",
    "unknown": "yellow",
    "cancelled": "yellow",
}
SHORT_ID: Final = 12
GAP: Final = 2
MIN_FLEXIBLE: Final = 12
MIN_WIDTH: Final = 7
CUT: Final = "…"


@dataclass(frozen=True)
class Column:
    name: str
    right: bool = False
    # Gives way, with an ellipsis, when the terminal is too narrow.
    flexible: bool = False


def on_terminal() -> bool:
    return sys.stdout.isatty()


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def colours() -> bool:
    """Only on a terminal that can, and not where the user said no (https://no-color.org)."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None) if colours() else text


def plain(text: str) -> str:
    """One line without control characters: names and messages come from other machines, escape codes too."""
    return "".join(character if character.isprintable() else " " if character.isspace() else "�" for character in text)


def plain_lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.splitlines())


# -- documents --------------------------------------------------------------------------------------------


def show_answer(answer: Answer) -> None:
    """The gateway's own document: untouched for a program, indented for a person."""
    if on_terminal():
        show_json(answer.value)
    else:
        print(answer.text)


def show_json(value: Any) -> None:
    print(json_text(value) if on_terminal() else json.dumps(value))


def json_text(value: Any) -> str:
    """Indented and readable; escaped where standard output could not carry the characters, or would obey them."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=2)
    return text if plain_lines(text) == text else json.dumps(value, indent=2)


def show_text(text: str) -> None:
    """Print text from another machine: as it is for a program, without control characters for a person."""
    if on_terminal():
        text = "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def remark(text: str) -> None:
    """Said beside the output, so that it is never taken for it."""
    print(text, file=sys.stderr)


# -- tables -----------------------------------------------------------------------------------------------


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    return not on_terminal() or _total(_widths(columns, rows)) <= terminal_width()


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal as wide as that is; elsewhere as wide as the longest cells."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rows = [[plain(cell) for cell in row] for row in rows]
    widths = _widths(columns, rows)
    if on_terminal():
        widths = _squeezed(columns, widths, terminal_width())
        if (shown := len(widths)) < len(columns):
            columns, widths = [*columns[:shown], Column(CUT)], [*widths, len(CUT)]
            rows = [[*row[:shown], CUT] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.flexible,
            overflow="ellipsis" if column.flexible else "fold",
            width=width,
        )
    for row in rows:
        table.add_row(*(Text(cell, _style(column, cell)) for column, cell in zip(columns, row, strict=True)))
    console = Console(
        width=_total(widths),
        color_system="standard" if colours() else None,
        force_terminal=colours(),
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    from rich.cells import cell_len  # noqa: PLC0415

    return [max([len(column.name), *(cell_len(row[place]) for row in rows)]) for place, column in enumerate(columns)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _squeezed(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Widths that fit. The first column, by which a row is named, keeps its own; what is flexible gives way
    first, then the widest of all; where that is not enough, the last are missing, and there is room for `CUT`."""
    narrow = list(widths)
    for place, column in reversed(list(enumerate(columns))):
        if column.flexible:
            narrow[place] -= max(0, min(_total(narrow) - room, narrow[place] - MIN_FLEXIBLE))
    while _total(narrow) > room and max(narrow[1:], default=0) > MIN_WIDTH:
        narrow[narrow.index(max(narrow[1:]), 1)] -= 1
    if _total(narrow) <= room or len(narrow) == 1:
        return narrow
    fitting = len(narrow) - 1
    while fitting > 1 and _total([*narrow[:fitting], len(CUT)]) > room:
        fitting -= 1
    return narrow[:fitting]


def wrap(text: str, indent: str = "") -> str:
    """Lines that break between words on a terminal; elsewhere each as long as it is."""
    if not on_terminal():
        return "\n".join(indent + line for line in text.splitlines())
    width = max(20, terminal_width())
    lines: list[str] = []
    for line in text.splitlines():
        own = indent + line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=own, drop_whitespace=True) or [""]
    return "\n".join(lines)


def _style(column: Column, cell: str) -> str:
    return STATE_COLOURS.get(cell.partition(":")[0], "") if column.name == "STATE" else ""


def show_fields(fields: Sequence[tuple[str, str]]) -> None:
    """`name  value` lines; what is empty is left out."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        if value:
            colour = STATE_COLOURS.get(value.partition(" ")[0]) if name == "state" else None
            print(f"{paint(name.ljust(width), bold=True)}  {paint(plain(value), colour)}")


# -- times ------------------------------------------------------------------------------------------------


def ago(at: int | None, now: float | None = None) -> str:
    """`3 min ago`, from milliseconds since 1970."""
    if at is None:
        return "never"
    seconds = max(0.0, (time.time() if now is None else now) - at / 1000)
    if seconds < 5:
        return "just now"
    if seconds < 60:
        return f"{int(seconds)} s ago"
    if seconds < 3600:
        return f"{int(seconds // 60)} min ago"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h ago"
    if seconds < 60 * 86400:
        return f"{int(seconds // 86400)} days ago"
    return time.strftime("%Y-%m-%d", time.localtime(at / 1000))


def took(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    if milliseconds < 1:
        return "<1 ms"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def moment(at: int) -> str:
    """Local date and time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at / 1000))


def moment_briefly(at: int) -> str:
    """Without what a reader at a terminal knows: the year, and today's date."""
    local = time.localtime(at / 1000)
    return time.strftime("%H:%M:%S" if local[:3] == time.localtime()[:3] else "%m-%d %H:%M:%S", local)
