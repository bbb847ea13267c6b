"""Output for people: tables, times, colours. Programs use --json, and pipes get every id in full."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from farhand.cli.client import Answer
from farhand.cli.json_output import wants_json

STATE_COLOURS: Final = {
    **dict.fromkeys(("ok", "approved", "online", "valid"), "green"),
    **dict.fromkeys(("error", "timeout", "failed", "denied"), "red"),
    **dict.fromkeys(("waiting", "pending", "skipped", "unknown", "cancelled"), "yellow"),
    "running": "cyan",
}
GAP: Final = 2
MIN_FLEXIBLE: Final = 12
MIN_WIDTH: Final = 7
CUT: Final = "…"


def on_terminal() -> bool:
    return sys.stdout.isatty()


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def colours() -> bool:
    """Return whether standard output is a terminal with colours that NO_COLOR (https://no-color.org) allows."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    return click.style(text, fg=colour, bold=bold or None, dim=dim or None) if colours() else text


def plain(text: str) -> str:
    """Return one line without control characters: text from other machines may contain escape sequences."""
    return "".join(character if character.isprintable() else " " if character.isspace() else "�" for character in text)


def plain_lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.splitlines())


def printable(text: str) -> str:
    """Return text without control characters, except line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def one_line(text: str, limit: int | None = None) -> str:
    """Return text with white space collapsed, cut with an ellipsis after `limit` characters."""
    text = plain(" ".join(text.split()))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + CUT


# -- answers ----------------------------------------------------------------------------------------------


def show(document: Any, render: str | Callable[[Any], object] = "", hint: str = "") -> None:
    """Print a document, or an answer's own, with --json; otherwise the text `render`, or whatever `render(value)`
    prints, and the remark `hint`.
    """
    if wants_json():
        show_json(document)
        return
    if callable(render):
        render(document.value if isinstance(document, Answer) else document)
    elif render:
        print(plain(render))
    if hint:
        remark(hint)


def show_list(answer: Answer, key: str, columns: Sequence[Column], empty: str) -> None:
    """Print the records at `key` as a table, or the remark `empty` if there are none; the document with --json."""
    show(answer, lambda value: show_table(columns, value[key]) if value[key] else remark(empty))


def show_json(document: Any) -> None:
    """Print a document: indented on a terminal, and in a pipe as it is, or unchanged if it is a gateway's."""
    if isinstance(document, Answer):
        print(json_text(document.value) if on_terminal() else document.text)
    else:
        print(json_text(document) if on_terminal() else json.dumps(document))


def json_text(value: Any) -> str:
    """Return indented JSON; escaped if it has characters that the output cannot encode or a terminal would obey."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=2)
    return text if plain_lines(text) == text else json.dumps(value, indent=2)


def json_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show_text(text: str) -> None:
    """Print text from another machine: unchanged in a pipe, without control characters on a terminal."""
    if on_terminal():
        text = printable(text)
    if text:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def remark(text: str) -> None:
    """Print a message to standard error, apart from the output."""
    print(text, file=sys.stderr)


def show_failure(error: dict[str, str]) -> None:
    remark(f"{error['kind']}: {plain_lines(error['message'])}")


def show_fields(fields: Mapping[str, Any]) -> None:
    """Print `name  value` lines, leaving out empty values."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        if value not in (None, ""):
            text = plain(str(value))
            colour = STATE_COLOURS.get(text.partition(" ")[0]) if name == "state" else None
            print(f"{paint(name.ljust(width), bold=True)}  {paint(text, colour)}")


def show_section(title: str, text: str) -> None:
    print(f"\n{paint(title, bold=True)}\n{text}")


def wrap(text: str, indent: str = "", hanging: str = "") -> str:
    """Return text broken between words to fit a terminal, later lines indented by `hanging`; unbroken in a pipe."""
    if not on_terminal():
        return "\n".join(indent + line for line in text.splitlines())
    width = max(20, terminal_width())
    lines: list[str] = []
    for line in text.splitlines():
        own = indent + hanging + line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=own) or [""]
    return "\n".join(lines)


# -- tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the key or function that returns a record's cell (None is empty).

    right     aligned to the right
    flexible  cut with an ellipsis when the terminal is too narrow
    optional  left out when all cells are empty
    narrow    shortens the cells of a table that does not fit the terminal; left out if that empties all
    """

    name: str
    value: str | Callable[[Any], Any]
    right: bool = False
    flexible: bool = False
    optional: bool = False
    narrow: Callable[[str], str] | None = None

    def cell(self, record: Any) -> str:
        value = record[self.value] if isinstance(self.value, str) else self.value(record)
        return "" if value is None else plain(str(value))


def id_column(name: str, value: str | Callable[[Any], Any]) -> Column:
    """Return a column of ids; a narrow terminal gets their ends, which commands accept too."""
    return Column(name, value, narrow=lambda text: text[-12:])


def hide(_cell: str) -> str:
    """Empty a cell; as `narrow` of a column it leaves the column out of a narrow terminal."""
    return ""


def show_table(columns: Sequence[Column], records: Sequence[Any]) -> None:
    """Print a table that fits the terminal; in a pipe as wide as the longest cells."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    cells = {column: [column.cell(record) for record in records] for column in columns}
    cells = {column: texts for column, texts in cells.items() if any(texts) or not column.optional}
    if on_terminal() and _total(_widths(cells)) > terminal_width():
        for column in [column for column in cells if column.narrow]:
            cells[column] = [column.narrow(text) for text in cells[column]]  # type: ignore[misc]
        cells = {column: texts for column, texts in cells.items() if any(texts) or not column.narrow}
    widths = _widths(cells)
    if on_terminal():
        widths = _fit(list(cells), widths, terminal_width())
        if len(widths) < len(cells):
            cells = {column: cells[column] for column in list(cells)[: len(widths)]}
            cells[Column(CUT, "")] = [CUT] * len(records)
            widths = [*widths, len(CUT)]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, width in zip(cells, widths, strict=True):
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=column.flexible,
            overflow="ellipsis" if column.flexible else "fold",
            width=width,
        )
    for row in zip(*cells.values(), strict=True):
        table.add_row(*(Text(text, _style(column, text)) for column, text in zip(cells, row, strict=True)))
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


def _widths(cells: Mapping[Column, Sequence[str]]) -> list[int]:
    from rich.cells import cell_len  # noqa: PLC0415

    return [max([len(column.name), *map(cell_len, texts)]) for column, texts in cells.items()]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _fit(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Return widths that fit into `room`.

    The first column, which identifies the row, keeps its width. Flexible columns shrink first, then the widest. If
    that is not enough, the last columns are left out, with room for an ellipsis.
    """
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


def _style(column: Column, text: str) -> str:
    return STATE_COLOURS.get(text.partition(":")[0], "") if column.name == "STATE" else ""


# -- times ------------------------------------------------------------------------------------------------


def ago(at: int | None, now: float | None = None) -> str:
    """Return `3 min ago`, from milliseconds since 1970."""
    if at is None:
        return "never"
    seconds = max(0.0, (time.time() if now is None else now) - at / 1000)
    if seconds < 5:
        return "just now"
    for limit, unit, length in ((60, "s", 1), (3600, "min", 60), (2 * 86400, "h", 3600), (60 * 86400, "days", 86400)):
        if seconds < limit:
            return f"{int(seconds // length)} {unit} ago"
    return time.strftime("%Y-%m-%d", time.localtime(at / 1000))


def duration(milliseconds: float | None) -> str:
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


def local_time(at: int) -> str:
    """Return local date and time, to the second, from milliseconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at / 1000))


def minute_time(at: int | None, otherwise: str = "never") -> str:
    """Return local date and time, to the minute; `otherwise` if there is none."""
    return otherwise if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at / 1000))


def short_time(at: int) -> str:
    """Return local time without the year, and without the date if it is today."""
    local = time.localtime(at / 1000)
    return time.strftime("%H:%M:%S" if local[:3] == time.localtime()[:3] else "%m-%d %H:%M:%S", local)


def log_time(at: int) -> str:
    """Return the time of a log line: short on a terminal, in full in a pipe."""
    return short_time(at) if on_terminal() else local_time(at)
