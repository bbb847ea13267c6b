"""Local files that a command sends or writes, by the same rules as on nodes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from farhand.cli.client import ClientError, Upload
from farhand.cli.output import plain_lines, remark
from farhand.machine.files.allowed_paths import display
from farhand.machine.files.files import Files, file_errors, require_regular
from farhand.protocol.errors import ToolError

PIECE_BYTES = 1 << 20


class Kind(StrEnum):
    """The kind of a folder's entry; the value is used in messages."""

    FILE = "a file"
    LINK = "a link"
    EMPTY_FOLDER = "an empty folder"
    OTHER = "not a file"


@dataclass(frozen=True)
class LocalEntry:
    """Something beneath a folder, other than a folder with entries. `inner` is its path from that folder on."""

    inner: str
    path: Path
    kind: Kind
    size: int = 0


def resolve(endpoint: str) -> Path:
    """Return the absolute local path, links resolved; it need not exist."""
    return Path(os.path.realpath(_expand(endpoint)))


def is_folder(endpoint: str) -> bool:
    """Return whether this is a folder rather than a file. Raises ClientError if it is missing or neither."""
    with tool_errors(), file_errors("read", endpoint):
        status = os.stat(_expand(endpoint))  # noqa: PTH116
        if stat.S_ISDIR(status.st_mode):
            return True
        require_regular(status)
    return False


def _expand(endpoint: str) -> str:
    return os.path.expanduser(endpoint)  # noqa: PTH111 (Path.expanduser raises for an unknown user)


@contextlib.contextmanager
def tool_errors() -> Iterator[None]:
    """Turn a ToolError of the file functions into a ClientError."""
    try:
        yield
    except ToolError as error:
        raise ClientError(error.kind.value, error.message) from None


def report_skipped(inner: str, kind: Kind) -> None:
    remark(f"skipped {plain_lines(inner)}: it is {kind.value}")


def list_folder(folder: Path) -> list[LocalEntry]:
    """Return everything in a folder, sorted, without following links or listing unfinished transfers.

    Raises ClientError for a link that points outside the folder, a name that is not UTF-8, and unreadable folders.
    """
    with tool_errors():
        return list(_entries(folder, folder, ""))


def _entries(top: Path, folder: Path, prefix: str) -> Iterator[LocalEntry]:
    with file_errors("read", str(folder)), os.scandir(folder) as scanned:
        listed = sorted(scanned, key=lambda entry: entry.name)
    for entry in listed:
        inner, path = f"{prefix}{entry.name}", folder / entry.name
        if entry.name.startswith(".farhand-") and entry.name.endswith((".part", ".tmp")):
            continue
        try:
            inner.encode()
        except UnicodeEncodeError:
            name = display(f"{top}/{inner}")
            raise ClientError("failed", f"Failed to read '{name}': only names in UTF-8 can be transferred") from None
        with file_errors("read", str(path)):
            status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            below = list(_entries(top, path, f"{inner}/"))
            yield from below or [LocalEntry(inner, path, Kind.EMPTY_FOLDER)]
        elif stat.S_ISLNK(status.st_mode):
            _check_link(top, inner)
            yield LocalEntry(inner, path, Kind.LINK)
        elif stat.S_ISREG(status.st_mode):
            yield LocalEntry(inner, path, Kind.FILE, status.st_size)
        else:
            yield LocalEntry(inner, path, Kind.OTHER)


def _check_link(top: Path, inner: str) -> None:
    """Raise ClientError for a link that points outside `top`, directly or through other links."""
    path = top / inner
    with file_errors("read", str(path)):
        target = str(path.readlink())
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(top)):
        raise ClientError(
            "failed",
            f"'{display(str(top))}' contains the link '{inner}', which points outside it to '{display(target)}'; "
            "copy the target itself, or remove the link",
        )


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Open a regular file and yield it with its status. Raises ClientError for anything else, without blocking."""
    with tool_errors():
        file = Files("/").open(str(path))
    with file:
        status = os.fstat(file.fileno())
        if not status.st_size:
            with tool_errors(), file_errors("read", str(path)):
                content = file.read(1)
            if content:
                raise ClientError(
                    "failed",
                    f"Failed to read '{display(str(path))}': its size is unknown, as for files in /proc; "
                    "copy its content to a regular file first",
                )
        yield file, status


def upload_of(
    file: BinaryIO, status: os.stat_result, path: Path, on_progress: Callable[[int], None] = lambda _sent: None
) -> Upload:
    """Return the content as of `status`: a file that grows is sent up to that size, other changes raise ClientError."""

    def pieces() -> Iterator[bytes]:
        sent = 0
        while sent < status.st_size:
            with tool_errors(), file_errors("read", str(path)):
                piece = file.read(min(PIECE_BYTES, status.st_size - sent))
                now = os.fstat(file.fileno())
            if not piece or (now.st_mtime_ns != status.st_mtime_ns and now.st_size <= status.st_size):
                raise ClientError("failed", f"Failed to read '{display(str(path))}': the file changed during the copy")
            sent += len(piece)
            yield piece
            on_progress(sent)

    return Upload(status.st_size, pieces())


@contextlib.contextmanager
def replacing(path: Path, *, executable: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """Yield an empty file that replaces `path` when the block succeeds; otherwise nothing changes.

    An existing file keeps its mode and owner. A new one is executable by those who may read it if `executable`, and
    accessible to its owner only if `private`.
    """
    with tool_errors(), Files("/").replacing(str(path)) as (file, _):
        mode = os.fstat(file.fileno()).st_mode
        if executable:
            mode |= (mode & 0o444) >> 2
        os.fchmod(file.fileno(), mode & 0o700 if private else mode & 0o777)
        yield file
