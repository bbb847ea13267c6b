"""How far a copy has come, as a bar on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# Bytes done, and bytes in all where that is known.
Progress = Callable[[int, int | None], None]


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A function that shows how far it has come, on a terminal; elsewhere nothing is shown."""
    if quiet:
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
