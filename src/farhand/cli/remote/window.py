"""The size of the terminal that this program runs in."""

from __future__ import annotations

import os


def own_size() -> tuple[int, int]:
    """Return columns and rows as the terminal has them, whatever COLUMNS and LINES say; 80 and 24 without one."""
    for descriptor in (1, 0, 2):
        try:
            cols, rows = os.get_terminal_size(descriptor)
        except OSError:
            continue
        if cols > 0 and rows > 0:
            return cols, rows
    return 80, 24
