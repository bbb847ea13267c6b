"""The manifest of a transfer: its files in the order in which their content is sent.

A stream is the manifest itself (part 0) followed by the content of each entry (parts 1, 2, …). One offset therefore
describes the progress of any transfer.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import accumulate

import msgspec

from farhand.protocol.errors import ProtocolError
from farhand.protocol.json_limits import check_value_count

MAX_ENTRIES = 200_000
MAX_MANIFEST_BYTES = 48 * 1024 * 1024
# Counted by brackets and commas, outside of paths.
_MAX_VALUES = 8 * MAX_ENTRIES


class EntryKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file, folder or link below what is sent; the path of a single file is empty."""

    path: str
    kind: EntryKind
    size: int = 0
    executable: bool = False
    # Modification time in nanoseconds, as reported by the sender.
    changed: int = 0
    target: str = ""
    # Readable by its owner only.
    private: bool = False


class Manifest:
    """Entries, and the range of the stream each of them occupies."""

    def __init__(self, entries: list[ManifestEntry]) -> None:
        self.entries = entries
        self.encoded = _encoder.encode(entries)
        # The offsets at which parts 0, 1, 2, … end.
        self.ends = list(accumulate((entry.size for entry in entries), initial=len(self.encoded)))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode a manifest. Raises ProtocolError for an invalid one, such as one with paths that lead outside."""
        try:
            check_value_count(data, _MAX_VALUES)
        except msgspec.DecodeError:  # before millions of entries are decoded
            raise ProtocolError(f"a manifest has at most {MAX_ENTRIES} entries") from None
        try:
            entries = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not a manifest: {error}") from None
        _check(entries)
        manifest = cls(entries)
        if manifest.encoded != data:
            raise ProtocolError("not a manifest: not in canonical form")
        return manifest

    @property
    def single(self) -> bool:
        """True for a single file."""
        return len(self.entries) == 1 and self.entries[0].path == ""

    @property
    def files(self) -> int:
        return sum(entry.kind is EntryKind.FILE for entry in self.entries)

    @property
    def size(self) -> int:
        """Return the size of all files in bytes."""
        return self.ends[-1] - self.ends[0]

    @property
    def total(self) -> int:
        """Return the length of the stream."""
        return self.ends[-1]


def _check(entries: list[ManifestEntry]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise ProtocolError(f"a manifest has at most {MAX_ENTRIES} entries")
    if len(entries) == 1 and entries[0].path == "":
        if entries[0].kind is not EntryKind.FILE or entries[0].size < 0:
            raise ProtocolError("not a manifest: a single entry must be a file")
        return
    folders = {""}
    seen = set()
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        if name in ("", ".", "..") or "\0" in name:
            raise ProtocolError(f"not a manifest: {entry.path!r} is not a path below a folder")
        if parent not in folders or entry.path in seen:
            raise ProtocolError(f"not a manifest: {entry.path!r} is repeated, or precedes its folder")
        if entry.size < 0 or (entry.size and entry.kind is not EntryKind.FILE):
            raise ProtocolError(f"not a manifest: {entry.path!r} has {entry.size} bytes")
        seen.add(entry.path)
        if entry.kind is EntryKind.FOLDER:
            folders.add(entry.path)
    if (link := leads_out(entries)) is not None:
        raise ProtocolError(f"not a manifest: the link {link.path!r} leads out of the folder")


def leads_out(entries: list[ManifestEntry]) -> ManifestEntry | None:
    """Return the first link that leads, or may lead, out of the folder that is sent."""
    folders = {"", *(entry.path for entry in entries if entry.kind is EntryKind.FOLDER)}
    links = (entry for entry in entries if entry.kind is EntryKind.LINK)
    return next((link for link in links if not _stays_beneath(link.path, link.target, folders)), None)


def _stays_beneath(path: str, target: str, folders: set[str]) -> bool:
    """Return whether the target of a link at `path` lies below.

    A `..` must leave a folder that is sent: leaving another link, it would lead anywhere.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    here = path.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            if not here or "/".join(here) not in folders:
                return False
            here.pop()
        elif part not in ("", "."):
            here.append(part)
    return True


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[list[ManifestEntry]] = msgspec.json.Decoder(list[ManifestEntry])
