"""The undo log: the old content of files that calls changed, kept until room is needed for newer changes.

A folder holds the old contents, each named by its SHA-256, and a log of what was stored for which call. A change is
logged before the file is touched, and again afterwards; a change without its second record, left by a killed program,
is examined when the log is next opened and dropped if it never happened. Records are written but not synced: they
survive this program, and a power failure may cost those of the last seconds.

A file that is replaced by a rename is kept by a hard link, which takes neither time nor space; where that is not
possible, or the file is written in place, it is copied.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from farhand.machine.files.undo_log_lines import (
    CallDropped,
    CallUndone,
    ChangeAborted,
    ChangeBegun,
    ChangedFile,
    ChangeDone,
    Line,
)

log = logging.getLogger(__name__)

# In the home: the undo logs of the gateway and of every node.
UNDO_FOLDER = "undo"
MIB = 1024 * 1024
QUOTA = 512 * MIB
LARGEST = 64 * MIB
MOST_CALLS = 5_000
# How many calls whose contents were dropped are remembered by id.
MOST_DROPPED = 2_000

# The log is rewritten when it has this many records more than twice those still needed.
DEAD_LINES = 1_000

# The current call; its changes are recorded under this id.
call_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("call_id", default=None)


class PendingChange(NamedTuple):
    """A file about to be changed."""

    folder: int
    name: str
    path: str
    # The current file, open; None if there is none.
    old: BinaryIO | None
    # The new content; None if the file will be removed.
    new: Digest | None
    # Written in place, not replaced.
    in_place: bool = False
    # Why it cannot be stored.
    unkept: str = ""
    # Folders created for it, outermost first.
    made: Sequence[str] = ()


class Digest(NamedTuple):
    hex: str
    size: int

    @classmethod
    def of(cls, content: bytes) -> Digest:
        return cls(hashlib.sha256(content).hexdigest(), len(content))


class CallChanges:
    """The recorded changes of one call."""

    __slots__ = ("changes", "open", "undone")

    def __init__(self) -> None:
        self.changes: dict[int, ChangeBegun] = {}
        # Changes that are not recorded as done.
        self.open: set[int] = set()
        self.undone: CallUndone | None = None

    @property
    def files(self) -> Iterator[ChangedFile]:
        return (file for change in self.changes.values() for file in change.files)


class UndoLog:
    """The undo log of one machine: used by one process, from any number of threads. Created on first use.

    Stores at most `quota` bytes, dropping the oldest calls first, and no file of more than `largest` bytes. A quota of
    0 disables it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quota: int = QUOTA,
        largest: int = LARGEST,
        most_calls: int = MOST_CALLS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.quota = quota
        self.largest = min(largest, quota)
        self._most_calls = most_calls
        self._clock = clock
        self._using = threading.RLock()
        self._calls: dict[str, CallChanges] = {}
        self._dropped: dict[str, None] = {}
        self._uses: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._contents = -1
        self._log = -1
        self._lines = 0
        # Records that were needed when the log was last rewritten.
        self._counting = 0

    def close(self) -> None:
        with self._using:
            for descriptor in (self._contents, self._log):
                if descriptor >= 0:
                    os.close(descriptor)
            self._contents = self._log = -1

    # -- keeping ----------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Return whether changes are recorded: a call is in progress and the quota is not 0."""
        return self.quota > 0 and call_id.get() is not None

    def digest(self, descriptor: int) -> Digest:
        """Return the digest of an open file; for one too large to be stored, only its size."""
        size = os.fstat(descriptor).st_size
        if size > self.largest:
            return Digest("", size)
        content = hashlib.sha256()
        offset = 0
        while piece := os.pread(descriptor, MIB, offset):
            content.update(piece)
            offset += len(piece)
        return Digest(content.hexdigest(), size)

    @contextlib.contextmanager
    def recording(self, files: Sequence[PendingChange]) -> Iterator[None]:
        """Record the old content of files while the block changes them, for the current call.

        A block that raises must have changed nothing. If recording fails (a full disk), the change is made, and a
        warning is logged.
        """
        call = call_id.get()
        change: int | None = None
        if call is not None and self.quota > 0:
            try:
                change = self._keep(call, files)
            except OSError as error:
                log.warning("failed to record the changes of call %s: %s", call, error)
        try:
            yield
        except BaseException:
            if call is not None and change is not None:
                self._release(call, change)
            raise
        if call is not None and change is not None:
            self._finish(call, change)

    def _keep(self, call: str, files: Sequence[PendingChange]) -> int:
        with self._using:
            self._open()
            found = self._calls.get(call)
            change = 1 + max(found.changes, default=0) if found else 1
            room = self.quota
            kept: list[ChangedFile] = []
            for file in files:
                one = self._keep_content(file, room)
                kept.append(one)
                room -= one.size if one.old is not None and not one.unkept else 0
            line = ChangeBegun(call, change, int(self._clock() * 1000), kept)
            self._write(line)
            self._apply(line)
            self._make_room(call)
            return change

    def _keep_content(self, file: PendingChange, room: int) -> ChangedFile:
        new, new_size = file.new or (None, 0)
        made = [os.fsencode(folder) for folder in file.made]
        kept = ChangedFile(os.fsencode(file.path), new=new, new_size=new_size, made=made)
        why = file.unkept
        if new_size > self.largest:
            why = why or f"the new content has {new_size} bytes, and files of more than {self.largest} are not kept"
        if file.old is not None:
            status = os.fstat(file.old.fileno())
            kept = msgspec.structs.replace(
                kept, size=status.st_size, mode=stat.S_IMODE(status.st_mode), owner=(status.st_uid, status.st_gid)
            )
            if status.st_size > self.largest:
                why = why or f"it had {status.st_size} bytes, and files of more than {self.largest} are not kept"
            elif status.st_size > room:
                why = why or f"the files of this change have more bytes than are kept in all ({self.quota})"
        if why:
            return msgspec.structs.replace(kept, old="", unkept=why)
        if file.old is None:
            return kept
        digest = _hash(file.old)
        if digest not in self._sizes:
            self._put(digest, file, status)
        return msgspec.structs.replace(kept, old=digest)

    def _put(self, digest: str, file: PendingChange, status: os.stat_result) -> None:
        """Store the content of a file. Raises OSError."""
        assert file.old is not None
        with contextlib.suppress(FileNotFoundError):  # left by a change that was never logged
            os.unlink(digest, dir_fd=self._contents)
        if not file.in_place and status.st_nlink == 1:
            # Fails on another disk, for another owner, or without hard links; then the file is copied.
            with contextlib.suppress(OSError):
                os.link(file.name, digest, src_dir_fd=file.folder, dst_dir_fd=self._contents, follow_symlinks=False)
                if os.path.samestat(os.stat(digest, dir_fd=self._contents), status):
                    return
                os.unlink(digest, dir_fd=self._contents)
        beside = f"{digest}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600, dir_fd=self._contents), "wb") as copy:
            file.old.seek(0)
            while piece := file.old.read(MIB):
                copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
        os.rename(beside, digest, src_dir_fd=self._contents, dst_dir_fd=self._contents)

    def _release(self, call: str, change: int) -> None:
        with self._using:
            line = ChangeAborted(call, change)
            self._apply(line)
            self._note(line)

    def _finish(self, call: str, change: int) -> None:
        with self._using:
            line = ChangeDone(call, change)
            self._apply(line)
            self._note(line)
        self.restrict_to_owner(call)

    def restrict_to_owner(self, call: str) -> None:
        """Make the stored contents of a call private once they have no other link.

        A content that was stored by a hard link has the mode of its file.
        """
        with self._using:
            found = self._calls.get(call)
            for file in found.files if found is not None else ():
                with contextlib.suppress(OSError):
                    if file.old and os.stat(file.old, dir_fd=self._contents, follow_symlinks=False).st_nlink == 1:
                        os.chmod(file.old, 0o600, dir_fd=self._contents)

    def _make_room(self, newest: str) -> None:
        while self._total > self.quota or len(self._calls) > self._most_calls:
            oldest = next(iter(self._calls))
            if oldest == newest and len(self._calls) == 1:
                break
            if oldest == newest:  # a long call: its latest content is the newest
                self._calls[oldest] = self._calls.pop(oldest)
                continue
            line = CallDropped(oldest)
            self._apply(line)
            self._note(line)

    # -- finding ----------------------------------------------------------------------------------------

    def find(self, call: str) -> CallChanges | None:
        """Return the recorded changes of a call, or None. Raises OSError."""
        with self._using:
            self._open()
            return self._calls.get(call)

    def in_effect(self, call: str) -> bool:
        """Return whether a call is in effect: it was not undone, or its undo was undone."""
        with self._using:
            counts = True
            while (found := self._calls.get(call)) is not None and found.undone is not None:
                call, counts = found.undone.by, not counts
            return counts

    def was_dropped(self, call: str) -> bool:
        with self._using:
            return call in self._dropped

    def content(self, digest: str) -> bytes | None:
        """Return a stored content; None if it is missing, or was changed through another link."""
        with self._using:
            self._open()
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(digest, flags, dir_fd=self._contents), "rb") as file:
                    content = file.read(self.largest + 1)
            except OSError:
                return None
        return content if hashlib.sha256(content).hexdigest() == digest else None

    def undone(self, call: str, by: str) -> None:
        with self._using:
            line = CallUndone(call, by, int(self._clock() * 1000))
            self._apply(line)
            self._note(line)

    # -- the log ----------------------------------------------------------------------------------------

    def _apply(self, line: Line) -> None:
        """Apply one record of the log to the state."""
        found = self._calls.get(line.call)
        match line:
            case ChangeBegun():
                if found is None:
                    found = self._calls[line.call] = CallChanges()
                found.changes[line.change] = line
                found.open.add(line.change)
                for file in line.files:
                    self._use(file)
            case ChangeDone() if found is not None:
                found.open.discard(line.change)
            case ChangeAborted() if found is not None:
                for file in found.changes.pop(line.change).files if line.change in found.changes else ():
                    self._unuse(file)
                found.open.discard(line.change)
                if not found.changes:
                    del self._calls[line.call]
            case CallUndone() if found is not None:
                found.undone = line
            case CallDropped():
                self._dropped[line.call] = None
                if found is not None:
                    del self._calls[line.call]
                    for file in found.files:
                        self._unuse(file)
                if len(self._dropped) > MOST_DROPPED:
                    del self._dropped[next(iter(self._dropped))]

    def _use(self, file: ChangedFile) -> None:
        if file.old:
            if not self._uses[file.old]:
                self._sizes[file.old] = file.size
                self._total += file.size
            self._uses[file.old] += 1

    def _unuse(self, file: ChangedFile) -> None:
        if file.old:
            self._uses[file.old] -= 1
            if not self._uses[file.old]:
                del self._uses[file.old]
                self._total -= self._sizes.pop(file.old)
                if self._contents >= 0:
                    with contextlib.suppress(OSError):
                        os.unlink(file.old, dir_fd=self._contents)

    def _write(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if os.write(self._log, data) != len(data):
            raise OSError(f"incomplete write to the undo log in {self.folder}")
        self._lines += 1

    def _note(self, line: Line) -> None:
        """Write a record that can be reconstructed at the next start; errors are only logged."""
        if self._log < 0:
            return
        try:
            self._write(line)
            if self._lines > 2 * self._counting + DEAD_LINES:
                self._begin_log()
        except OSError as error:
            log.warning("cannot write the undo log in %s: %s", self.folder, error)

    def _open(self) -> None:
        """Load the log of an earlier run. Raises OSError."""
        if self._log >= 0:
            return
        contents = self.folder / "contents"
        for folder in (self.folder.parent, self.folder, contents):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        self._calls.clear()
        self._dropped.clear()
        self._uses.clear()
        self._sizes.clear()
        self._total = 0
        for line in self._read_log():
            self._apply(line)
        descriptor = os.open(contents, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._settle(descriptor)
        self._contents = descriptor
        with os.scandir(contents) as entries:
            for entry in entries:
                if entry.name not in self._uses:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.name, dir_fd=self._contents)
        self._begin_log()

    def _read_log(self) -> Iterable[Line]:
        decoder = msgspec.json.Decoder(Line)
        try:
            lines = (self.folder / "log").read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            if line:
                with contextlib.suppress(msgspec.MsgspecError):  # incomplete after a power failure
                    yield decoder.decode(line)

    def _settle(self, contents: int) -> None:
        """Examine changes that were interrupted, and drop those that never happened."""
        for call, found in list(self._calls.items()):
            for number in list(found.open):
                change = found.changes[number]
                happened = [file for file in change.files if not _as_before(file, contents)]
                self._apply(ChangeAborted(call, number))
                if happened:
                    self._apply(ChangeBegun(call, number, change.at, happened))
                    self._apply(ChangeDone(call, number))

    def _begin_log(self) -> None:
        """Rewrite the log with only the needed records, atomically."""
        lines: list[Line] = [CallDropped(call) for call in self._dropped]
        for call, found in self._calls.items():
            lines += found.changes.values()
            lines += [ChangeDone(call, number) for number in found.changes if number not in found.open]
            if found.undone is not None:
                lines.append(found.undone)
        beside = self.folder / "log.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600)
        try:
            os.write(descriptor, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            os.fsync(descriptor)
            beside.replace(self.folder / "log")
        except BaseException:
            os.close(descriptor)
            raise
        if self._log >= 0:
            os.close(self._log)
        self._log = descriptor
        self._lines = self._counting = len(lines)


def _as_before(file: ChangedFile, contents: int) -> bool:
    """Return whether a file still has its content from before the change."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with os.fdopen(os.open(file.path, flags), "rb") as now:
            status = os.fstat(now.fileno())
            if file.old and stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(file.old, dir_fd=contents), status):
                        return True
            if not file.old or status.st_size != file.size:
                return False
            return _hash(now) == file.old
    except FileNotFoundError:
        return file.old is None
    except OSError:
        return False


def _hash(file: BinaryIO) -> str:
    content = hashlib.sha256()
    while piece := file.read(MIB):
        content.update(piece)
    return content.hexdigest()
