"""Notes about transfers, with which they resume after the node program was killed."""

from __future__ import annotations

import contextlib
import re
from enum import StrEnum
from pathlib import Path

import msgspec

from farhand.machine.files.private_files import replace_private
from farhand.protocol.errors import InvalidArgs

_TRANSFER_ID = re.compile(r"[0-9a-f][0-9a-f-]{15,63}")


class Phase(StrEnum):
    WRITING = "writing"
    PLACING = "placing"
    DONE = "done"


class ResumeNote(msgspec.Struct, frozen=True):
    """The state of a transfer that this node receives."""

    target: str
    manifest_digest: str
    boot: str
    phase: Phase = Phase.WRITING


class Notes:
    """The notes of one node, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def held(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted({path.name.partition(".")[0] for path in self.folder.iterdir()})
        return []

    def path(self, transfer_id: str, kind: str) -> Path:
        """Raises InvalidArgs for an id that could name another file."""
        if not _TRANSFER_ID.fullmatch(transfer_id):
            raise InvalidArgs(f"{transfer_id!r} is not the id of a transfer")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        return self.folder / f"{transfer_id}.{kind}"

    def read(self, transfer_id: str) -> ResumeNote | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self.path(transfer_id, "json").read_bytes(), type=ResumeNote)
        return None

    def write(self, transfer_id: str, note: ResumeNote) -> None:
        replace_private(self.path(transfer_id, "json"), msgspec.json.encode(note))

    def forget(self, transfer_id: str) -> None:
        for kind in ("json", "manifest", "sent"):
            self.path(transfer_id, kind).unlink(missing_ok=True)
