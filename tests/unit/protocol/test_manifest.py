"""A manifest is hostile input: what no honest sender writes is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farhand.protocol.errors import ProtocolError
from farhand.protocol.frames import decode_frame, part_end, read_part_end
from farhand.protocol.manifest import Entry, EntryKind, Manifest, leads_out

FILE, FOLDER, LINK = EntryKind.FILE, EntryKind.FOLDER, EntryKind.LINK


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = Manifest([Entry("a", FOLDER), Entry("a/x", FILE, 5, True, 7), Entry("l", LINK, target="a/x")])
    again = Manifest.decode(manifest.encoded)
    assert again.entries == manifest.entries and again.size == 5 and again.files == 1 and not again.single
    start = len(manifest.encoded)
    assert again.ends == [start, start, start + 5, start + 5] and again.total == start + 5


def test_a_file_alone() -> None:
    assert Manifest.decode(Manifest([Entry("", FILE, 3)]).encoded).single


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("../x", FILE)],
        [Entry("/etc/passwd", FILE)],
        [Entry("a/x", FILE)],
        [Entry("a", FILE), Entry("a/x", FILE)],
        [Entry("a", LINK, target="b"), Entry("a/x", FILE)],
        [Entry("a", FOLDER), Entry("a/../../x", FILE)],
        [Entry("x", FILE), Entry("x", FILE)],
        [Entry(".", FOLDER), Entry("x", FILE)],
        [Entry("x\0y", FILE), Entry("z", FILE)],
        [Entry("x", FILE, -1), Entry("y", FILE)],
        [Entry("x", FOLDER, 5)],
        [Entry("", FOLDER)],
        [Entry("", FILE, -1)],
        [Entry("l", LINK, target="/etc/passwd"), Entry("x", FILE)],
        [Entry("l", LINK, target="../x"), Entry("x", FILE)],
    ],
)
def test_what_no_sender_sends(entries: list[Entry]) -> None:
    with pytest.raises(ProtocolError):
        Manifest.decode(msgspec.json.encode(entries))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'[["a"]]', b"[[]]", b'[["a","file",1.5]]', b'[ ["","file",1,false,0,""]]']
)
def test_what_is_no_manifest(data: Any) -> None:
    with pytest.raises(ProtocolError):
        Manifest.decode(data)


@pytest.mark.parametrize(
    ("path", "target", "beneath"),
    [("l", "a", True), ("d/l", "../a", True), ("l", "..", False), ("d/l", "../../a", False), ("l", "", False)],
)
def test_links(path: str, target: str, beneath: bool) -> None:
    entries = [Entry("d", EntryKind.FOLDER), Entry(path, EntryKind.LINK, target=target)]
    assert leads_out(entries) == (None if beneath else entries[1])


def test_a_link_does_not_climb_out_of_another() -> None:
    deep = [Entry(path, EntryKind.FOLDER) for path in ("a", "a/b", "e")]
    up = Entry("a/b/up", EntryKind.LINK, target="../../e")
    assert leads_out([*deep, up, Entry("a/b/in", EntryKind.LINK, target="up/x")]) is None
    out = Entry("a/b/out", EntryKind.LINK, target="up/../../x")
    assert leads_out([*deep, up, out]) == out


def test_the_end_of_a_part() -> None:
    frame = decode_frame(part_end(7, 100, 3, b"d" * 32))
    assert (frame.stream, frame.offset) == (7, 100) and read_part_end(frame.payload) == (3, b"d" * 32)
    with pytest.raises(ProtocolError):
        read_part_end(b"short")
