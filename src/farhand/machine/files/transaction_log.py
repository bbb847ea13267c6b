"""The log of transactions on several files, written before the first of them is touched.

If a program is killed midway, the next one reverts what was done. So files are either as before or as intended for
anyone who did not look during the change itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.confined_root import sync_folder
from farhand.machine.files.files import Files, file_errors, open_parent, read_content
from farhand.machine.files.private_files import replace_private, sync_folder_at
from farhand.protocol.errors import ToolError

log = logging.getLogger(__name__)

# In the home of a gateway, and in the folder of a node.
TRANSACTIONS_FOLDER = "changes"
UNDER_WAY = ".json"
DONE = ".done"


class LoggedChange(msgspec.Struct, frozen=True):
    """One file: its path, digests before and after (None stands for no file), and its temporary names."""

    # Bytes: a file name need not be valid text.
    path: bytes
    old: str | None
    new: str | None
    beside: str
    kept: str
    # Folders created for it, outermost first.
    made: tuple[bytes, ...] = ()


class Transaction:
    """A transaction on disk, in a private `folder` of the program."""

    def __init__(self, folder: Path, steps: Sequence[LoggedChange]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{secrets.token_hex(8)}{UNDER_WAY}"
        replace_private(self._path, msgspec.json.encode(list(steps)))

    def done(self) -> None:
        """Commit: from now on nothing is reverted."""
        with file_errors("note the end of a change in", str(self._path)):
            self._path = self._path.rename(self._path.with_suffix(DONE))
            sync_folder_at(self._path.parent)

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def logged_transaction(folder: Path | None, steps: Sequence[LoggedChange]) -> Iterator[Transaction | None]:
    """Log a transaction while the block runs. A single file needs no log: it is replaced atomically."""
    if folder is None or len(steps) < 2:
        yield None
        return
    with file_errors("note a change in", str(folder)):
        intent = Transaction(folder, steps)
    try:
        yield intent
    finally:
        intent.forget()


def roll_back_unfinished(files: Files) -> int:
    """Revert unfinished transactions and remove their temporary files; return how many there were.

    Files that were changed since stay as they are. Failures are retried at the next start.
    """
    if files.transaction_folder is None or not files.transaction_folder.is_dir():
        return 0
    found = sorted(files.transaction_folder.iterdir())
    settled = 0
    for path in found:
        if path.suffix not in (UNDER_WAY, DONE):
            path.unlink(missing_ok=True)
            continue
        try:
            steps = msgspec.json.decode(path.read_bytes(), type=list[LoggedChange])
            for step in reversed(steps):
                _settle_step(files, step, undo=path.suffix == UNDER_WAY)
        except (msgspec.MsgspecError, ToolError, OSError) as error:
            log.error("failed to revert an interrupted transaction (%s): %s", path, error)
            continue
        path.unlink()
        settled += 1
        if path.suffix == UNDER_WAY:
            names = ", ".join(display(os.fsdecode(step.path)) for step in steps)
            log.warning("reverted a transaction that was interrupted by the end of the program: %s", names)
    return settled


def _settle_step(files: Files, step: LoggedChange, *, undo: bool) -> None:
    place = files.place(os.fsdecode(step.path))
    if os.path.isdir(os.path.dirname(place.real)):  # noqa: PTH112, PTH120 (else it was never made)
        with open_parent(place) as (folder, name):
            if undo:
                _undo(folder, name, step)
            for left in (step.beside, step.kept):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left, dir_fd=folder)
            sync_folder(folder)
    if undo:
        place.root.remove_folders([os.fsdecode(folder) for folder in step.made])


def _undo(folder: int, name: str, step: LoggedChange) -> None:
    now = digest(read_content(folder, name))
    if now != step.new:
        if now != step.old:
            log.warning("%s was changed since; leaving it as it is", display(os.fsdecode(step.path)))
    elif step.old is None:
        os.unlink(name, dir_fd=folder)
    else:
        os.rename(step.kept, name, src_dir_fd=folder, dst_dir_fd=folder)


def digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()
