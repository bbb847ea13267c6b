"""The calls this node has accepted, so that none starts twice.

A plug-in keeps them in memory: the next run of the program has another boot id and knows nothing. A node that must
survive being killed stores them on disk.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

# Calls of an earlier run that are remembered; each adds about forty bytes to the hello.
MOST_EARLIER = 4096

# A file with more settled lines than this is rewritten.
MOST_LINES = 20_000


class AcceptedCalls:
    """Calls accepted in this run, kept in memory."""

    def __init__(self) -> None:
        self.boot = uuid.uuid4().hex
        # Accepted by an earlier run of this node, and never acknowledged.
        self.earlier: set[str] = set()

    def accept(self, request_id: str) -> None:
        """Record a call before it starts."""

    def settle(self, request_id: str) -> None:
        """Drop a call: the gateway has its outcome."""
        self.earlier.discard(request_id)


class AcceptedCallsFile(AcceptedCalls):
    """Calls accepted by every run since the machine was booted; one writer. The owner calls `close`."""

    def __init__(self, path: Path, machine_boot: str) -> None:
        """`machine_boot` identifies the boot: nothing is known of calls accepted before a reboot."""
        super().__init__()
        open_ids: dict[str, None] = {}
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        head = lines[0].split() if lines else []
        if head[:2] == ["boot", machine_boot] and len(head) == 3:
            self.boot = head[2]
            for line in lines[1:]:
                sign, request_id = line[:1], line[1:]
                if sign == "+":
                    open_ids[request_id] = None
                elif sign == "-":
                    open_ids.pop(request_id, None)
        self.earlier = set(list(open_ids)[-MOST_EARLIER:])
        self._path = path
        self._head = f"boot {machine_boot} {self.boot}"
        self._open = dict.fromkeys(self.earlier)
        self._file = -1
        self._rewrite()

    def accept(self, request_id: str) -> None:
        """Record a call before it starts. Raises OSError if that fails; the call must not start then."""
        self._append("+", request_id)
        self._open[request_id] = None

    def settle(self, request_id: str) -> None:
        super().settle(request_id)
        self._open.pop(request_id, None)
        self._append("-", request_id)
        if self._lines > MOST_LINES + len(self._open):
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by one with only the open calls."""
        beside = self._path.with_suffix(".new")
        with open(beside, "w", opener=_for_owner_alone) as file:
            file.write("\n".join([self._head, *(f"+{each}" for each in self._open), ""]))
        beside.replace(self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._lines = len(self._open)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, sign: str, request_id: str) -> None:
        # The page cache outlives this program, and a reboot starts a new file anyway.
        line = f"{sign}{request_id}\n".encode()
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._lines += 1


def storable(request_id: str) -> bool:
    """Return whether an id can be stored as one line; ids of a Farhand gateway can."""
    return request_id.isascii() and request_id.isprintable() and len(request_id) <= 128


def _for_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
