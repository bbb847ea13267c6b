"""How busy this machine is: processor, memory, disk and load."""

from __future__ import annotations

import contextlib
from pathlib import Path


class MachineLoad:
    """Samples the machine. A sample takes well under a millisecond, except the first, which loads psutil."""

    def __init__(self, folder: Path) -> None:
        """`folder` is on the disk that is reported."""
        self._folder = str(folder)
        self._first = True

    def sample(self) -> dict[str, float]:
        """Return the use of all cores in percent since the last sample, bytes, and the load of the last minute."""
        import psutil  # noqa: PLC0415 - an idle node that nobody asks does without its memory

        # The first sample has none before it to compare with.
        cpu = psutil.cpu_percent(0.1 if self._first else None)
        self._first = False
        memory = psutil.virtual_memory()
        used = total = 0
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is gone
            disk = psutil.disk_usage(self._folder)
            used, total = disk.used, disk.total
        load = 0.0
        with contextlib.suppress(OSError, AttributeError):
            load = psutil.getloadavg()[0]
        return {
            "cpu": cpu,
            "memory": memory.total - memory.available,
            "memory_total": memory.total,
            "disk": used,
            "disk_total": total,
            "load": round(load, 2),
        }
