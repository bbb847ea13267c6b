"""How busy this machine is: processor, memory, disk and load."""

from __future__ import annotations

import contextlib
from pathlib import Path


class MachineLoad:
    """Samples the machine. A sample takes well under a millisecond, except the first, which loads psutil."""

    def __init__(self, folder: Path) -> None:
        """`folder` is on the disk that is reported."""
        self._folder = str(folder)
        # Seconds that the cores have worked and existed; psutil's own memory of them is per thread.
        self._worked, self._passed = 0.0, 0.0

    def sample(self) -> dict[str, float]:
        """Return the use of all cores in percent since the last sample, bytes, and the load of the last minute."""
        import psutil  # noqa: PLC0415 - memory of an idle node

        memory = psutil.virtual_memory()
        used = total = 0
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is gone
            disk = psutil.disk_usage(self._folder)
            used, total = disk.used, disk.total
        load = 0.0
        with contextlib.suppress(OSError, AttributeError):
            load = psutil.getloadavg()[0]
        return {
            "cpu": self._cpu(psutil.cpu_times()._asdict()),
            "memory": memory.total - memory.available,
            "memory_total": memory.total,
            "disk": used,
            "disk_total": total,
            "load": round(load, 2),
        }

    def _cpu(self, times: dict[str, float]) -> float:
        """Return the share of time that the cores worked since the last sample; the first time, since they started."""
        # Time in virtual machines is part of `user` and `nice`.
        passed = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        worked = passed - times["idle"] - times.get("iowait", 0.0)
        share = (worked - self._worked) / (passed - self._passed) if passed > self._passed else 0.0
        self._worked, self._passed = worked, passed
        return round(100 * min(max(share, 0.0), 1.0), 1)
