"""Receiving a transfer: it is written beside its destination, and moved there in one step once every digest matches.

What was received is in `.farhand-<id>.part` beside the destination, with a note in the node's own folder: a lost
connection or a killed program costs only the bytes in flight. Everything here blocks; run it in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.confined_root import closing_descriptor, open_stepwise, open_subfolder, sync_folder
from farhand.machine.files.direct_writes import DirectWriter, sync_file_system
from farhand.machine.files.files import Files, copy_owner_and_mode, file_errors, replaceable_status, status_in
from farhand.machine.files.private_files import replace_private
from farhand.machine.files.refused_paths import PROTECTED, ForbiddenPath
from farhand.machine.files.undo_log import call_id
from farhand.machine.jobs.jobs import machine_boot
from farhand.node.transfers.resume_notes import Notes, Phase, ResumeNote
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound, ProtocolError
from farhand.protocol.frames import HEADER_BYTES, FrameKind, read_header, read_part_end
from farhand.protocol.manifest import MAX_MANIFEST_BYTES, EntryKind, Manifest, ManifestEntry
from farhand.protocol.messages import TransferOffer
from farhand.protocol.transfer import DigestMismatch, ReceivePosition

_READ = 1024 * 1024
_SYNC_EACH = 64


class IncomingFiles:
    """One transfer to this node; `offset` is the number of bytes received. Its owner calls `close`."""

    def __init__(self, files: Files, notes: Notes, transfer_id: str, path: str, offer: TransferOffer) -> None:
        """Resume an earlier attempt, or begin. Raises ToolError if the destination cannot be written."""
        self._files = files
        self._notes = notes
        self._id = transfer_id
        self._partial = f".farhand-{transfer_id}.part"
        self._offer = offer
        self._folder = -1
        self._staging = -1
        self._file = -1
        self._out = DirectWriter(-1)
        self._position = ReceivePosition(offer.manifest_bytes)
        self._arriving = bytearray()
        self._manifest: Manifest | None = None
        self.complete = False
        if not 0 < offer.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise Failed(f"invalid transfer offer: its list of files has {offer.manifest_bytes} bytes")
        note = notes.read(transfer_id)
        if note is not None and note.phase is Phase.DONE:
            self.complete = True
            return
        if files.read_only:
            raise NotAllowed(f"Failed to write '{display(files.resolve(path))}': the files here are read-only")
        self._place = files.place(note.target if note else _target(files, path, offer))
        files.refuse_unwritable("write", self._place, folder=bool(offer.folder))
        try:
            self._begin(note)
        except BaseException:
            self.close()
            raise

    @property
    def offset(self) -> int:
        return self._position.offset

    def _begin(self, note: ResumeNote | None) -> None:
        place, offer = self._place, self._offer
        parent, self._name = os.path.split(place.real)
        if not self._name:
            raise InvalidArgs(f"'{display(place.path)}' is the root of the file system; name a file or folder in it")
        with file_errors("create the folders of", place.path, missing=Failed):
            self._folder = place.root.open_folder(parent, make=True)
        if note is not None and note.phase is Phase.PLACING:
            self._manifest = self._kept_manifest(note)
            self._put_in_place(again=True)
            return
        with file_errors("write", place.path, missing=Failed):
            self._check_target()
        again = note is not None and note.manifest_digest == offer.manifest_digest
        # After a crash of the machine, the end of what was written may be missing or blank. The digest of a single file
        # detects that, but of a folder only the last file is read again.
        if again and note is not None and not (offer.folder and note.boot != machine_boot()):
            self._manifest = self._kept_manifest(note)
        if self._manifest is None:
            self._remove_partial()
            self._note(Phase.WRITING)
        else:
            self._resume()
        space = os.fstatvfs(self._folder)
        needed = offer.size - max(0, self.offset - offer.manifest_bytes)
        if needed > space.f_bavail * space.f_frsize:
            raise Failed(
                f"Failed to write '{display(place.path)}': No space left on device (it needs {needed} bytes, "
                f"{space.f_bavail * space.f_frsize} are free; nothing was changed)"
            )

    def _note(self, phase: Phase) -> None:
        note = ResumeNote(self._place.path, self._offer.manifest_digest, machine_boot(), phase)
        self._notes.write(self._id, note)

    def close(self) -> None:
        """Close the files; what was received stays for another attempt."""
        for name in ("_file", "_staging", "_folder"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)

    # -- frames -----------------------------------------------------------------------------------

    def feed(self, frames: Iterable[bytes | memoryview]) -> None:
        """Write frames; with the last one, the transfer is in place and `complete`.

        Raises ToolError; DigestMismatch after everything received was discarded.
        """
        pieces: list[memoryview] = []
        for frame in frames:
            kind, _, offset = read_header(frame)
            if self.complete:
                return
            if kind is FrameKind.DATA:
                payload = memoryview(frame)[HEADER_BYTES:]
                self._position.advance(offset, len(payload))
                if payload:
                    pieces.append(payload)
            else:
                self._write(pieces)
                pieces = []
                self._end_part(*read_part_end(frame[HEADER_BYTES:]))
        self._write(pieces)

    def _write(self, pieces: Sequence[memoryview]) -> None:
        if self._position.part == 0:
            self._arriving += b"".join(pieces)
        elif pieces:
            with file_errors("write", self._place.path):
                self._out.write(pieces)
        for piece in pieces:
            self._position.digest.update(piece)

    def _end_part(self, part: int, digest: bytes) -> None:
        try:
            if not self._position.end_part(part, digest):
                return
        except DigestMismatch as error:
            self.discard()
            raise DigestMismatch(f"Failed to write '{display(self._place.path)}': {error.message}") from None
        if part == 0:
            self._read_manifest()
        manifest = self._manifest
        assert manifest is not None
        if part == len(manifest.entries):
            self._finish()
        else:
            with file_errors("write", self._place.path):
                self._next_part(manifest, part + 1)

    def _read_manifest(self) -> None:
        data = bytes(self._arriving)
        self._arriving.clear()
        if blake3(data).hexdigest() != self._offer.manifest_digest:
            self.discard()
            raise DigestMismatch("the received list of files is not the one that was offered")
        try:
            self._manifest = Manifest.decode(data)
        except ProtocolError as error:
            raise Failed(str(error)) from None
        if self._manifest.single is self._offer.folder:
            raise Failed("the sender offered a folder and sends a file, or vice versa")
        for entry in self._manifest.entries:
            if self._files.is_hidden(f"{self._place.real}/{entry.path}"):
                raise ForbiddenPath(f"'{display(f'{self._place.path}/{entry.path}')}' {PROTECTED}")
        replace_private(self._notes.path(self._id, "manifest"), data)
        if not self._manifest.single:
            with file_errors("write", self._place.path):
                os.mkdir(self._partial, 0o700 if self._offer.private else 0o777, dir_fd=self._folder)
                self._staging = open_subfolder(self._partial, self._folder)

    def _next_part(self, manifest: Manifest, part: int) -> None:
        """Create the entry of a part, ready for its bytes."""
        self._close_file()
        entry = manifest.entries[part - 1]
        self._position.begin_part(part, entry.size)
        if manifest.single:
            old = replaceable_status(self._folder, self._name)
            mode = 0o600 if old else self._mode(entry)
            self._create(self._partial, self._folder, mode, entry.size)
            return
        with self._parent(entry.path) as (folder, name):
            if entry.kind is EntryKind.FOLDER:
                os.mkdir(name, self._mode(entry), dir_fd=folder)
            elif entry.kind is EntryKind.LINK:
                os.symlink(entry.target, name, dir_fd=folder)
            else:
                self._create(name, folder, self._mode(entry), entry.size)

    def _create(self, name: str, folder: int, mode: int, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(name, flags, mode, dir_fd=folder)
        self._out = DirectWriter(self._file, size=size)

    def _mode(self, entry: ManifestEntry) -> int:
        """Return the mode of a new entry; private ones stay private."""
        mode = 0o777 if entry.executable or entry.kind is EntryKind.FOLDER else 0o666
        return mode & 0o700 if self._offer.private or entry.private else mode

    # -- resuming --------------------------------------------------------------------------------------

    def _kept_manifest(self, note: ResumeNote) -> Manifest | None:
        with contextlib.suppress(OSError, ProtocolError):
            data = self._notes.path(self._id, "manifest").read_bytes()
            if blake3(data).hexdigest() == note.manifest_digest:
                return Manifest.decode(data)
        return None

    def _resume(self) -> None:
        """Continue where an earlier attempt stopped: in the last existing entry, after what it contains."""
        manifest = self._manifest
        assert manifest is not None
        try:
            with file_errors("write", self._place.path):
                if manifest.single:
                    self._reopen(manifest, 1, self._folder, self._partial)
                    return
                self._staging = open_subfolder(self._partial, self._folder)
                last = 0
                for part, entry in enumerate(manifest.entries, 1):
                    with self._parent(entry.path) as (folder, name):
                        if status_in(folder, name) is None:
                            break
                    last = part
                if last == 0:
                    self._position.advance(0, manifest.ends[0])
                    self._position.digest.update(manifest.encoded)
                    return
                with self._parent(manifest.entries[last - 1].path) as (folder, name):
                    self._reopen(manifest, last, folder, name)
        except (NotFound, Failed):
            # It was removed or changed by another program.
            self._position, self._manifest = ReceivePosition(self._offer.manifest_bytes), None
            self._close_file()
            self._remove_partial()

    def _reopen(self, manifest: Manifest, part: int, folder: int, name: str) -> None:
        entry = manifest.entries[part - 1]
        self._position.offset = manifest.ends[part - 1]
        self._position.begin_part(part, entry.size)
        if entry.kind is not EntryKind.FILE:
            return
        self._file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > entry.size:
            raise OSError(errno.EIO, "another program changed what was received before")
        while data := os.read(self._file, _READ):
            self._position.advance(self.offset, len(data))
            self._position.digest.update(data)
        self._out = DirectWriter(self._file, entry.size - self._position.left, entry.size)

    # -- placing ----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Sync everything to disk, then move it to its destination."""
        manifest = self._manifest
        assert manifest is not None
        with file_errors("write", self._place.path):
            if manifest.single:
                if (old := replaceable_status(self._folder, self._name)) is not None:
                    copy_owner_and_mode(self._file, old)
                os.fsync(self._file)
            else:
                self._check_target()
                self._sync_all(manifest)
        self._close_file()
        self._note(Phase.PLACING)
        self._put_in_place()

    def _put_in_place(self, *, again: bool = False) -> None:
        """Move everything to its destination. `again`: after a crash in the middle, when parts were already moved."""
        with file_errors("write", self._place.path, missing=Failed):
            try:
                self._check_folder()
                if status_in(self._folder, self._partial) is None:
                    if not again:
                        raise OSError(errno.EIO, "another program removed what was received")
                elif not self._offer.folder or status_in(self._folder, self._name) is None:
                    with self._keeping():
                        os.rename(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                else:
                    self._merge()
            except OSError:
                self._note(Phase.WRITING)
                raise
            sync_folder(self._folder)
        self._note(Phase.DONE)
        self._notes.path(self._id, "manifest").unlink(missing_ok=True)
        self.complete = True
        self.close()

    def _check_folder(self) -> None:
        """Raise OSError if the destination folder is no longer the one at its path."""
        with closing_descriptor(self._place.root.open_folder(os.path.dirname(self._place.real))) as there:  # noqa: PTH120
            if not os.path.sameopenfile(there, self._folder):
                raise OSError(errno.EIO, "its folder was replaced in the meantime")

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Record a file that is replaced, for undo; a transfer that a tool began has the id of its call."""
        files, before = self._files, call_id.set(self._id)
        try:
            if files.undo_log is None or not files.undo_log.enabled or status_in(self._folder, self._name) is None:
                yield
                return
            with closing_descriptor(_open_file(self._partial, self._folder)) as new:
                digest = files.written(new)
            with files.write_lock, files.recording(self._folder, self._name, self._place.real, digest):
                yield
        finally:
            call_id.reset(before)

    def _merge(self) -> None:
        """Move what was received into an existing folder: each file in one step; other files there stay."""
        manifest = self._manifest
        if manifest is None:
            raise OSError(errno.EIO, "the list of its files was lost")
        with (
            closing_descriptor(open_subfolder(self._name, self._folder)) as target,
            closing_descriptor(open_subfolder(self._partial, self._folder)) as staging,
        ):
            for entry in manifest.entries:
                *parents, name = entry.path.split("/")
                if entry.kind is EntryKind.FOLDER:
                    os.close(open_stepwise(target, [*parents, name], make=True))
                    continue
                with (
                    closing_descriptor(open_stepwise(staging, parents)) as here,
                    closing_descriptor(open_stepwise(target, parents)) as there,
                ):
                    if status_in(here, name) is not None:
                        if entry.kind is EntryKind.FILE:
                            _take_over(here, there, name)
                        os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
        shutil.rmtree(self._partial, dir_fd=self._folder)

    def _check_target(self) -> None:
        """Raise OSError if something at the destination must not be replaced."""
        if not self._offer.folder:
            replaceable_status(self._folder, self._name)
            return
        if status_in(self._folder, self._name) is None:
            return
        with closing_descriptor(open_subfolder(self._name, self._folder)) as target:
            for entry in self._manifest.entries if self._manifest else ():
                *parents, name = entry.path.split("/")
                with (
                    contextlib.suppress(FileNotFoundError),
                    closing_descriptor(open_stepwise(target, parents)) as folder,
                ):
                    self._check_entry(entry, folder, name)

    def _check_entry(self, entry: ManifestEntry, folder: int, name: str) -> None:
        old = status_in(folder, name)
        if old is None:
            return
        if self._files.paths.is_protected_status(old):
            raise ForbiddenPath(f"'{display(f'{self._place.path}/{entry.path}')}' {PROTECTED}")
        if entry.kind is EntryKind.FILE:
            replaceable_status(folder, name)
        elif stat.S_IFMT(old.st_mode) != (stat.S_IFDIR if entry.kind is EntryKind.FOLDER else stat.S_IFLNK):
            raise OSError(errno.EEXIST, f"something of another kind is at '{display(entry.path)}'")

    def _sync_all(self, manifest: Manifest) -> None:
        if manifest.files > _SYNC_EACH and sync_file_system(self._staging):
            return
        for entry in manifest.entries:
            with self._parent(entry.path) as (folder, name):
                if entry.kind is EntryKind.LINK:
                    continue
                with closing_descriptor(_open_file(name, folder)) as descriptor:
                    os.fsync(descriptor)

    # -- discarding --------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Remove what was received; the destination stays unchanged."""
        self._close_file()
        self._remove_partial()
        self._notes.forget(self._id)

    def _remove_partial(self) -> None:
        if self._staging >= 0:
            os.close(self._staging)
            self._staging = -1
        if self._folder >= 0:
            _remove(self._partial, self._folder)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        *parents, name = path.split("/")
        with closing_descriptor(open_stepwise(self._staging, parents)) as folder:
            yield folder, name


def discard(files: Files, notes: Notes, transfer_id: str) -> None:
    """Remove what a transfer left here, also one that is not in progress."""
    note = notes.read(transfer_id)
    if note is not None and note.phase is not Phase.DONE:
        with contextlib.suppress(OSError, Failed, NotAllowed, NotFound):
            place = files.place(note.target)
            with closing_descriptor(place.root.open_folder(os.path.dirname(place.real))) as folder:  # noqa: PTH120
                _remove(f".farhand-{transfer_id}.part", folder)
    notes.forget(transfer_id)


def _target(files: Files, path: str, offer: TransferOffer) -> str:
    """Return the destination: inside a folder that exists or is named with a trailing `/`, else the path itself."""
    spelled = files.resolve(path)
    inside = path.endswith("/")
    if not inside:
        with contextlib.suppress(NotFound):
            inside = stat.S_ISDIR(files.status(path).st_mode)
    if not inside:
        return spelled
    if offer.name in ("", ".", "..") or "/" in offer.name or "\0" in offer.name:
        raise InvalidArgs("the source path does not end in a name; name the destination file itself")
    return os.path.join(spelled, offer.name)  # noqa: PTH118


def _open_file(name: str, folder: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _take_over(here: int, there: int, name: str) -> None:
    """Give a received file the owner and mode of the one it replaces, if any."""
    if (old := replaceable_status(there, name)) is not None:
        with closing_descriptor(_open_file(name, here)) as descriptor:
            copy_owner_and_mode(descriptor, old)


def _remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        shutil.rmtree(name, dir_fd=folder, ignore_errors=True)
