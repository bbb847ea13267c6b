"""Reading pages of text, replacing whole files, exact edits: on real files, pipes, devices and a full disk."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import stat
import subprocess
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.machine.files.files import Files
from farhand.machine.files.mime import mime_type
from farhand.machine.files.text import MOST_TEXT, NotText, NotUnique, is_text, read_lines, replace_text
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount or to change owners")
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


def page(text: str | bytes, offset: int = 0, limit: int | None = None) -> list[str]:
    return read_lines(io.BytesIO(text.encode() if isinstance(text, str) else text), offset, limit)


# -- pages of lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\n", ["a", ""]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\rb\n", ["a\rb"]),
        ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
    ],
)
def test_lines_end_at_line_feeds(text: str, lines: list[str]) -> None:
    assert page(text) == lines


@given(st.text(alphabet="aé\n\r", max_size=40), st.integers(0, 12), st.none() | st.integers(0, 12))
def test_a_page_is_a_slice_of_all_lines(text: str, offset: int, limit: int | None) -> None:
    everything = page(text)
    assert page(text, offset, limit) == everything[offset:][:limit]


def test_lines_and_characters_across_chunks_stay_whole() -> None:
    text = "".join(f"{number}é{'x' * (number % 700)}\n" for number in range(6000))
    everything = text.split("\n")[:-1]
    assert page(text) == everything
    for offset in (0, 1, 1500, 5998, 6000, 9999):
        assert page(text, offset, 3) == everything[offset : offset + 3]


def test_no_more_is_read_than_the_page_needs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("line\n" * 1000)
    os.truncate(log, 2 * 1024**3)
    with Files(tmp_path).open("log") as file:
        assert read_lines(file, 10, 5) == ["line"] * 5
        assert file.tell() < 1_000_000


def test_a_late_page_of_a_large_file_costs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(2_000_000)))
    with Files(tmp_path).open("log") as file:
        tracemalloc.start()
        lines = read_lines(file, 1_999_998, 10)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert lines == ["line 1999998", "line 1999999"]
    assert peak < 8_000_000


def test_a_page_larger_than_memory_should_hold_is_refused() -> None:
    with pytest.raises(Failed, match="offset and limit"):
        read_lines(io.BytesIO(b"x" * 2_000_000), most=1_000_000)


@pytest.mark.parametrize("limit", [None, 0, 1])
@pytest.mark.parametrize("offset", [0, 5])
def test_bytes_that_are_not_text_are_found_whatever_page_is_asked(offset: int, limit: int | None) -> None:
    with pytest.raises(NotText):
        page(b"head\n\x89PNG\xff\n", offset, limit)
    with pytest.raises(NotText):
        page(b"cut off: \xc3")


def test_is_text_reads_up_to_the_limit() -> None:
    late = b"x" * 600_000 + b"\xff"
    assert is_text(io.BytesIO("é".encode()), 100)
    assert not is_text(io.BytesIO(late), 1_000_000)
    assert is_text(io.BytesIO(late), 100_000)


# -- what can be opened


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_missing_file_is_not_found(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("missing", "missing/too", "file/in-a-file"):
        with pytest.raises(NotFound, match=f"Failed to read '{tmp_path}/{path}'"):
            files.open(path)


def test_a_folder_is_not_a_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in ("folder", ".", "/", ""):
        with pytest.raises(Failed, match="Is a directory"):
            files.open(path)
        with pytest.raises(Failed, match="Is a directory"):
            files.write(path, b"")


def test_pipes_sockets_and_devices_are_refused_at_once(files: Files, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in (("pipe", "named pipe"), ("socket", "socket"), ("/dev/zero", "device")):
            with pytest.raises(Failed, match=kind):
                files.open(path)
            with pytest.raises(Failed, match=kind):
                files.write(path, b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_name_too_long_is_an_invalid_argument(files: Files) -> None:
    with pytest.raises(InvalidArgs, match="File name too long"):
        files.open("x" * 300)


def test_an_error_does_not_repeat_an_unusable_path(files: Files) -> None:
    with pytest.raises(InvalidArgs, match="File name too long") as caught:
        files.open("/a" * 100_000)
    assert len(str(caught.value)) < 500


def test_a_name_that_is_not_utf8_can_be_used_in_pythons_spelling(files: Files, tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9", "wb") as file:
        file.write(b"coffee")
    with files.open("caf\udce9") as opened:
        assert opened.read() == b"coffee"
    with pytest.raises(NotFound, match="tea\ufffd"):
        files.open("tea\udce9")


def as_nobody(*acts: Callable[[], object]) -> list[str]:
    """What each act says, done without root's rights in a process of its own."""
    here, there = multiprocessing.Pipe()

    def run() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        said = []
        for act in acts:
            try:
                said.append(repr(act()))
            except NotAllowed as error:
                said.append(error.message)
        there.send(said)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert here.poll()
    said: list[str] = here.recv()
    return said


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that all users can reach; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@as_root
def test_unreadable_files_and_folders_are_not_allowed(public_folder: Path) -> None:
    (public_folder / "secret").write_text("x")
    (public_folder / "secret").chmod(0o600)
    (public_folder / "closed").mkdir(mode=0o700)
    (public_folder / "open").mkdir()
    (public_folder / "open").chmod(0o777)
    (public_folder / "open" / "kept").write_text("kept")
    (public_folder / "open" / "kept").chmod(0o444)
    files = Files(public_folder)
    assert as_nobody(
        lambda: files.open("secret"),
        lambda: files.open("closed/x"),
        lambda: files.write("new", b"changed"),
        lambda: files.write("closed/new/file", b"changed"),
        lambda: files.write("open/kept", b"changed"),
    ) == [
        f"Failed to read '{public_folder}/secret': Permission denied",
        f"Failed to read '{public_folder}/closed/x': Permission denied",
        f"Failed to write '{public_folder}/new': Permission denied",
        f"Failed to create the folders of '{public_folder}/closed/new/file': Permission denied",
        f"Failed to write '{public_folder}/open/kept': Permission denied",
    ]
    assert (public_folder / "open" / "kept").read_text() == "kept"
    assert os.listdir(public_folder / "open") == ["kept"]


@not_as_root
def test_an_unreadable_file_is_not_allowed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(NotAllowed, match="Permission denied"):
        files.open("secret")


# -- replacing


def test_a_new_file_obeys_the_umask_and_its_folders_are_made(files: Files, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        assert files.write("a/b/c", b"new") == str(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a" / "b" / "c").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750


def test_the_mode_of_a_replaced_file_is_kept(files: Files, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("old")
    script.chmod(0o751)
    files.write("script", b"new")
    assert stat.S_IMODE(script.stat().st_mode) == 0o751
    assert os.listdir(tmp_path) == ["script"]


@as_root
def test_the_owner_of_a_replaced_file_is_kept_but_no_set_user_id(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    os.chown(tmp_path / "file", 1234, 2345)
    (tmp_path / "file").chmod(0o4755)
    files.write("file", b"new")
    now = (tmp_path / "file").stat()
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (1234, 2345, 0o755)


def test_a_reader_sees_the_old_file_or_the_new_one_never_a_part(files: Files, tmp_path: Path) -> None:
    old, new = b"o" * 3_000_000, b"n" * 3_000_000
    files.write("file", old)
    done = threading.Event()
    seen: set[bytes] = set()

    def watch() -> None:
        while not done.is_set():
            seen.add((tmp_path / "file").read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(20):
        files.write("file", new if number % 2 == 0 else old)
    done.set()
    watcher.join()
    assert seen <= {old, new}


def test_a_link_is_followed_and_stays_a_link(files: Files, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write("link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError), files.replacing("file") as (file, _):
        file.write(b"half of the new")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_read_only_files_are_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    files = Files(tmp_path, read_only=True)
    with files.open("file") as file:
        assert file.read() == b"old"
    with pytest.raises(NotAllowed, match="read-only"):
        files.write("file", b"new")
    with pytest.raises(NotAllowed, match="read-only"):
        files.write("folder/file", b"new")
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_where_a_folder_is_needed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(Failed, match=r"create the folders .* not a folder"):
        files.write("file/below", b"x")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("this system does not let us mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@as_root
def test_a_full_disk_keeps_the_old_content_and_no_half_file(tiny_disk: Path) -> None:
    files = Files(tiny_disk)
    files.write("file", b"o" * 100_000)
    with pytest.raises(Failed, match="No space left on device"):
        files.write("file", b"n" * 1_000_000)
    with pytest.raises(Failed, match="No space left on device"):
        files.write("new", b"n" * 1_000_000)
    assert os.listdir(tiny_disk) == ["file"]
    assert (tiny_disk / "file").read_bytes() == b"o" * 100_000
    files.write("file", b"there is room again")


@as_root
def test_a_disk_mounted_read_only_is_not_allowed(tiny_disk: Path) -> None:
    (tiny_disk / "file").write_text("old")
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(NotAllowed, match=r"'.*/disk/file'"):
        Files(tiny_disk).write("file", b"new")


# -- edits


def test_the_one_match_is_replaced(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("eins\r\nzwei é\r\n".encode())
    assert replace_text(files, "file", "zwei é", "deux") == 1
    assert (tmp_path / "file").read_bytes() == b"eins\r\ndeux\r\n"


def test_matches_are_counted_and_replaced_only_on_request(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("aXaXaX")
    with pytest.raises(NotUnique) as found:
        replace_text(files, "file", "a", "b")
    assert found.value.count == 3
    assert (tmp_path / "file").read_text() == "aXaXaX"
    assert replace_text(files, "file", "a", "bb", every=True) == 3
    assert (tmp_path / "file").read_text() == "bbXbbXbbX"


def test_no_match_changes_nothing_and_tells_of_windows_lines(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\r\ntwo\r\n")
    before = (tmp_path / "file").stat().st_ino
    for old, windows in (("three", False), ("one\ntwo", True)):
        with pytest.raises(NotUnique) as found:
            replace_text(files, "file", old, "x", every=True)
        assert (found.value.count, found.value.windows_lines) == (0, windows)
    assert (tmp_path / "file").stat().st_ino == before


def test_bytes_that_are_not_text_are_not_edited(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc\xff")
    with pytest.raises(Failed, match=r"not UTF-8 text \(byte 3\)"):
        replace_text(files, "file", "abc", "x")


def test_a_file_too_large_to_hold_is_not_edited(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.truncate(tmp_path / "file", MOST_TEXT + 1)
    with pytest.raises(Failed, match="larger than"):
        replace_text(files, "file", "x", "y")


def test_an_edit_does_not_make_a_file_too_large_to_hold(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x" * 3000)
    with pytest.raises(Failed, match="would have 90000000 bytes"):
        replace_text(files, "file", "x", "y" * 30_000, every=True)
    assert (tmp_path / "file").read_text() == "x" * 3000


def test_a_file_changed_since_it_was_read_is_not_written(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(Failed, match=r"changed by someone else .* Read it again"):
        files.write("file", b"ours", expected=b"as we read it")
    (tmp_path / "file").unlink()
    with pytest.raises(Failed, match="changed by someone else"):
        files.write("file", b"ours", expected=b"as we read it")
    assert os.listdir(tmp_path) == []
    assert files.write("file", b"ours") == str(tmp_path / "file")


def test_concurrent_edits_are_not_lost(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("".join(f"<{worker}:>\n" for worker in range(4)))
    done: list[int] = []

    def work(worker: int) -> None:
        for _ in range(25):
            try:
                done.append(worker * replace_text(files, "file", f"<{worker}:", f"<{worker}:+"))
            except Failed:
                continue

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    text = (tmp_path / "file").read_text()
    assert [line.count("+") for line in text.splitlines()] == [done.count(worker) for worker in range(4)]
    assert os.listdir(tmp_path) == ["file"]


# -- what a file is


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0", "image/png"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0", "image/jpeg"),
        (b"GIF89a\x01\0\x01\0\x80\0\0", "image/gif"),
        (b"RIFF\x1a\0\0\0WEBPVP8L\r\0\0\0\x2f\0\0\0", "image/webp"),
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf", "image/heic"),
        (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B", "image/avif"),
        (b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0" + bytes(24), "image/bmp"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "application/pdf"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03", "application/gzip"),
        (b"PK\x03\x04\x14\0\0\0\0\0\0\0!\0" + bytes(16) + b"a.txt", "application/zip"),
        (b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41", "video/mp4"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0\x01\0\0\0" + bytes(40), "application/x-executable"),
        (b"\x81\xfe\x99\xf1\x80\x03", "application/octet-stream"),
        (b"", None),
    ],
)
def test_a_file_is_known_by_its_first_bytes(head: bytes, kind: str | None) -> None:
    assert kind is None or mime_type(head) == kind
    assert "/" in mime_type(head)
