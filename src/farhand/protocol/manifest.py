"""The manifest of a transfer: what is in it, in the order in which its content is sent.

A stream is one row of bytes: the manifest itself (part 0), then the content of each entry (parts 1, 2, …) one after
the other. So one offset says everything about how far a transfer has come, be it a file or a folder of thousands.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import accumulate

import msgspec

from farhand.protocol.errors import ProtocolError

MAX_ENTRIES = 200_000
MAX_MANIFEST_BYTES = 48 * 1024 * 1024
# What is between two entries. A path may contain it too, but not so often.
_BETWEEN = b"],["


class EntryKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file, folder or link beneath what is sent; the path of a file sent alone is empty."""

    path: str
    kind: EntryKind
    size: int = 0
    executable: bool = False
    # When the file last changed, in nanoseconds, as its sender tells it.
    changed: int = 0
    target: str = ""
    # A file or folder for its owner alone.
    private: bool = False


class Manifest:
    """Entries, and where in the stream each begins and ends."""

    def __init__(self, entries: list[ManifestEntry]) -> None:
        self.entries = entries
        self.encoded = _encoder.encode(entries)
        # Where part 0, 1, 2, … ends.
        self.ends = list(accumulate((entry.size for entry in entries), initial=len(self.encoded)))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises ProtocolError for a manifest that no sender of ours would send, such as one with paths that climb."""
        if data.count(_BETWEEN) >= MAX_ENTRIES:  # before millions of them are made
            raise ProtocolError(f"a manifest has at most {MAX_ENTRIES} entries")
        try:
            entries = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not a manifest: {error}") from None
        _check(entries)
        manifest = cls(entries)
        if manifest.encoded != data:
            raise ProtocolError("not a manifest: it is not spelled as it should be")
        return manifest

    @property
    def single(self) -> bool:
        """A file alone."""
        return len(self.entries) == 1 and self.entries[0].path == ""

    @property
    def files(self) -> int:
        return sum(entry.kind is EntryKind.FILE for entry in self.entries)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.ends[-1] - self.ends[0]

    @property
    def total(self) -> int:
        """Length of the stream."""
        return self.ends[-1]


def _check(entries: list[ManifestEntry]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise ProtocolError(f"a manifest has at most {MAX_ENTRIES} entries")
    if len(entries) == 1 and entries[0].path == "":
        if entries[0].kind is not EntryKind.FILE or entries[0].size < 0:
            raise ProtocolError("not a manifest: what is sent alone is a file")
        return
    folders = {""}
    seen = set()
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        if name in ("", ".", "..") or "\0" in name:
            raise ProtocolError(f"not a manifest: {entry.path!r} is no path beneath a folder")
        if parent not in folders or entry.path in seen:
            raise ProtocolError(f"not a manifest: {entry.path!r} comes twice, or before its folder")
        if entry.size < 0 or (entry.size and entry.kind is not EntryKind.FILE):
            raise ProtocolError(f"not a manifest: {entry.path!r} has {entry.size} bytes")
        seen.add(entry.path)
        if entry.kind is EntryKind.FOLDER:
            folders.add(entry.path)
    if (link := leads_out(entries)) is not None:
        raise ProtocolError(f"not a manifest: the link {link.path!r} leads out of the folder")


def leads_out(entries: list[ManifestEntry]) -> ManifestEntry | None:
    """The first link that leads, or may lead, out of the folder that is sent."""
    folders = {"", *(entry.path for entry in entries if entry.kind is EntryKind.FOLDER)}
    links = (entry for entry in entries if entry.kind is EntryKind.LINK)
    return next((link for link in links if not _stays_beneath(link.path, link.target, folders)), None)


def _stays_beneath(path: str, target: str, folders: set[str]) -> bool:
    """Whether a link at `path` leads, by its text, to something beneath. Where it climbs, what it climbs out of must be
    a folder that is sent: out of another link, `..` leads to wherever that one is."""
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
