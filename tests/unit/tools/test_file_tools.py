"""Read, Write, Edit, Glob and Grep: each promise of the node tools reference, one test."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.node.limits import ToolLimits
from farhand.node.tools import node_tools
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound
from farhand.sdk.context import CancelToken, ToolContext
from farhand.tools.node_files import NodeFileTools


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


PNG = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", b"\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0")
    + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0"))
    + chunk(b"IEND", b"")
)
BLACK_BITMAP = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0" + bytes(28)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def tools(workspace: Path) -> NodeFileTools:
    return NodeFileTools(Files(workspace))


def arguments(method: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(method).parameters.items()}


def test_parameters_and_defaults_are_the_references(tools: NodeFileTools) -> None:
    needed = inspect.Parameter.empty
    assert arguments(tools.Read) == {"path": needed, "offset": 0, "limit": None}
    assert arguments(tools.Write) == {"path": needed, "content": needed}
    edit = {"path": needed, "oldString": needed, "newString": needed, "replaceAll": False}
    assert arguments(tools.Edit) == edit
    assert arguments(tools.Glob) == {"pattern": needed, "path": None}
    assert arguments(tools.Grep) == {"pattern": needed, "path": None, "include": None}


# -- paths


def test_relative_paths_resolve_against_the_workspace_and_absolute_ones_are_used_as_they_are(
    tools: NodeFileTools, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("other")
    (workspace / "mine").write_text("mine")
    assert tools.Read(path="mine")["path"] == str(workspace / "mine")
    assert tools.Read(path=str(tmp_path / "other"))["path"] == str(tmp_path / "other")
    assert tools.Write(path="new", content="")["path"] == str(workspace / "new")
    assert tools.Edit(path="mine", oldString="m", newString="M")["path"] == str(workspace / "mine")
    assert tools.Glob(pattern="*")["basePath"] == str(workspace)
    assert tools.Glob(pattern="*", path=str(tmp_path))["basePath"] == str(tmp_path)
    assert tools.Grep(pattern="x", path="..")["basePath"] == str(tmp_path)


# -- Read


def test_text_comes_with_line_numbers(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "poem.txt").write_text("first\nsecond é\n\nlast")
    assert tools.Read(path="poem.txt") == {
        "path": str(workspace / "poem.txt"),
        "content": "1\tfirst\n2\tsecond é\n3\t\n4\tlast",
        "lines": 4,
    }


def test_offset_and_limit_choose_a_page_numbered_from_offset_plus_one(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "log").write_text("".join(f"line {number}\n" for number in range(100)))
    page = tools.Read(path="log", offset=10, limit=2)
    assert (page["content"], page["lines"]) == ("11\tline 10\n12\tline 11", 2)
    assert tools.Read(path="log", offset=98)["lines"] == 2
    assert tools.Read(path="log", limit=3)["content"] == "1\tline 0\n2\tline 1\n3\tline 2"


def test_a_page_past_the_end_and_an_empty_file_are_empty(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "empty").write_text("")
    (workspace / "short").write_text("x\n")
    for page in (tools.Read(path="empty"), tools.Read(path="short", offset=5), tools.Read(path="short", limit=0)):
        assert (page["content"], page["lines"]) == ("", 0)


@pytest.mark.parametrize(("offset", "limit"), [(0, None), (3, 1), (0, 0)])
def test_an_image_comes_whole_as_content_blocks(
    tools: NodeFileTools, workspace: Path, offset: int, limit: int | None
) -> None:
    (workspace / "photo.png").write_bytes(PNG)
    answer = tools.Read(path="photo.png", offset=offset, limit=limit)
    assert answer == {
        "content": [
            {"type": "text", "text": f"Image file: photo.png (image/png, {len(PNG)} bytes)"},
            {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"},
        ]
    }


def test_an_image_is_known_by_its_bytes_not_by_its_name(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "notes.txt").write_bytes(PNG)
    (workspace / "fake.png").write_text("just text")
    assert tools.Read(path="notes.txt")["content"][1]["mimeType"] == "image/png"
    assert tools.Read(path="fake.png")["content"] == "1\tjust text"


def test_an_image_that_happens_to_be_utf8_is_still_an_image(tools: NodeFileTools, workspace: Path) -> None:
    BLACK_BITMAP.decode()
    (workspace / "black.bmp").write_bytes(BLACK_BITMAP)
    assert tools.Read(path="black.bmp")["content"][1]["mimeType"] == "image/bmp"


def test_a_drawing_in_text_is_text(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    assert tools.Read(path="a.svg")["lines"] == 1


def test_an_image_of_ten_megabytes_is_the_largest(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "big.png").write_bytes(PNG)
    os.truncate(workspace / "big.png", 10 * 1024 * 1024)
    assert len(tools.Read(path="big.png")["content"][1]["data"]) > 10 * 1024 * 1024
    # Sparse, so that reading it before the check would be noticed: no memory holds it.
    os.truncate(workspace / "big.png", 1 << 40)
    with pytest.raises(Failed, match=rf"too large: big\.png \(image/png, {1 << 40} bytes, max 10485760 bytes\)"):
        tools.Read(path="big.png")
    os.truncate(workspace / "big.png", 10 * 1024 * 1024 + 1)
    with pytest.raises(Failed, match="too large"):
        tools.Read(path="big.png")


def test_other_binary_files_are_described(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "archive.tar.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + bytes(1000))
    with pytest.raises(Failed) as refused:
        tools.Read(path="archive.tar.gz")
    text = "Binary file: archive.tar.gz (application/gzip, 1010 bytes) — not a text or image file"
    assert refused.value.message == text
    (workspace / "noise").write_bytes(b"\x81\xfe\x99\xf1\x80\x03")
    with pytest.raises(Failed, match=r"Binary file: noise \(application/octet-stream, 6 bytes\) — not a text"):
        tools.Read(path="noise")


def test_reading_what_is_not_there_or_not_a_file(tools: NodeFileTools, workspace: Path) -> None:
    with pytest.raises(NotFound, match=f"Failed to read '{workspace}/missing': No such file or directory"):
        tools.Read(path="missing")
    with pytest.raises(Failed, match=f"Failed to read '{workspace}': Is a directory"):
        tools.Read(path=".")


@pytest.mark.parametrize(("name", "number"), [("offset", -1), ("limit", -5)])
def test_negative_numbers_are_named(tools: NodeFileTools, workspace: Path, name: str, number: int) -> None:
    (workspace / "file").write_text("x")
    tool = node_tools([tools], ToolLimits()).find("Read")
    assert tool is not None
    args = Raw(json.dumps({"path": "file", name: number}).encode())
    with pytest.raises(InvalidArgs, match=f"parameter '{name}': expected .* >= 0"):
        asyncio.run(tool.run(ToolContext("call", "Read", None, CancelToken()), args))


def test_a_log_of_two_gigabytes_is_read_in_pages(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    os.truncate(workspace / "log", 2 * 1024**3)
    assert tools.Read(path="log", offset=99_990, limit=2)["content"] == "99991\tline 99990\n99992\tline 99991"
    with pytest.raises(Failed, match="offset and limit"):
        tools.Read(path="log")


# -- Write


def test_write_tells_path_and_bytes_and_makes_parents(tools: NodeFileTools, workspace: Path) -> None:
    answer = tools.Write(path="a/b/note.txt", content="grüße\r\n")
    assert answer == {"path": str(workspace / "a" / "b" / "note.txt"), "bytes": 9}
    assert (workspace / "a" / "b" / "note.txt").read_bytes() == "grüße\r\n".encode()


def test_write_overwrites(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "file").write_text("something longer")
    assert tools.Write(path="file", content="")["bytes"] == 0
    assert (workspace / "file").read_text() == ""


def test_write_says_what_failed(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "file").write_text("x")
    with pytest.raises(Failed, match=f"Failed to create the folders of '{workspace}/file/below'"):
        tools.Write(path="file/below", content="")
    with pytest.raises(Failed, match="Is a directory"):
        tools.Write(path=".", content="")
    with pytest.raises(InvalidArgs, match="'content'"):
        tools.Write(path="new", content="\ud800")
    assert os.listdir(workspace) == ["file"]


# -- Edit


def test_edit_replaces_the_only_match(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "code").write_text("one\ntwo\nthree\n")
    answer = tools.Edit(path="code", oldString="two\n", newString="")
    assert answer == {"path": str(workspace / "code"), "replacements": 1}
    assert (workspace / "code").read_text() == "one\nthree\n"


def test_edit_replaces_all_on_request(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "code").write_text("x x x")
    assert tools.Edit(path="code", oldString="x", newString="yy", replaceAll=True)["replacements"] == 3
    assert (workspace / "code").read_text() == "yy yy yy"


def test_edit_without_a_match(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "code").write_bytes(b"one\r\ntwo\r\n")
    with pytest.raises(Failed) as refused:
        tools.Edit(path="code", oldString="three", newString="x")
    assert refused.value.message == f"oldString not found in '{workspace}/code'"
    with pytest.raises(Failed, match=r"not found in .*: its lines end with \\r\\n"):
        tools.Edit(path="code", oldString="one\ntwo", newString="x")


def test_edit_with_several_matches_tells_how_many(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "code").write_text("x x x")
    with pytest.raises(Failed) as refused:
        tools.Edit(path="code", oldString="x", newString="y")
    assert refused.value.message == (
        f"oldString found 3 times in '{workspace}/code'. "
        "Use replaceAll: true or provide more context to make it unique."
    )
    assert (workspace / "code").read_text() == "x x x"


def test_edit_refuses_what_cannot_be_edited(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "photo.png").write_bytes(PNG)
    with pytest.raises(NotFound, match="Failed to read"):
        tools.Edit(path="missing", oldString="a", newString="b")
    with pytest.raises(Failed, match="not UTF-8 text"):
        tools.Edit(path="photo.png", oldString="PNG", newString="b")
    with pytest.raises(InvalidArgs, match="'oldString': must not be empty"):
        tools.Edit(path="photo.png", oldString="", newString="b")
    with pytest.raises(InvalidArgs, match="'newString'"):
        tools.Edit(path="photo.png", oldString="PNG", newString="\udfff")


# -- Glob


def test_glob_answers_with_its_question_newest_first(tools: NodeFileTools, workspace: Path) -> None:
    for age, name in enumerate(["b.md", "a.md", "sub/c.md", "d.txt"]):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text("")
        os.utime(workspace / name, (age, age))
    assert tools.Glob(pattern="**/*.md") == {
        "pattern": "**/*.md",
        "basePath": str(workspace),
        "matches": [str(workspace / "sub" / "c.md"), str(workspace / "a.md"), str(workspace / "b.md")],
        "count": 3,
    }
    assert tools.Glob(pattern="*.{md,txt}", path="sub")["matches"] == [str(workspace / "sub" / "c.md")]
    assert tools.Glob(pattern="*.rs") == {
        "pattern": "*.rs",
        "basePath": str(workspace),
        "matches": [],
        "count": 0,
    }


def test_an_absolute_glob_says_where_it_began(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "a.md").write_text("")
    answer = tools.Glob(pattern=f"{workspace}/*.md", path="ignored")
    assert (answer["basePath"], answer["matches"]) == ("/", [str(workspace / "a.md")])


@pytest.mark.parametrize("pattern", ["[", "{a", "a**b", "", "a\0b"])
def test_an_invalid_glob_is_named(tools: NodeFileTools, pattern: str) -> None:
    with pytest.raises(InvalidArgs, match="'pattern'"):
        tools.Glob(pattern=pattern)


def test_a_glob_in_a_folder_that_is_missing(tools: NodeFileTools, workspace: Path) -> None:
    with pytest.raises(NotFound, match=f"'{workspace}/missing'"):
        tools.Glob(pattern="*", path="missing")


# -- Grep


def test_grep_answers_with_path_line_and_content(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "a.md").write_text("nothing\n  a needle \n")
    (workspace / "b.rs").write_text("needles\n")
    assert tools.Grep(pattern=r"\bneedle\b") == {
        "pattern": r"\bneedle\b",
        "basePath": str(workspace),
        "matches": [{"path": str(workspace / "a.md"), "line": 2, "content": "  a needle "}],
        "count": 1,
    }
    assert tools.Grep(pattern="needle", include="*.{rs,ts}")["matches"][0]["path"] == str(workspace / "b.rs")
    assert tools.Grep(pattern="haystack") == {
        "pattern": "haystack",
        "basePath": str(workspace),
        "matches": [],
        "count": 0,
    }


def test_grep_is_truncated_only_beyond_a_hundred(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "many").write_text("needle\n" * 100)
    answer = tools.Grep(pattern="needle")
    assert (len(answer["matches"]), answer["count"], "truncated" in answer) == (100, 100, False)
    (workspace / "one").write_text("needle\n")
    answer = tools.Grep(pattern="needle")
    assert (len(answer["matches"]), answer["truncated"], "count" in answer) == (100, True, False)


def test_grep_cuts_lines_at_two_hundred_characters(tools: NodeFileTools, workspace: Path) -> None:
    (workspace / "long").write_text("é" * 300 + "\n")
    assert tools.Grep(pattern="é+")["matches"][0]["content"] == "é" * 200


def test_grep_skips_binaries_and_follows_links(tools: NodeFileTools, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "note").write_text("needle")
    (workspace / "link").symlink_to(tmp_path / "elsewhere")
    (workspace / "binary").write_bytes(b"needle\n\xff")
    assert [match["path"] for match in tools.Grep(pattern="needle")["matches"]] == [str(workspace / "link" / "note")]


def test_grep_names_what_is_wrong(tools: NodeFileTools, workspace: Path) -> None:
    with pytest.raises(InvalidArgs, match=r"(?s)'pattern': Invalid regex pattern: .*unclosed group"):
        tools.Grep(pattern="(")
    with pytest.raises(InvalidArgs, match=r"'pattern'.*NUL"):
        tools.Grep(pattern="\0")
    with pytest.raises(InvalidArgs, match="'include'"):
        tools.Grep(pattern="x", include="[")
    with pytest.raises(NotFound, match=f"'{workspace}/missing'"):
        tools.Grep(pattern="x", path="missing")


# -- the owner's limits


def test_a_root_holds_for_every_tool(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("needle")
    (workspace / "link").symlink_to(tmp_path)
    tools = NodeFileTools(Files(workspace, roots=[ConfinedRoot(workspace)]))
    for path in ("../secret", "link/secret", str(tmp_path / "secret")):
        for call in (
            lambda path=path: tools.Read(path=path),
            lambda path=path: tools.Write(path=path, content="x"),
            lambda path=path: tools.Edit(path=path, oldString="needle", newString="x"),
            lambda path=path: tools.Glob(pattern="*", path=path),
            lambda path=path: tools.Grep(pattern="needle", path=path),
        ):
            with pytest.raises(NotAllowed):
                call()
    assert tools.Grep(pattern="needle")["matches"] == []
    assert tools.Glob(pattern="**/*")["matches"] == []
    assert (tmp_path / "secret").read_text() == "needle"


def test_read_only_tools_read_and_refuse_to_write(workspace: Path) -> None:
    (workspace / "file").write_text("old")
    tools = NodeFileTools(Files(workspace, read_only=True))
    assert tools.Read(path="file")["content"] == "1\told"
    with pytest.raises(NotAllowed, match="read-only"):
        tools.Write(path="file", content="new")
    with pytest.raises(NotAllowed, match="read-only"):
        tools.Edit(path="file", oldString="old", newString="new")
    assert (workspace / "file").read_text() == "old"
