"""A file or folder as the bytes of a transfer. Everything here blocks; run it in a thread."""

from __future__ import annotations

import contextlib
import mimetypes
import os
import stat
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from farhand.machine.files.allowed_paths import display
from farhand.machine.files.confined_root import closing_descriptor, open_subfolder
from farhand.machine.files.files import Files, file_errors, open_parent, open_regular
from farhand.machine.files.mime import HEAD, mime_type
from farhand.machine.files.private_files import write_private
from farhand.protocol.errors import Failed, ProtocolError
from farhand.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, part_end, put_header
from farhand.protocol.manifest import MAX_ENTRIES, MAX_MANIFEST_BYTES, EntryKind, Manifest, ManifestEntry, leads_out
from farhand.protocol.messages import TransferOffer
from farhand.protocol.transfer import SendWindow
from farhand.protocol.version import TRANSFER_FRAME_BYTES
from farhand.sdk.connection import FRAME_RESERVE

MOST_FRAMES = 256
# Nested folders; each is open while its entries are listed.
MOST_DEEP = 256
UNKNOWN_TYPE = "application/octet-stream"


class OutgoingFiles:
    """The file or folder at a path, as one stream. Its owner calls `close`."""

    def __init__(self, files: Files, path: str, stream: int, kept: Path) -> None:
        """Read the manifest in `kept`, or create it from the path. Raises ToolError."""
        self._files = files
        self._stream = stream
        self._place = files.place(path)
        self._protected = files.paths.protected_identities()
        self._file: BinaryIO | None = None
        self._part = 0
        self._left = 0
        self._hash = blake3()
        self._spare: list[bytearray] = []
        self.offset = 0
        self.over = False
        status = files.status(path)
        mime = None
        if stat.S_ISDIR(status.st_mode):
            self._manifest = _kept_manifest(kept) or self._walk()
            if not kept.exists():
                write_private(kept, self._manifest.encoded)
        else:
            with files.open(path) as file:
                head = file.read(HEAD)
                status = os.fstat(file.fileno())
                mime = _mime(head, self._place.path)
            if head and not status.st_size:
                raise Failed(
                    f"Failed to read '{display(self._place.path)}': its size is not known, as for files in /proc; "
                    "copy its content to another file first"
                )
            self._manifest = Manifest([_file_entry("", status)])
        self.offer = TransferOffer(
            name=display(os.path.basename(self._place.path)) or "root",  # noqa: PTH119
            folder=stat.S_ISDIR(status.st_mode),
            files=self._manifest.files,
            size=self._manifest.size,
            manifest_bytes=len(self._manifest.encoded),
            manifest_digest=blake3(self._manifest.encoded).hexdigest(),
            mime=mime,
            private=_private(status),
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def begin(self, offset: int) -> None:
        """Continue at an offset; earlier bytes of the same part are read for its digest, not sent. Raises ToolError."""
        ends = self._manifest.ends
        if not 0 <= offset <= ends[-1]:
            raise Failed(f"the receiver asked for byte {offset} of a stream of {ends[-1]}")
        # The end of a part that ends here is sent again: the receiver may not have it.
        part = next(number for number, end in enumerate(ends) if end >= offset)
        self._open(part)
        self.offset = self._start(part)
        skip = offset - self.offset
        while skip > 0:
            data = self._read_part(min(skip, MAX_PAYLOAD_BYTES))
            self._hash.update(data)
            skip -= len(data)
            self._left -= len(data)
            self.offset += len(data)

    def read(self, window: SendWindow) -> list[bytes | bytearray]:
        """Return the next frames that `window` allows; a data frame has `FRAME_RESERVE` bytes in front.

        An empty list means that there is not enough credit, or that everything was sent (`over`).
        """
        frames: list[bytes | bytearray] = []
        size = 0
        while size < MAX_PAYLOAD_BYTES and len(frames) < MOST_FRAMES and not self.over:
            if self._left == 0:
                frames.append(self._end_part())
                continue
            room = window.frame_bytes(self.offset, self._start(self._part), self._left)
            if not room:
                break
            frames.append(self._data(room))
            size += room
        return frames

    def reuse(self, frame: bytearray) -> None:
        """Reuse the memory of a frame that was sent."""
        if len(frame) == FRAME_RESERVE + HEADER_BYTES + TRANSFER_FRAME_BYTES and len(self._spare) < 8:
            self._spare.append(frame)

    def _data(self, room: int) -> bytearray:
        full = room == TRANSFER_FRAME_BYTES and self._spare
        frame = self._spare.pop() if full else bytearray(FRAME_RESERVE + HEADER_BYTES + room)
        put_header(frame, FRAME_RESERVE, self._stream, self.offset)
        with memoryview(frame)[FRAME_RESERVE + HEADER_BYTES :] as payload:
            self._fill(payload)
            self._hash.update(payload)
        self._left -= room
        self.offset += room
        return frame

    def _fill(self, payload: memoryview) -> None:
        if self._part == 0:
            at = self.offset
            payload[:] = self._manifest.encoded[at : at + len(payload)]
            return
        assert self._file is not None
        done = 0
        with file_errors("read", self._shown_path()):
            while done < len(payload):
                count = self._file.readinto(payload[done:])  # type: ignore[attr-defined]
                if not count:
                    raise self._changed("became shorter")
                done += count

    def _read_part(self, most: int) -> bytes:
        if self._part == 0:
            return self._manifest.encoded[self.offset : self.offset + most]
        assert self._file is not None
        with file_errors("read", self._shown_path()):
            data = self._file.read(most)
        if not data:
            raise self._changed("became shorter")
        return data

    def _end_part(self) -> bytes:
        if self._file is not None:
            entry, status = self._manifest.entries[self._part - 1], os.fstat(self._file.fileno())
            # A file that only grew, such as a log, is sent as far as it was when the transfer began.
            if status.st_mtime_ns != entry.changed and status.st_size <= entry.size:
                raise self._changed("was changed")
        frame = part_end(self._stream, self.offset, self._part, self._hash.digest())
        if self._part == len(self._manifest.entries):
            self.over = True
            self.close()
        else:
            self._open(self._part + 1)
        return frame

    def _start(self, part: int) -> int:
        return self._manifest.ends[part - 1] if part else 0

    def _open(self, part: int) -> None:
        self.close()
        self._part = part
        self._left = self._manifest.ends[part] - self._start(part)
        self._hash = blake3()
        if part == 0:
            return
        entry = self._manifest.entries[part - 1]
        if entry.kind is not EntryKind.FILE:
            return
        place = self._files.place(f"{self._place.real}/{entry.path}") if entry.path else self._place
        with file_errors("read", self._shown_path()), open_parent(place) as (folder, name):
            self._file = open_regular(folder, name, buffered=False)
        status = os.fstat(self._file.fileno())
        if status.st_size < entry.size or (status.st_mtime_ns != entry.changed and status.st_size == entry.size):
            raise self._changed("was changed")

    def _shown_path(self) -> str:
        entry = self._manifest.entries[self._part - 1]
        return f"{self._place.path}/{entry.path}" if entry.path else self._place.path

    def _changed(self, how: str) -> Failed:
        return Failed(f"Failed to read '{display(self._shown_path())}': the file {how} while it was transferred")

    # -- the manifest ----------------------------------------------------------------------------------

    def _walk(self) -> Manifest:
        entries: list[ManifestEntry] = []
        with (
            file_errors("read", self._place.path),
            closing_descriptor(self._files.open_folder(self._place)) as descriptor,
        ):
            self._list(descriptor, "", entries)
        odd = (entry for entry in entries if not entry.target.isprintable())
        if (link := leads_out(entries) or next(odd, None)) is not None:
            raise Failed(
                f"'{display(self._place.path)}' contains the link '{display(link.path)}', which leads out of it to "
                f"'{display(link.target)}'; transfer its target separately, or remove the link"
            )
        manifest = Manifest(entries)
        if len(manifest.encoded) > MAX_MANIFEST_BYTES:
            raise Failed(
                f"Failed to read '{display(self._place.path)}': its list of files is too long to be transferred"
            )
        return manifest

    def _list(self, descriptor: int, prefix: str, entries: list[ManifestEntry]) -> None:
        with os.scandir(descriptor) as found:
            listed = sorted(found, key=lambda each: each.name)
        for each in listed:
            path = f"{prefix}{each.name}"
            if self._files.is_hidden(f"{self._place.real}/{path}") or _is_partial(each.name):
                continue
            try:
                path.encode()
            except UnicodeEncodeError:
                raise Failed(
                    f"Failed to read '{display(path)}': a file's name must be UTF-8 to be transferred"
                ) from None
            if len(entries) >= MAX_ENTRIES:
                raise Failed(f"a transfer has at most {MAX_ENTRIES} files; '{display(self._place.path)}' has more")
            status = each.stat(follow_symlinks=False)
            if (status.st_dev, status.st_ino) in self._protected:
                continue
            if stat.S_ISDIR(status.st_mode):
                if path.count("/") >= MOST_DEEP:
                    raise Failed(
                        f"'{display(self._place.path)}' has folders more than {MOST_DEEP} deep; transfer "
                        "the inner ones separately"
                    )
                entries.append(ManifestEntry(path, EntryKind.FOLDER, private=_private(status)))
                with closing_descriptor(open_subfolder(each.name, descriptor)) as inner:
                    self._list(inner, f"{path}/", entries)
            elif stat.S_ISREG(status.st_mode):
                entries.append(_file_entry(path, status))
            elif stat.S_ISLNK(status.st_mode):
                entries.append(ManifestEntry(path, EntryKind.LINK, target=os.readlink(each.name, dir_fd=descriptor)))
            # Sockets, pipes and devices have no content to send.


def _file_entry(path: str, status: os.stat_result) -> ManifestEntry:
    executable = bool(status.st_mode & 0o100)
    return ManifestEntry(path, EntryKind.FILE, status.st_size, executable, status.st_mtime_ns, private=_private(status))


def _private(status: os.stat_result) -> bool:
    return not status.st_mode & 0o077


def _mime(head: bytes, path: str) -> str | None:
    """Return the type by the beginning of a file, else by its name; None if it is unknown."""
    found = mime_type(head) if head else UNKNOWN_TYPE
    return mimetypes.guess_type(path)[0] if found == UNKNOWN_TYPE else found


def _kept_manifest(kept: Path) -> Manifest | None:
    with contextlib.suppress(OSError, ProtocolError):
        return Manifest.decode(kept.read_bytes())
    return None


def _is_partial(name: str) -> bool:
    return name.startswith(".farhand-") and name.endswith((".part", ".tmp"))
