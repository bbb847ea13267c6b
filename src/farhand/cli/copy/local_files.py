"""The files of this machine that a command sends or writes, by the rules the nodes have for theirs."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from farhand.cli.client import ClientError, Upload
from farhand.cli.copy.progress import Progress
from farhand.cli.output import plain_lines, remark
from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files, file_errors, require_regular
from farhand.protocol.errors import ToolError

PIECE = 1 << 20


class Kind(StrEnum):
    """What lies in a folder; the text is what is said of one that is left out."""

    FILE = "a file"
    LINK = "a link"
    HOLLOW = "an empty folder"
    OTHER = "not a file"


@dataclass(frozen=True)
class Found:
    """Something beneath a folder that has nothing beneath itself."""

    # Its path from that folder on.
    inner: str
    path: Path
    kind: Kind
    size: int = 0


def here(endpoint: str) -> Path:
    """The place on this machine that was named, links resolved; nothing need be there."""
    return Path(os.path.realpath(_spelled(endpoint)))


def is_folder(endpoint: str) -> bool:
    """Whether a folder is there, and not a file. Raises ClientError for nothing, and for what is neither."""
    with worded(), file_errors("read", endpoint):
        status = os.stat(_spelled(endpoint))  # noqa: PTH116
        if stat.S_ISDIR(status.st_mode):
            return True
        require_regular(status)
    return False


def _spelled(endpoint: str) -> str:
    return os.path.expanduser(endpoint)  # noqa: PTH111 (an unknown user is no error)


@contextlib.contextmanager
def worded() -> Iterator[None]:
    """What the files here refuse becomes a ClientError."""
    try:
        yield
    except ToolError as error:
        raise ClientError(error.kind.value, error.message) from None


# -- a folder -----------------------------------------------------------------------------------------------


def beneath(folder: Path) -> list[Found]:
    """Everything in a folder, by name; links are not followed, and what a transfer left half written is not there.

    Raises ClientError for a link that leads out of the folder, a name that is not UTF-8, and what cannot be listed.
    """
    with worded():
        return list(_listed(folder, folder, ""))


def _listed(top: Path, folder: Path, prefix: str) -> Iterator[Found]:
    with file_errors("read", str(folder)), os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        inner, path = f"{prefix}{entry.name}", folder / entry.name
        if entry.name.startswith(".farhand-") and entry.name.endswith((".part", ".tmp")):
            continue
        _refuse_unsendable(top, inner)
        with file_errors("read", str(path)):
            status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            below = list(_listed(top, path, f"{inner}/"))
            yield from below or [Found(inner, path, Kind.HOLLOW)]
        elif stat.S_ISLNK(status.st_mode):
            _refuse_leading_out(top, inner)
            yield Found(inner, path, Kind.LINK)
        elif stat.S_ISREG(status.st_mode):
            yield Found(inner, path, Kind.FILE, status.st_size)
        else:
            yield Found(inner, path, Kind.OTHER)


def _refuse_unsendable(top: Path, inner: str) -> None:
    try:
        inner.encode()
    except UnicodeEncodeError:
        name = display(f"{top}/{inner}")
        raise ClientError("failed", f"Failed to read '{name}': a file's name must be UTF-8 to be transferred") from None


def _refuse_leading_out(top: Path, inner: str) -> None:
    """By its text, as on nodes, and by where it really leads: a link to a link may climb further than either says."""
    path = top / inner
    with file_errors("read", str(path)):
        target = str(path.readlink())
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(top)):
        raise ClientError(
            "failed",
            f"'{display(str(top))}' holds the link '{inner}', which leads out of it to '{display(target)}'; "
            "name what it leads to by itself, or remove the link",
        )


def say_left_out(inner: str, kind: Kind) -> None:
    remark(f"left out: {plain_lines(inner)} is {kind.value}")


# -- a file -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """A regular file, and what it is now. Raises ClientError for anything else, without waiting for it."""
    with worded():
        file = Files("/").open(str(path))
    with file:
        status = os.fstat(file.fileno())
        if not status.st_size:
            _refuse_unmeasured(file, path)
        yield file, status


def _refuse_unmeasured(file: BinaryIO, path: Path) -> None:
    with worded(), file_errors("read", str(path)):
        if not file.read(1):
            return
    raise ClientError(
        "failed",
        f"Failed to read '{display(str(path))}': the system does not say how long it is, as for files in /proc; "
        "write its content to a file of its own first",
    )


def upload_of(file: BinaryIO, status: os.stat_result, path: Path, show: Progress, before: int, total: int) -> Upload:
    """The content as it was at the start: what grows is sent that far, what changes otherwise breaks off."""
    return Upload(status.st_size, _pieces(file, status, path, show, before, total))


def _pieces(
    file: BinaryIO, status: os.stat_result, path: Path, show: Progress, before: int, total: int
) -> Iterator[bytes]:
    done = 0
    while done < status.st_size:
        with worded(), file_errors("read", str(path)):
            piece = file.read(min(PIECE, status.st_size - done))
            now = os.fstat(file.fileno())
        if not piece or (now.st_mtime_ns != status.st_mtime_ns and now.st_size <= status.st_size):
            raise ClientError(
                "failed", f"Failed to read '{display(str(path))}': the file was changed while it was sent"
            )
        done += len(piece)
        yield piece
        show(before + done, total)


@contextlib.contextmanager
def replacing(path: Path, *, executable: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """An empty file that takes the place of `path` when the block ends well; else all stays as it was.

    One that was there keeps its mode and owner; a new one can be run if `executable`, by whoever may read it, and is
    for its owner alone if `private`.
    """
    with worded(), Files("/").replacing(str(path)) as (file, _):
        mode = os.fstat(file.fileno()).st_mode
        if executable:
            mode |= (mode & 0o444) >> 2
        os.fchmod(file.fileno(), mode & 0o700 if private else mode & 0o777)
        yield file
