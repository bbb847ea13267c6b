"""A manifest is hostile input: what no honest sender writes is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farhand.protocol.errors import ProtocolError
from farhand.protocol.frames import decode_frame, part_end, read_part_end
from farhand.protocol.manifest import EntryKind, Manifest, ManifestEntry, leads_out

FILE, FOLDER, LINK = EntryKind.FILE, EntryKind.FOLDER, EntryKind.LINK


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = Manifest(
        [ManifestEntry("a", FOLDER), ManifestEntry("a/x", FILE, 5, True, 7), ManifestEntry("l", LINK, target="a/x")]
    )
    again = Manifest.decode(manifest.encoded)
    assert again.entries == manifest.entries and again.size == 5 and again.files == 1 and not again.single
    start = len(manifest.encoded)
    assert again.ends == [start, start, start + 5, start + 5] and again.total == start + 5


def test_a_file_alone() -> None:
    assert Manifest.decode(Manifest([ManifestEntry("", FILE, 3)]).encoded).single


@pytest.mark.parametrize(
    "entries",
    [
        [ManifestEntry("../x", FILE)],
        [ManifestEntry("/etc/passwd", FILE)],
        [ManifestEntry("a/x", FILE)],
        [ManifestEntry("a", FILE), ManifestEntry("a/x", FILE)],
        [ManifestEntry("a", LINK, target="b"), ManifestEntry("a/x", FILE)],
        [ManifestEntry("a", FOLDER), ManifestEntry("a/../../x", FILE)],
        [ManifestEntry("x", FILE), ManifestEntry("x", FILE)],
        [ManifestEntry(".", FOLDER), ManifestEntry("x", FILE)],
        [ManifestEntry("x\0y", FILE), ManifestEntry("z", FILE)],
        [ManifestEntry("x", FILE, -1), ManifestEntry("y", FILE)],
        [ManifestEntry("x", FOLDER, 5)],
        [ManifestEntry("", FOLDER)],
        [ManifestEntry("", FILE, -1)],
        [ManifestEntry("l", LINK, target="/etc/passwd"), ManifestEntry("x", FILE)],
        [ManifestEntry("l", LINK, target="../x"), ManifestEntry("x", FILE)],
    ],
)
def test_what_no_sender_sends(entries: list[ManifestEntry]) -> None:
    with pytest.raises(ProtocolError):
        Manifest.decode(msgspec.json.encode(entries))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'[["a"]]', b"[[]]", b'[["a","file",1.5]]', b'[ ["","file",1,false,0,""]]']
)
def test_an_invalid_manifest(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Manifest.decode(data)


@pytest.mark.parametrize(
    ("path", "target", "beneath"),
    [("l", "a", True), ("d/l", "../a", True), ("l", "..", False), ("d/l", "../../a", False), ("l", "", False)],
)
def test_links(path: str, target: str, beneath: bool) -> None:
    entries = [ManifestEntry("d", EntryKind.FOLDER), ManifestEntry(path, EntryKind.LINK, target=target)]
    assert leads_out(entries) == (None if beneath else entries[1])


def test_a_link_does_not_climb_out_of_another() -> None:
    deep = [ManifestEntry(path, EntryKind.FOLDER) for path in ("a", "a/b", "e")]
    up = ManifestEntry("a/b/up", EntryKind.LINK, target="../../e")
    assert leads_out([*deep, up, ManifestEntry("a/b/in", EntryKind.LINK, target="up/x")]) is None
    out = ManifestEntry("a/b/out", EntryKind.LINK, target="up/../../x")
    assert leads_out([*deep, up, out]) == out


def test_the_end_of_a_part() -> None:
    frame = decode_frame(part_end(7, 100, 3, b"d" * 32))
    assert (frame.stream, frame.offset) == (7, 100) and read_part_end(frame.payload) == (3, b"d" * 32)
    with pytest.raises(ProtocolError):
        read_part_end(b"short")
