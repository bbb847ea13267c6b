"""Which calls this node has accepted, so that none starts twice.

In memory for a plug-in: another life of the program knows nothing, and says so by another boot id. On disk for a node
that must survive being killed: the next life of the program still knows what the last one had accepted.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

MOST_EARLIER = 4096
"""Calls of an earlier life that are remembered; each is some forty bytes of the hello."""


class Ledger:
    """Calls accepted in this life, kept in memory."""

    def __init__(self) -> None:
        self.boot = uuid.uuid4().hex
        self.earlier: set[str] = set()
        """Accepted by an earlier life of this node, and never acknowledged."""

    def accept(self, request_id: str) -> None:
        """Remember a call before it starts."""

    def settle(self, request_id: str) -> None:
        """The gateway has the outcome."""
        self.earlier.discard(request_id)


class FileLedger(Ledger):
    """Calls accepted by every life since the machine was started; one writer. Whoever opens it calls `close`."""

    def __init__(self, path: Path, machine_boot: str) -> None:
        """`machine_boot` names this run of the machine: what was accepted before a reboot cannot be spoken for."""
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
        beside = path.with_suffix(".new")
        beside.write_text("\n".join([f"boot {machine_boot} {self.boot}", *(f"+{each}" for each in self.earlier), ""]))
        beside.replace(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def accept(self, request_id: str) -> None:
        self._append("+", request_id)

    def settle(self, request_id: str) -> None:
        super().settle(request_id)
        self._append("-", request_id)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, sign: str, request_id: str) -> None:
        # Reaches the page cache, which outlives us; a reboot makes another ledger anyway.
        os.write(self._file, f"{sign}{request_id}\n".encode())


def storable(request_id: str) -> bool:
    """Whether an id fits a line of the ledger; ids of a Farhand gateway do."""
    return request_id.isascii() and request_id.isprintable() and len(request_id) <= 128
