"""`Glob` and `Grep` through a real gateway and a real node: every field and every rule of the seed."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import NodeProcess


@pytest.fixture
def folder(hands: NodeProcess) -> Path:
    """A folder of the test's own in the node's workspace."""
    path = hands.workspace / f"t-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def fill(folder: Path, *names: str, text: str = "") -> None:
    """Make files, each newer than the one before."""
    for age, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (1_000_000_000 + age, 1_000_000_000 + age))


def glob(node: NodeProcess, folder: Path, pattern: str) -> list[str]:
    """What matches, newest first, relative to the folder."""
    result = node.ok("Glob", {"pattern": pattern, "path": str(folder)})
    assert result["count"] == len(result["matches"])
    assert all(match.startswith(f"{folder}/") for match in result["matches"])
    return [match.removeprefix(f"{folder}/") for match in result["matches"]]


def grep(node: NodeProcess, folder: Path, pattern: str, **args: Any) -> list[tuple[str, int, str]]:
    result = node.ok("Grep", {"pattern": pattern, "path": str(folder), **args})
    assert result["count"] == len(result["matches"]) and "truncated" not in result
    return [(match["path"].removeprefix(f"{folder}/"), match["line"], match["content"]) for match in result["matches"]]


# -- Glob ----------------------------------------------------------------------------------------------------------


def test_glob_has_every_field_of_the_seed(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "a.md", "b.txt")
    assert hands.ok("Glob", {"pattern": "*.md", "path": folder.name}) == {
        "pattern": "*.md",
        "basePath": str(folder),
        "matches": [f"{folder}/a.md"],
        "count": 1,
    }


def test_glob_begins_at_the_workspace_by_default(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "here.md")
    for args in ({}, {"path": None}):
        result = hands.ok("Glob", {"pattern": f"{folder.name}/*.md", **args})
        assert (result["basePath"], result["matches"]) == (str(hands.workspace), [f"{folder}/here.md"])


def test_glob_takes_an_absolute_base(hands: NodeProcess, tmp_path: Path) -> None:
    fill(tmp_path, "elsewhere.md")
    assert glob(hands, tmp_path, "*.md") == ["elsewhere.md"]


def test_glob_takes_an_absolute_pattern(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "x.md")
    assert hands.ok("Glob", {"pattern": f"{folder}/*.md"})["matches"] == [f"{folder}/x.md"]


def test_glob_gives_the_newest_first(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "oldest.md", "z/middle.md", "a/newer.md", "newest.md")
    assert glob(hands, folder, "**/*.md") == ["newest.md", "a/newer.md", "z/middle.md", "oldest.md"]
    os.utime(folder / "oldest.md")
    assert glob(hands, folder, "**/*.md")[0] == "oldest.md"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.md", {"top.md"}),
        ("**/*.md", {"top.md", "src/one.md", "src/deep/two.md"}),
        ("src/**/*.rs", {"src/main.rs", "src/deep/er/lib.rs"}),
        ("src/**", {"src/one.md", "src/main.rs", "src/deep/two.md", "src/deep/er/lib.rs", "src/deep/x.ts"}),
        ("**/*.{rs,ts}", {"src/main.rs", "src/deep/er/lib.rs", "src/deep/x.ts"}),
        ("{top,src/one}.md", {"top.md", "src/one.md"}),
        ("src/*/*.md", {"src/deep/two.md"}),
        ("src/????.rs", {"src/main.rs"}),
        ("src/[l-n]ain.rs", {"src/main.rs"}),
        ("src/[!m]*", {"src/one.md"}),
        ("**/.*", {".hidden"}),
        ("TOP.md", set()),
        ("nothing-*", set()),
    ],
)
def test_glob_patterns(hands: NodeProcess, folder: Path, pattern: str, expected: set[str]) -> None:
    fill(folder, "top.md", ".hidden", "src/one.md", "src/main.rs", "src/deep/two.md", "src/deep/er/lib.rs")
    fill(folder, "src/deep/x.ts")
    assert set(glob(hands, folder, pattern)) == expected


def test_glob_finds_what_git_ignores(hands: NodeProcess, folder: Path) -> None:
    fill(folder, ".git/config", "node_modules/x.js", "built.js")
    (folder / ".gitignore").write_text("*.js\n")
    assert set(glob(hands, folder, "**/*.js")) == {"built.js", "node_modules/x.js"}


def test_glob_lists_a_name_that_is_not_utf_8_without_breaking(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "good.txt")
    (Path(os.fsdecode(os.fsencode(folder) + b"/bad-\xff\xfe.txt"))).write_text("x")
    assert sorted(glob(hands, folder, "*.txt")) == ["bad-\ufffd\ufffd.txt", "good.txt"]


def test_glob_finds_names_with_unusual_characters(hands: NodeProcess, folder: Path) -> None:
    names = {"with blank.md", "new\nline.md", "grüße ☃.md", "[brackets].md", "-dash.md"}
    fill(folder, *names)
    assert set(glob(hands, folder, "*.md")) == names


def test_glob_does_not_run_in_circles(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "a/x.md")
    (folder / "a" / "up").symlink_to("..")
    assert glob(hands, folder, "**/*.md") == ["a/x.md"]


@pytest.mark.parametrize("pattern", ["", "[", "{a", "a}", "a**b", "x/[z-a]"])
def test_glob_refuses_an_invalid_pattern(hands: NodeProcess, pattern: str) -> None:
    message = hands.fails("Glob", {"pattern": pattern}, "invalid_args")
    assert "pattern" in message and "Invalid pattern" in message


def test_glob_in_a_missing_folder_is_not_found(hands: NodeProcess) -> None:
    assert "no-such-folder" in hands.fails("Glob", {"pattern": "*", "path": "no-such-folder"}, "not_found")


def test_glob_in_a_file_is_an_error(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "file")
    assert "not a folder" in hands.fails("Glob", {"pattern": "*", "path": f"{folder}/file"}, "not_found")


@pytest.mark.parametrize("parameter", ["pattern", "path"])
@pytest.mark.parametrize("tool", ["Glob", "Grep"])
def test_a_nul_is_refused(hands: NodeProcess, tool: str, parameter: str) -> None:
    message = hands.fails(tool, {"pattern": "x", parameter: "a\0b"}, "invalid_args")
    assert parameter in message and "NUL" in message


# -- Grep ----------------------------------------------------------------------------------------------------------


def test_grep_has_every_field_of_the_seed(hands: NodeProcess, folder: Path) -> None:
    (folder / "a.txt").write_text("nothing\na needle here\n")
    assert hands.ok("Grep", {"pattern": "need+le", "path": folder.name}) == {
        "pattern": "need+le",
        "basePath": str(folder),
        "matches": [{"path": f"{folder}/a.txt", "line": 2, "content": "a needle here"}],
        "count": 1,
    }


def test_grep_begins_at_the_workspace_by_default(hands: NodeProcess, folder: Path) -> None:
    word = f"word{uuid.uuid4().hex}"
    (folder / "a").write_text(word)
    for args in ({}, {"path": None, "include": None}):
        result = hands.ok("Grep", {"pattern": word, **args})
        assert result["basePath"] == str(hands.workspace)
        assert [match["path"] for match in result["matches"]] == [f"{folder}/a"]


def test_grep_without_matches_counts_0(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("text")
    assert grep(hands, folder, "absent") == []


def test_grep_in_one_file(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "a", "b", text="needle")
    result = hands.ok("Grep", {"pattern": "needle", "path": f"{folder}/b"})
    assert [match["path"] for match in result["matches"]] == [f"{folder}/b"]


def test_grep_goes_line_by_line(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_bytes(b"x one x\r\n\nx two\nthree\nx\n")
    assert grep(hands, folder, "^x") == [("a", 1, "x one x"), ("a", 3, "x two"), ("a", 5, "x")]
    assert grep(hands, folder, "x$") == [("a", 1, "x one x"), ("a", 5, "x")]


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"\bcat\b", [1]),
        (r"(?i)CAT", [1, 2]),
        (r"\p{Greek}+", [3]),
        (r"\d{3}", [4]),
        (r"(?P<word>d)o(?:g|t)", [5]),
        (r"^$", []),
        (r"-e", [6]),
    ],
)
def test_grep_uses_rust_regex_syntax(hands: NodeProcess, folder: Path, pattern: str, lines: list[int]) -> None:
    (folder / "a").write_text("a cat\nconcat\nδοκιμή\n1234\nthe dog\n-e --help\n")
    assert [line for _, line, _ in grep(hands, folder, pattern)] == lines


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "*a", r"(?=ahead)", r"(a)\1", r"\p{Nope}"])
def test_grep_refuses_an_invalid_regex(hands: NodeProcess, pattern: str) -> None:
    message = hands.fails("Grep", {"pattern": pattern}, "invalid_args")
    assert "pattern" in message and "Invalid regex pattern" in message


def test_grep_of_an_evil_regex_ends(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("a" * 50_000 + "\n")
    assert grep(hands, folder, "(a+)+$b") == []
    hands.fails("Grep", {"pattern": "(((a{1000}){1000}){1000})", "path": str(folder)}, "invalid_args")


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("*.md", {"top.md", "deep/er/low.md"}),
        ("*.{rs,ts}", {"x.rs", "deep/y.ts"}),
        ("top.*", {"top.md"}),
        ("?.rs", {"x.rs"}),
        ("deep*", set()),
        ("!x.rs", set()),
        ("", {"top.md", "deep/er/low.md", "x.rs", "deep/y.ts", ".hidden"}),
    ],
)
def test_grep_include_is_compared_with_the_file_name(
    hands: NodeProcess, folder: Path, include: str, expected: set[str]
) -> None:
    fill(folder, "top.md", "deep/er/low.md", "x.rs", "deep/y.ts", ".hidden", text="needle\n")
    assert {path for path, _, _ in grep(hands, folder, "needle", include=include)} == expected


@pytest.mark.parametrize("include", ["{a", "[", "deep/*.md", "a\0b"])
def test_grep_refuses_an_invalid_include(hands: NodeProcess, include: str) -> None:
    assert "include" in hands.fails("Grep", {"pattern": "x", "include": include}, "invalid_args")


def test_grep_finds_hidden_and_ignored_files(hands: NodeProcess, folder: Path) -> None:
    fill(folder, ".env", ".git/config", "node_modules/x.js", text="needle")
    (folder / ".gitignore").write_text("node_modules\n")
    assert {path for path, _, _ in grep(hands, folder, "needle")} == {".env", ".git/config", "node_modules/x.js"}


def test_grep_follows_links(hands: NodeProcess, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("needle")
    (folder / "to-folder").symlink_to(tmp_path / "outside")
    (folder / "to-file").symlink_to(tmp_path / "outside" / "file")
    (folder / "to-nothing").symlink_to(tmp_path / "missing")
    (folder / "to-itself").symlink_to(".")
    assert {path for path, _, _ in grep(hands, folder, "needle")} == {"to-folder/file", "to-file"}


@pytest.mark.parametrize("data", [b"\xff\xfe needle\n", b"needle \x80\n", b"needle\n" + b"\0\xff" * 1000])
def test_grep_skips_binary_files(hands: NodeProcess, folder: Path, data: bytes) -> None:
    (folder / "binary").write_bytes(data)
    (folder / "text").write_text("needle\n")
    assert grep(hands, folder, "needle") == [("text", 1, "needle")]


def test_grep_shows_200_characters_of_a_line(hands: NodeProcess, folder: Path) -> None:
    line = "needle " + "é☃🎉" * 100
    (folder / "a").write_text(f"{line}\n{'x' * 193} needle\nneedle {'y' * 193}\n")
    assert grep(hands, folder, "needle") == [
        ("a", 1, line[:200]),
        ("a", 2, "x" * 193 + " needle"),
        ("a", 3, "needle " + "y" * 193),
    ]


def test_grep_with_exactly_100_matches_counts_them(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("needle\n" * 60)
    (folder / "b").write_text("needle\n" * 40)
    assert len(grep(hands, folder, "needle")) == 100


@pytest.mark.parametrize("more", [1, 5000])
def test_grep_with_more_than_100_matches_is_truncated(hands: NodeProcess, folder: Path, more: int) -> None:
    (folder / "a").write_text("needle\n" * 60)
    (folder / "b").write_text("needle\n" * (40 + more))
    result = hands.ok("Grep", {"pattern": "needle", "path": str(folder)})
    assert result["truncated"] is True and "count" not in result and len(result["matches"]) == 100


def test_grep_with_100_in_one_file_and_more_in_binaries_is_not_truncated(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("needle\n" * 100)
    (folder / "b").write_bytes(b"needle\n\xff\n" * 50)
    assert len(grep(hands, folder, "needle")) == 100


def test_grep_in_files_with_unusual_names(hands: NodeProcess, folder: Path) -> None:
    fill(folder, "with blank", "new\nline", "co:lon:1", "grüße", text="needle\n")
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff")).write_text("needle\n")
    found = {path for path, _, _ in grep(hands, folder, "needle")}
    assert found == {"with blank", "new\nline", "co:lon:1", "grüße", "bad\ufffd"}


def test_grep_passes_a_pipe_by(hands: NodeProcess, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    fill(folder, "a", text="needle")
    assert grep(hands, folder, "needle") == [("a", 1, "needle")]


def test_grep_in_a_missing_folder_is_not_found(hands: NodeProcess) -> None:
    assert "no-such-folder" in hands.fails("Grep", {"pattern": "x", "path": "no-such-folder"}, "not_found")


def test_grep_of_the_empty_pattern_matches_every_line(hands: NodeProcess, folder: Path) -> None:
    (folder / "a").write_text("one\n\nthree\n")
    assert [line for _, line, _ in grep(hands, folder, "")] == [1, 2, 3]
