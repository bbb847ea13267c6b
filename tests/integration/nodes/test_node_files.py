"""`Read`, `Write` and `Edit` through a real gateway and a real node: every field, every error condition of the seed."""

from __future__ import annotations

import base64
import binascii
import contextlib
import gzip
import os
import socket
import stat
import struct
import subprocess
import threading
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import NodeProcess

CAP = 10 * 1024 * 1024
NOT_FOUND = "No such file or directory"


def png(size: int | None = None) -> bytes:
    """A 1×1 picture; with `size`, padded by a text chunk to exactly that many bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))

    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    if size is None:
        return head + end
    return head + chunk(b"tEXt", b"k\0" + b"x" * (size - len(head) - len(end) - 14)) + end


IMAGES = {
    "image/png": png(),
    "image/jpeg": bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffdb004300") + b"\x10" * 64 + b"\xff\xd9",
    "image/gif": b"GIF89a\x01\x00\x01\x00\x80\x00\x00\xff\xff\xff\x00\x00\x00,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;",
    "image/webp": b"RIFF\x24\x00\x00\x00WEBPVP8 \x18\x00\x00\x000\x01\x00\x9d\x01*\x01\x00\x01\x00"
    b"\x02\x004%\xa4\x00\x03p\x00\xfe\xfb\x94\x00\x00",
}


@pytest.fixture
def folder(hands: NodeProcess) -> Path:
    """A folder of the test's own in the node's workspace."""
    path = hands.workspace / f"t-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


# -- Read: text ----------------------------------------------------------------------------------------------------


def test_lines_come_numbered_from_1(hands: NodeProcess, folder: Path) -> None:
    (folder / "a.txt").write_text("first\n\n  third ☃\n")
    path = f"{folder}/a.txt"
    assert hands.ok("Read", {"path": path}) == {"path": path, "content": "1\tfirst\n2\t\n3\t  third ☃", "lines": 3}


def test_a_relative_path_begins_at_the_workspace_and_is_reported_in_full(hands: NodeProcess, folder: Path) -> None:
    (folder / "b.txt").write_text("x")
    for path in (f"{folder.name}/b.txt", f"./{folder.name}//b.txt", f"{folder.name}/../{folder.name}/b.txt"):
        assert hands.ok("Read", {"path": path})["path"] == f"{folder}/b.txt"


def test_an_absolute_path_is_used_as_it_is(hands: NodeProcess, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.txt").write_text("here")
    assert hands.ok("Read", {"path": str(tmp_path / "elsewhere.txt")})["content"] == "1\there"


@pytest.mark.parametrize(
    ("args", "content", "lines"),
    [
        ({"offset": 0}, "1\ta\n2\tb\n3\tc\n4\td", 4),
        ({"offset": 2}, "3\tc\n4\td", 2),
        ({"limit": 2}, "1\ta\n2\tb", 2),
        ({"offset": 1, "limit": 2}, "2\tb\n3\tc", 2),
        ({"offset": 3, "limit": 100}, "4\td", 1),
        ({"offset": 4}, "", 0),
        ({"offset": 10**12}, "", 0),
        ({"limit": 0}, "", 0),
        ({"limit": None}, "1\ta\n2\tb\n3\tc\n4\td", 4),
    ],
)
def test_offset_and_limit_page_and_the_numbers_continue(
    hands: NodeProcess, folder: Path, args: dict[str, Any], content: str, lines: int
) -> None:
    (folder / "abcd").write_text("a\nb\nc\nd\n")
    result = hands.ok("Read", {"path": f"{folder}/abcd", **args})
    assert (result["content"], result["lines"]) == (content, lines)


@pytest.mark.parametrize("text", ["", "one line without an end", "windows\r\nends\r\n", "\n"])
def test_unusual_texts(hands: NodeProcess, folder: Path, text: str) -> None:
    (folder / "odd").write_bytes(text.encode())
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    expected = expected[:-1] if expected[-1] == "" else expected
    result = hands.ok("Read", {"path": f"{folder}/odd"})
    assert result["lines"] == len(expected)
    assert result["content"] == "\n".join(f"{n}\t{line}" for n, line in enumerate(expected, 1))


def test_a_link_is_read_at_its_target_and_reported_by_its_own_path(hands: NodeProcess, folder: Path) -> None:
    (folder / "real").write_text("content")
    (folder / "link").symlink_to("real")
    assert hands.ok("Read", {"path": f"{folder}/link"}) == {
        "path": f"{folder}/link",
        "content": "1\tcontent",
        "lines": 1,
    }


def test_a_whole_text_file_over_the_plug_in_limit_comes_through(hands: NodeProcess, folder: Path) -> None:
    (folder / "large").write_text("x" * 79 + "\n" + ("y" * 79 + "\n") * 99_999)
    result = hands.ok("Read", {"path": f"{folder}/large"})
    assert result["lines"] == 100_000 and result["content"].endswith("\n100000\t" + "y" * 79)


def test_a_page_of_a_large_file_does_not_load_the_file(hands: NodeProcess, folder: Path) -> None:
    """Nor is anything beyond the page looked at: what follows here is no text at all."""
    with (folder / "log").open("wb") as file:
        for thousand in range(1000):
            file.write(b"".join(b"%07d %b\n" % (thousand * 1000 + i, b"." * 80) for i in range(1000)))
        file.write(b"\xff\xfe")
        file.truncate(3 * 1024**3)

    def peak() -> int:
        for line in Path(f"/proc/{hands.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    before = peak()
    result = hands.ok("Read", {"path": f"{folder}/log", "offset": 900_000, "limit": 2})
    assert [line[:15] for line in result["content"].split("\n")] == ["900001\t0900000 "[:15], "900002\t0900001 "[:15]]
    assert peak() - before < 40 * 1024 * 1024


# -- Read: images and other bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_comes_as_content_blocks(hands: NodeProcess, folder: Path, kind: str) -> None:
    """Its type is recognised by its bytes, not by its name."""
    data = IMAGES[kind]
    (folder / "photo.dat").write_bytes(data)
    result = hands.ok("Read", {"path": f"{folder}/photo.dat", "offset": 5, "limit": 1})
    assert result == {
        "content": [
            {"type": "text", "text": f"Image file: photo.dat ({kind}, {len(data)} bytes)"},
            {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": kind},
        ]
    }


def test_an_svg_is_text(hands: NodeProcess, folder: Path) -> None:
    (folder / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>\n')
    assert hands.ok("Read", {"path": f"{folder}/a.svg"})["lines"] == 1


def test_an_image_of_exactly_10_mb_comes_through(hands: NodeProcess, folder: Path) -> None:
    data = png(CAP)
    assert len(data) == CAP
    (folder / "cap.png").write_bytes(data)
    text, image = hands.ok("Read", {"path": f"{folder}/cap.png"})["content"]
    assert text["text"] == f"Image file: cap.png (image/png, {CAP} bytes)"
    assert base64.b64decode(image["data"]) == data


@pytest.mark.parametrize("size", [CAP + 1, 3 * 1024**3])
def test_an_image_over_10_mb_is_an_error(hands: NodeProcess, folder: Path, size: int) -> None:
    with (folder / "over.png").open("wb") as file:
        file.write(png())
        file.truncate(size)
    message = hands.fails("Read", {"path": f"{folder}/over.png"}, "failed")
    assert "over.png" in message and "too large" in message and f"{size} bytes" in message and str(CAP) in message


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("archive.tar.gz", gzip.compress(b"x" * 5000, mtime=0), "application/gzip"),
        ("paper.pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "application/pdf"),
        ("noise.bin", b"\xfe\xdc\xba\x98" * 10, "application/octet-stream"),
    ],
)
def test_a_binary_file_is_a_descriptive_error(
    hands: NodeProcess, folder: Path, name: str, data: bytes, kind: str
) -> None:
    (folder / name).write_bytes(data)
    message = hands.fails("Read", {"path": f"{folder}/{name}"}, "failed")
    assert message == f"Binary file: {name} ({kind}, {len(data)} bytes) — not a text or image file"


# -- Read: errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["no-such-file", "no/such/folder/file", "/no-such-root/file"])
def test_a_missing_file_is_not_found(hands: NodeProcess, path: str) -> None:
    message = hands.fails("Read", {"path": path}, "not_found")
    assert message == f"Failed to read '{hands.workspace / path}': {NOT_FOUND}"


def test_a_directory_is_an_error(hands: NodeProcess, folder: Path) -> None:
    assert hands.fails("Read", {"path": str(folder)}, "failed") == f"Failed to read '{folder}': Is a directory"


def test_a_file_that_cannot_be_read_is_an_error(hands: NodeProcess) -> None:
    """The tests may run as root, which no mode stops; the beginning of this file cannot be read by any user."""
    assert hands.fails("Read", {"path": "/proc/self/mem"}, "failed").startswith("Failed to read '/proc/self/mem': ")


def test_a_pipe_a_socket_and_a_device_are_errors_at_once(hands: NodeProcess, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert "named pipe" in hands.fails("Read", {"path": f"{folder}/pipe"}, "failed")
    with socket.socket(socket.AF_UNIX) as bound:
        with contextlib.chdir(folder):  # the name of a socket must be short
            bound.bind("socket")
        assert "socket" in hands.fails("Read", {"path": f"{folder}/socket"}, "failed")
    assert "device" in hands.fails("Read", {"path": "/dev/zero"}, "failed")


def test_a_link_in_a_circle_is_an_error(hands: NodeProcess, folder: Path) -> None:
    (folder / "round").symlink_to("round")
    assert f"{folder}/round" in hands.fails("Read", {"path": f"{folder}/round"}, "failed")


@pytest.mark.parametrize("args", [{"offset": -1}, {"limit": -5}, {"offset": "1"}, {"limit": 1.5}, {"offset": None}])
def test_numbers_that_make_no_sense_are_refused(hands: NodeProcess, args: dict[str, Any]) -> None:
    assert next(iter(args)) in hands.fails("Read", {"path": "x", **args}, "invalid_args")


NAMELESS: list[tuple[str, dict[str, Any]]] = [
    ("Read", {}),
    ("Write", {"content": "x"}),
    ("Edit", {"oldString": "a", "newString": "b"}),
]


@pytest.mark.parametrize(("tool", "args"), NAMELESS)
def test_a_nul_in_a_path_is_refused(hands: NodeProcess, tool: str, args: dict[str, Any]) -> None:
    message = hands.fails(tool, {"path": "a\0b", **args}, "invalid_args")
    assert "path" in message and "NUL" in message


@pytest.mark.parametrize(("tool", "args"), NAMELESS)
def test_an_empty_path_is_not_a_file(hands: NodeProcess, tool: str, args: dict[str, Any]) -> None:
    answer = hands.gateway.invoke(f"hands__{tool}", {"path": "", **args})
    assert answer["ok"] is False and answer["error"]["message"]


@pytest.mark.parametrize(("tool", "args"), NAMELESS)
def test_a_name_too_long_for_the_system_is_refused(hands: NodeProcess, tool: str, args: dict[str, Any]) -> None:
    assert "too long" in hands.fails(tool, {"path": "x" * 5000, **args}, "invalid_args")


def test_a_tilde_is_an_ordinary_character(hands: NodeProcess) -> None:
    hands.ok("Write", {"path": "~/note", "content": "x"})
    assert (hands.workspace / "~" / "note").read_text() == "x"


# -- Write ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "plain\n", "grüße ☃ 🎉", "a\0b", "windows\r\n", "x" * 3_000_000])
def test_write_makes_the_file_and_counts_its_bytes(hands: NodeProcess, folder: Path, content: str) -> None:
    path = f"{folder.name}/new.txt"
    result = hands.ok("Write", {"path": path, "content": content})
    assert result == {"path": f"{folder}/new.txt", "bytes": len(content.encode())}
    assert (folder / "new.txt").read_bytes() == content.encode()


def test_write_overwrites(hands: NodeProcess, folder: Path) -> None:
    (folder / "old").write_text("a much longer text than the new one")
    hands.ok("Write", {"path": f"{folder}/old", "content": "new"})
    assert (folder / "old").read_text() == "new"


def test_write_makes_the_parent_folders(hands: NodeProcess, folder: Path) -> None:
    hands.ok("Write", {"path": f"{folder}/a/b/c/file", "content": "deep"})
    assert (folder / "a/b/c/file").read_text() == "deep"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o400 | 0o222])
def test_write_keeps_the_mode(hands: NodeProcess, folder: Path, mode: int) -> None:
    (folder / "f").write_text("old")
    (folder / "f").chmod(mode)
    hands.ok("Write", {"path": f"{folder}/f", "content": "new"})
    assert stat.S_IMODE((folder / "f").stat().st_mode) == mode and (folder / "f").read_text() == "new"


def test_a_new_file_has_the_mode_a_program_would_give_it(hands: NodeProcess, folder: Path) -> None:
    hands.ok("Write", {"path": f"{folder}/by-tool", "content": ""})
    hands.ok("Bash", {"command": "touch by-shell", "workdir": str(folder)})
    assert (folder / "by-tool").stat().st_mode == (folder / "by-shell").stat().st_mode


def test_write_replaces_in_one_step(hands: NodeProcess, folder: Path) -> None:
    """A concurrent reader sees the whole old text or the whole new one, and no temporary file is left."""
    versions = [letter * 400_000 for letter in "ab"]
    (folder / "f").write_text(versions[0])
    stop = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not stop.is_set():
            text = (folder / "f").read_text()
            if text not in versions:
                torn.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(20):
            hands.ok("Write", {"path": f"{folder}/f", "content": versions[turn % 2]})
    finally:
        stop.set()
        reader.join()
    assert not torn and os.listdir(folder) == ["f"]


def test_write_goes_through_a_link(hands: NodeProcess, folder: Path) -> None:
    (folder / "real").write_text("old")
    (folder / "link").symlink_to("real")
    hands.ok("Write", {"path": f"{folder}/link", "content": "new"})
    assert (folder / "link").is_symlink() and (folder / "real").read_text() == "new"


def test_write_to_a_directory_is_an_error(hands: NodeProcess, folder: Path) -> None:
    message = hands.fails("Write", {"path": str(folder), "content": "x"}, "failed")
    assert message == f"Failed to write '{folder}': Is a directory" and os.listdir(folder) == []


def test_write_below_a_file_is_an_error(hands: NodeProcess, folder: Path) -> None:
    (folder / "file").write_text("kept")
    message = hands.fails("Write", {"path": f"{folder}/file/below/x", "content": "x"}, "failed")
    assert "create the folders" in message and (folder / "file").read_text() == "kept"


def test_write_where_no_folder_can_be_made_is_an_error(hands: NodeProcess) -> None:
    message = hands.fails("Write", {"path": "/proc/no-such-thing/x", "content": "x"}, "failed")
    assert message.startswith("Failed to create the folders of '/proc/no-such-thing/x': ")


def test_write_to_a_pipe_is_an_error_at_once(hands: NodeProcess, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert "named pipe" in hands.fails("Write", {"path": f"{folder}/pipe", "content": "x"}, "failed")
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)


def test_a_full_disk_fails_and_leaves_the_old_file(hands: NodeProcess, mounted: Any) -> None:
    disk = mounted("size=64k")
    (disk / "f").write_text("old")
    for content in ("x" * 1_000_000, "y" * 100_000):
        message = hands.fails("Write", {"path": f"{disk}/f", "content": content}, "failed")
        assert message.startswith(f"Failed to write '{disk}/f': No space left on device")
        message = hands.fails("Edit", {"path": f"{disk}/f", "oldString": "old", "newString": content}, "failed")
        assert "No space left on device" in message
    assert (disk / "f").read_text() == "old" and os.listdir(disk) == ["f"]
    message = hands.fails("Write", {"path": f"{disk}/new", "content": "x" * 1_000_000}, "failed")
    assert "No space left on device" in message and os.listdir(disk) == ["f"]


def test_a_read_only_file_system_refuses(hands: NodeProcess, mounted: Any) -> None:
    disk = mounted("size=64k")
    (disk / "f").write_text("old")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for path in (f"{disk}/f", f"{disk}/new", f"{disk}/a/b"):
        assert "Read-only file system" in hands.fails("Write", {"path": path, "content": "x"}, "not_allowed")
    args = {"path": f"{disk}/f", "oldString": "old", "newString": "new"}
    assert "Read-only file system" in hands.fails("Edit", args, "not_allowed")
    assert (disk / "f").read_text() == "old"


def test_an_immutable_file_is_an_error_and_stays(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("old")
    if subprocess.run(["chattr", "+i", folder / "f"], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        hands.fails("Write", {"path": f"{folder}/f", "content": "x"}, "not_allowed")
        assert (folder / "f").read_text() == "old" and os.listdir(folder) == ["f"]
    finally:
        subprocess.run(["chattr", "-i", folder / "f"], check=True)


# -- Edit ----------------------------------------------------------------------------------------------------------


def test_edit_replaces_the_one_match(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("one two three\n")
    result = hands.ok("Edit", {"path": f"{folder.name}/f", "oldString": "two", "newString": "2 ☃"})
    assert result == {"path": f"{folder}/f", "replacements": 1}
    assert (folder / "f").read_text() == "one 2 ☃ three\n"


def test_edit_replaces_all_with_replace_all(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("a-a-a")
    args = {"path": f"{folder}/f", "oldString": "a", "newString": "bb", "replaceAll": True}
    assert hands.ok("Edit", args)["replacements"] == 3
    assert (folder / "f").read_text() == "bb-bb-bb"


def test_edit_takes_text_as_it_is(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_bytes(b"a.*b\r\n\tline $1\n")
    args = {"path": f"{folder}/f", "oldString": ".*b\r\n\tline $1", "newString": "\\1 $& \r\n"}
    assert hands.ok("Edit", args)["replacements"] == 1
    assert (folder / "f").read_bytes() == b"a\\1 $& \r\n\n"


def test_edit_can_delete(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("keep drop keep")
    hands.ok("Edit", {"path": f"{folder}/f", "oldString": " drop", "newString": ""})
    assert (folder / "f").read_text() == "keep keep"


def test_edit_of_what_is_not_there_is_an_error(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("text")
    message = hands.fails("Edit", {"path": f"{folder}/f", "oldString": "absent", "newString": "x"}, "failed")
    assert message == f"oldString not found in '{folder}/f'" and (folder / "f").read_text() == "text"


@pytest.mark.parametrize("count", [2, 7])
def test_edit_of_several_matches_tells_their_number(hands: NodeProcess, folder: Path, count: int) -> None:
    (folder / "f").write_text("same\n" * count)
    message = hands.fails("Edit", {"path": f"{folder}/f", "oldString": "same", "newString": "x"}, "failed")
    assert message == (
        f"oldString found {count} times in '{folder}/f'. "
        "Use replaceAll: true or provide more context to make it unique."
    )
    assert (folder / "f").read_text() == "same\n" * count


def test_edit_of_a_missing_file_is_not_found(hands: NodeProcess, folder: Path) -> None:
    message = hands.fails("Edit", {"path": f"{folder}/no", "oldString": "a", "newString": "b"}, "not_found")
    assert message == f"Failed to read '{folder}/no': {NOT_FOUND}" and os.listdir(folder) == []


def test_edit_of_a_directory_is_an_error(hands: NodeProcess, folder: Path) -> None:
    message = hands.fails("Edit", {"path": str(folder), "oldString": "a", "newString": "b"}, "failed")
    assert "Is a directory" in message


def test_edit_of_binary_data_is_an_error(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_bytes(b"abc\xff")
    message = hands.fails("Edit", {"path": f"{folder}/f", "oldString": "a", "newString": "b"}, "failed")
    assert "UTF-8" in message and (folder / "f").read_bytes() == b"abc\xff"


def test_edit_of_nothing_is_refused(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("text")
    assert "oldString" in hands.fails(
        "Edit", {"path": f"{folder}/f", "oldString": "", "newString": "x"}, "invalid_args"
    )
    assert (folder / "f").read_text() == "text"


def test_edit_keeps_the_mode_and_the_link(hands: NodeProcess, folder: Path) -> None:
    (folder / "f").write_text("old")
    (folder / "f").chmod(0o750)
    (folder / "link").symlink_to("f")
    hands.ok("Edit", {"path": f"{folder}/link", "oldString": "old", "newString": "new"})
    assert stat.S_IMODE((folder / "f").stat().st_mode) == 0o750
    assert (folder / "f").read_text() == "new" and (folder / "link").is_symlink()
    assert sorted(os.listdir(folder)) == ["f", "link"]


def test_simultaneous_edits_are_not_lost(hands: NodeProcess, folder: Path) -> None:
    """Each either took effect or was refused, saying that the file had changed."""
    (folder / "f").write_text("".join(f"<old {n}>\n" for n in range(24)) + "." * 500_000)

    def edit(number: int) -> Any:
        args = {"path": f"{folder}/f", "oldString": f"<old {number}>", "newString": f"<new {number}>"}
        return hands.gateway.invoke("hands__Edit", args)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(edit, range(24)))
    text = (folder / "f").read_text()
    for number, answer in enumerate(answers):
        assert (f"<new {number}>" in text) is answer["ok"], answer
        assert (f"<old {number}>" in text) is not answer["ok"]
        if not answer["ok"]:
            assert answer["error"]["kind"] == "failed" and "changed" in answer["error"]["message"]
    assert any(answer["ok"] for answer in answers) and os.listdir(folder) == ["f"]
