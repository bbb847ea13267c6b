"""Parameters of `Bash` and `Process` that Farhand's own clients use; they are not offered to models."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Sequence
from typing import Final

from farhand.machine.jobs.terminal import MOST_CELLS
from farhand.protocol.errors import InvalidArgs

# What a terminal is, for the programs in it.
TERMINAL_ENVIRONMENT: Final = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}

_SIZE: Final = re.compile(r"([0-9]{1,4})x([0-9]{1,4})")


def terminal_size(text: str | None) -> tuple[int, int] | None:
    """Return columns and rows of `80x24`; None for None. Raises InvalidArgs."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    if found is None or not all(1 <= int(number) <= MOST_CELLS for number in found.groups()):
        raise InvalidArgs(f"terminal must be columns and rows such as 80x24, each at most {MOST_CELLS}, not {text!r}")
    return int(found[1]), int(found[2])


def check_argv(command: str, argv: Sequence[str] | None) -> None:
    """Raise InvalidArgs unless `command`, which policy and approvals show, says exactly what `argv` runs."""
    if argv is None:
        return
    if not argv or not argv[0]:
        raise InvalidArgs("argv must begin with the program to run")
    if shlex.join(argv) != command:
        raise InvalidArgs(f"command must be the quoted form of argv, which is {shlex.join(argv)!r}")


def signal_number(name: str) -> signal.Signals:
    """Return the signal of `TERM`, `SIGTERM` or `15`. Raises InvalidArgs."""
    wanted = name.strip().upper()
    try:
        if wanted.isdecimal():
            return signal.Signals(int(wanted))
        return signal.Signals["SIG" + wanted.removeprefix("SIG")]
    except (KeyError, ValueError):
        known = ", ".join(one.name.removeprefix("SIG") for one in signal.Signals)
        raise InvalidArgs(f"there is no signal {name!r}; known: {known}") from None
