"""The freeze order on disk, which survives the end of the program: of a node, and of the gateway."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from farhand.protocol.freeze import FreezeOrder, FreezeState

# In the home of a gateway, and in the folder of a node.
FREEZE_FILE = "freeze.json"


class StoredFreeze(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the file."""

    order: FreezeOrder | None = None
    thawed_at: int | None = None


class FreezeFile(FreezeState):
    """A freeze state stored in a file. An unreadable file counts as a freeze."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._keeping = threading.Lock()
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=StoredFreeze)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            at = int(path.stat().st_mtime * 1000) if path.exists() else 0
            kept = StoredFreeze(FreezeOrder(at, "farhand", f"{path} cannot be read: {error}"))
        self.order, self.thawed_at = kept.order, kept.thawed_at

    def _store(self) -> None:
        with self._keeping:  # a thaw may arrive while a freeze is being written in another thread
            self._write()

    def _write(self) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(StoredFreeze(self.order, self.thawed_at)))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
