"""The progress bar of a copy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# Called with the bytes copied so far, and the total if it is known.
Progress = Callable[[int, int | None], None]


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """Yield a function that updates a bar on the terminal, or does nothing if standard error is not one."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
