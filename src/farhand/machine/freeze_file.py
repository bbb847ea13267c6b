"""The freeze order on disk, which survives the end of the program: of a node, and of the gateway."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from farhand.machine.files.private_files import replace_private
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
        self._storing = threading.Lock()
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=StoredFreeze)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            at = int(path.stat().st_mtime * 1000) if path.exists() else 0
            kept = StoredFreeze(FreezeOrder(at, "farhand", f"{path} cannot be read: {error}"))
        self.order, self.thawed_at = kept.order, kept.thawed_at

    def _store(self) -> None:
        with self._storing:  # a thaw may arrive while a freeze is being written in another thread
            replace_private(self._path, msgspec.json.encode(StoredFreeze(self.order, self.thawed_at)))
