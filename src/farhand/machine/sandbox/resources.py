"""Limits of CPU, memory, processes and disk for the commands of a machine: by a control group, or by `setrlimit`.

A control group (cgroup v2) bounds all commands of a node together. Where this program may not create one, `setrlimit`
bounds each process, and what it cannot bound is refused. Disk space is counted for each command (see `launcher.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from farhand.machine.sandbox.confinement import SandboxError

# The names of limits, in settings and as options of a node.
RESOURCES: Final = ("memory", "cpus", "processes", "disk")
CGROUP: Final = "cgroup"
RLIMITS: Final = "rlimits"
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE: Final = re.compile(r"(\d{1,15})([KMGT]?)(i?B)?", re.IGNORECASE)
_LEAST_MEMORY: Final = 16 * 1024**2
_PERIOD: Final = 100_000
MOUNT: Final = Path("/sys/fs/cgroup")


class ResourceLimits(msgspec.Struct, frozen=True):
    """What commands may use; 0 for as much as there is."""

    memory: int = 0
    cpus: float = 0.0
    processes: int = 0
    # What one command may add to the folders that it can write, and the size of each file.
    disk: int = 0

    @classmethod
    def read(cls, memory: str, cpus: str, processes: str, disk: str) -> ResourceLimits:
        """Read settings such as `2G`, `1.5`, `200` and `10G`. Raises ValueError."""
        count = _number("processes", processes)
        found = cls(_size("memory", memory), _number("cpus", cpus), int(count), _size("disk", disk))
        if found.memory and found.memory < _LEAST_MEMORY:
            raise ValueError(f"memory {memory!r} is too little to run a command; use at least 16M")
        if count != found.processes:
            raise ValueError(f"processes {processes!r} is not a whole number above 0")
        return found

    def is_within(self, other: ResourceLimits) -> bool:
        """Return whether these limits allow nothing that `other` does not."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return all(not most or 0 < own <= most for own, most in pairs)


class AppliedLimits(msgspec.Struct, frozen=True):
    """How this machine enforces limits."""

    # `cgroup` or `rlimits`; empty if there are none.
    level: str = ""
    # The control group that commands join.
    cgroup: str = ""
    # Limits of each process, by the names of `Launch`.
    each: dict[str, int] = {}
    # Bytes that one command may add to its folders; 0 for any.
    disk: int = 0
    # The size of /tmp, which is in memory; 0 for the default of the system.
    temporary: int = 0


def apply_limits(
    limits: ResourceLimits, name: str, *, mount: Path = MOUNT, own: Path = Path("/proc/self/cgroup")
) -> AppliedLimits:
    """Make the control group of commands, if limits need one, and return how they are enforced.

    Raises SandboxError if a limit cannot be enforced here.
    """
    if limits == ResourceLimits():
        return AppliedLimits()
    of_file = {"file_size": limits.disk} if limits.disk else {}
    temporary = min((size for size in (limits.memory, limits.disk) if size), default=0)
    if not (limits.memory or limits.cpus or limits.processes):
        return AppliedLimits(RLIMITS, "", of_file, limits.disk, temporary)
    try:
        group = str(_command_group(limits, name, mount, own))
        return AppliedLimits(CGROUP, group, of_file, limits.disk, temporary)
    except OSError as error:
        reason = error.strerror or str(error)
    if limits.cpus:
        raise SandboxError(
            f"cpus {limits.cpus:g} needs a control group (cgroup v2) that this program may change: {reason}; "
            "leave cpus out, or run this program as a systemd service with Delegate=yes"
        )
    if limits.processes and os.geteuid() == 0:
        raise SandboxError(
            f"processes {limits.processes} needs a control group (cgroup v2) that this program may change: {reason}; "
            "leave processes out, run this program as a systemd service with Delegate=yes, or run it as another user "
            "than root, whose processes the kernel does not limit otherwise"
        )
    each = {"memory": limits.memory, "processes": limits.processes} | of_file
    each = {kind: value for kind, value in each.items() if value}
    return AppliedLimits(RLIMITS, "", each, limits.disk, temporary)


def _command_group(limits: ResourceLimits, name: str, mount: Path, own: Path) -> Path:
    """Make the control group of a node's commands, beside one for this program. Raises OSError."""
    line = next((one for one in own.read_text().splitlines() if one.startswith("0::")), None)
    base = None if line is None else mount / line.removeprefix("0::").removesuffix("/farhand-program").lstrip("/")
    needed = {"memory": limits.memory, "cpu": limits.cpus, "pids": limits.processes}
    wanted = [controller for controller, value in needed.items() if value]
    if base is None or not (base / "cgroup.controllers").exists():
        raise OSError("there is none")
    missing = set(wanted) - set((base / "cgroup.controllers").read_text().split())
    if missing:
        raise OSError(f"{base} has no controller for {' and '.join(sorted(missing))}")
    # A group with limits for its children has no processes itself, so this program moves into one of them.
    program = base / "farhand-program"
    program.mkdir(exist_ok=True)
    (program / "cgroup.procs").write_text(str(os.getpid()))
    (base / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in wanted))
    group = base / f"farhand-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100]}"
    group.mkdir(exist_ok=True)
    if limits.memory:
        (group / "memory.max").write_text(str(limits.memory))
        with contextlib.suppress(OSError):  # there is no swap
            (group / "memory.swap.max").write_text("0")
    if limits.cpus:
        (group / "cpu.max").write_text(f"{max(1000, round(limits.cpus * _PERIOD))} {_PERIOD}")
    if limits.processes:
        (group / "pids.max").write_text(str(limits.processes))
    return group


def _size(name: str, text: str) -> int:
    if not text:
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{name} {text!r} is not a size; use 512M or 2G")
    return int(found[1]) * _UNITS[found[2].upper()]


def _number(name: str, text: str) -> float:
    if not text:
        return 0.0
    if not re.fullmatch(r"\d{1,7}(\.\d{1,3})?", text.strip()) or float(text) == 0:
        raise ValueError(f"{name} {text!r} is not a number above 0")
    return float(text)
