"""Patterns, finding by name, searching by content: on real trees with the real ripgrep."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from farhand.machine.files.confined_root import ConfinedRoot
from farhand.machine.files.files import Files
from farhand.machine.search.glob import glob_files
from farhand.machine.search.grep import Match, _records, grep_files
from farhand.machine.search.patterns import BadPattern, name_expression, parse
from farhand.protocol.errors import Failed, InvalidArgs, NotAllowed, NotFound, Timeout

# -- patterns of names


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ("*.md", ["a.md", ".md", ".hidden.md", "new\nline.md"], ["a.mdx", "A.MD", "md"]),
        ("?.c", ["x.c", "é.c"], [".c", "xy.c"]),
        ("[a-c]x", ["ax", "cx"], ["dx", "x"]),
        ("[!a-c]x", ["dx"], ["ax"]),
        ("[]x]", ["]", "x"], ["[]"]),
        ("[a^&|~]", ["^", "&", "|"], ["b"]),
        ("*.{rs,ts}", ["a.rs", "a.ts"], ["a.{rs,ts}", "a.rst"]),
        ("{a,b{1,2}}.{x,}", ["a.x", "b1.", "b2.x"], ["b.x"]),
        (r"\*\{\[", ["*{["], ["a{["]),
        ("a.b+(c)$", ["a.b+(c)$"], ["aXb"]),
        ("[{]", ["{"], ["}"]),
    ],
)
def test_names(pattern: str, fits: list[str], fails: list[str]) -> None:
    expression = name_expression(pattern)
    assert [name for name in fits if not expression.fullmatch(name)] == []
    assert [name for name in fails if expression.fullmatch(name)] == []


@pytest.mark.parametrize(
    "pattern", ["", "/", ".", "[", "[!", "[]", "{a", "a}", "{a,{b}", "a**", "**b/c", "\\", "[z-a]", "{a,b}" * 11]
)
def test_patterns_that_mean_nothing(pattern: str) -> None:
    with pytest.raises(BadPattern):
        parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a" * 4097, "4097 characters"),
        ("/".join("a" * 65), "65 parts"),
        ("{a,b}" * 9 + "c" * 400, "32768 characters in all"),
    ],
)
def test_patterns_that_are_too_large(pattern: str, why: str) -> None:
    with pytest.raises(BadPattern, match=why):
        parse(pattern)


@pytest.mark.parametrize(
    "pattern", ["*?" * 9 + "*!", "*a" * 2000, "*[a-z]" * 500, "{*a*a,*?*b}" * 9, "*a*" + "?" * 250]
)
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    """Without a limit on time: an expression that backtracks over every star would not end in years."""
    expression = name_expression(pattern)
    assert not expression.fullmatch("a" * 100 + ".")


def backtracking(pattern: str, name: str) -> bool:
    """The meaning of a pattern of `*`, `?`, `[ab]` and plain characters, by trying everything."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(backtracking(pattern[1:], name[at:]) for at in range(len(name) + 1))
    if pattern.startswith("[ab]"):
        return name[:1] in ("a", "b") and backtracking(pattern[4:], name[1:])
    return bool(name) and pattern[0] in ("?", name[0]) and backtracking(pattern[1:], name[1:])


@given(
    st.lists(st.sampled_from(["*", "?", "a", "b", "[ab]"]), min_size=1, max_size=8),
    st.text("ab\n", max_size=8),
)
def test_patterns_mean_what_trying_everything_finds(pieces: list[str], name: str) -> None:
    pattern = "".join(pieces)
    assume("**" not in pattern)
    assert bool(name_expression(pattern).fullmatch(name)) is backtracking(pattern, name)


# -- finding by name


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files named in the order of their age, the newest last."""
    names = ["old.md", "src/main.rs", "src/deep/er/lib.rs", "src/app.ts", ".hidden/x.md", ".git/y.md", "new.md"]
    (tmp_path / ".gitignore").write_text("*.md\n")
    os.utime(tmp_path / ".gitignore", (1, 1))
    for age, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n")
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    return tmp_path


def found(tree: Path, pattern: str, base: str = ".", files: Files | None = None) -> list[str]:
    return [os.path.relpath(path, tree) for path in glob_files(files or Files(tree), pattern, base)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.md", ["new.md", "old.md"]),
        ("**/*.md", ["new.md", ".git/y.md", ".hidden/x.md", "old.md"]),
        ("src/**/*.rs", ["src/deep/er/lib.rs", "src/main.rs"]),
        ("src/*.{rs,ts}", ["src/app.ts", "src/main.rs"]),
        ("{src,.hidden}/*", [".hidden/x.md", "src/app.ts", "src/main.rs"]),
        ("src/**/**/**/*.rs", ["src/deep/er/lib.rs", "src/main.rs"]),
        ("src/**", ["src/app.ts", "src/deep/er/lib.rs", "src/main.rs"]),
        ("**/deep/**/lib.rs", ["src/deep/er/lib.rs"]),
        ("**/src/main.rs", ["src/main.rs"]),
        ("*/*/*/*", ["src/deep/er/lib.rs"]),
        ("src/deep/../main.rs", ["src/main.rs"]),
        ("./old.md", ["old.md"]),
        ("old.md", ["old.md"]),
        ("*", ["new.md", "old.md", ".gitignore"]),
        ("OLD.md", []),
        ("missing/*.md", []),
    ],
)
def test_files_are_found_newest_first(tree: Path, pattern: str, names: list[str]) -> None:
    assert found(tree, pattern) == names


def test_a_trailing_slash_finds_folders(tree: Path) -> None:
    assert sorted(found(tree, "*/")) == [".git", ".hidden", "src"]
    assert sorted(found(tree, "src/**/")) == ["src/deep", "src/deep/er"]


def test_the_search_starts_in_the_given_folder(tree: Path) -> None:
    assert found(tree, "*.rs", "src") == ["src/main.rs"]
    assert found(tree, "../*.md", "src") == ["new.md", "old.md"]
    assert found(tree, f"{tree}/src/*.rs", "src/deep") == ["src/main.rs"]
    with pytest.raises(NotFound, match=f"'{tree}/missing'"):
        found(tree, "*", "missing")
    with pytest.raises(NotFound, match="not a folder"):
        found(tree, "*", "old.md")
    with pytest.raises(BadPattern, match=r"'\.\.'"):
        found(tree, "*/../old.md")


def test_any_depth_passes_links_by_and_a_named_link_is_followed(tree: Path) -> None:
    (tree / "src" / "loop").symlink_to("..")
    (tree / "also.md").symlink_to("src/main.rs")
    (tree / "dead.md").symlink_to("nowhere")
    assert found(tree, "**/*.rs") == ["src/deep/er/lib.rs", "src/main.rs"]
    assert found(tree, "src/loop/*.md") == ["src/loop/new.md", "src/loop/also.md", "src/loop/old.md"]
    assert found(tree, "src/l*/old.md") == ["src/loop/old.md"]
    assert found(tree, "*.md") == ["new.md", "also.md", "old.md"]


def test_only_regular_files_are_found(tree: Path) -> None:
    os.mkfifo(tree / "pipe.md")
    assert "pipe.md" not in found(tree, "*")


def test_a_root_and_hidden_folders_bound_what_is_found(tree: Path) -> None:
    (tree / "src" / "out.rs").symlink_to(tree / "old.md")
    (tree / "src" / "up").symlink_to(tree)
    files = Files(tree / "src", roots=[ConfinedRoot(tree / "src")], hidden=[tree / "src" / "deep"])
    assert found(tree, "**/*.rs", files=files) == ["src/main.rs"]
    assert found(tree, "up/*", files=Files(tree / "src")) != []
    assert found(tree, "u*/*", files=files) == []
    assert found(tree, "**/", files=files) == []
    for pattern in ("../*", f"{tree}/*", "up/*"):
        with pytest.raises(NotAllowed):
            found(tree, pattern, files=files)
    hidden_file = Files(tree, hidden=[tree / "old.md"])
    assert found(tree, "*.md", files=hidden_file) == ["new.md"]


NAMES = [
    "a.md",
    ".md",
    "md",
    "A.MD",
    "a.mdx",
    "a.md.bak",
    "ab.md",
    "new\nline.md",
    "a+b.c",
    "aXb.c",
    "a.html",
    "[x].md",
]


@pytest.mark.parametrize(
    "pattern",
    ["*", "*.md", "*.{md,html}", "a*.md", "*+b.c", "*b.c", "*.m?", "*.[m]d", "*]*.md", "{*.c,a.md}", "*.{md,m?x}"],
)
def test_finding_agrees_with_the_pattern_name_by_name(tmp_path: Path, pattern: str) -> None:
    """However the walk decides, by an expression or by how a name ends."""
    for name in NAMES:
        (tmp_path / "inner").mkdir(exist_ok=True)
        (tmp_path / "inner" / name).touch()
    expression = name_expression(pattern)
    expected = sorted(f"inner/{name}" for name in NAMES if expression.fullmatch(name))
    assert sorted(found(tmp_path, f"**/{pattern}")) == expected


def test_hidden_files_are_skipped_everywhere(tmp_path: Path) -> None:
    for path in ("token", "notes.md", "keys/one.md", "keys/deep/two.md", "open/token", "open/three.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "open" / "way").symlink_to(tmp_path / "keys")
    files = Files(tmp_path, hidden=[tmp_path / "token", tmp_path / "keys"])
    assert sorted(found(tmp_path, "**/*", files=files)) == ["notes.md", "open/three.md", "open/token"]
    assert found(tmp_path, "*/*.md", files=files) == ["open/three.md"]
    assert found(tmp_path, "open/way/*", files=Files(tmp_path)) == ["open/way/one.md"]
    assert found(tmp_path, "open/w*/*", files=files) == []
    assert found(tmp_path, "**/", files=files) == ["open"]


def test_deep_trees_are_searched_to_the_bottom(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(450):
        os.mkdir("d", dir_fd=folder)
        following = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = following
    os.close(os.open("deepest", os.O_CREAT, dir_fd=folder))
    os.close(folder)
    assert found(tmp_path, "**/deepest") == ["d/" * 450 + "deepest"]


def test_a_search_is_bounded_in_time(tree: Path) -> None:
    with pytest.raises(Timeout, match="smaller folder"):
        glob_files(Files(tree), "**/*", ".", seconds=-1)
    with pytest.raises(Timeout, match="smaller folder"):
        grep_files(Files(tree), "text", ".", seconds=-1)


def test_names_that_are_not_utf8_come_out_as_text(tree: Path) -> None:
    with open(os.fsencode(tree) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"needle\n")
    assert glob_files(Files(tree), "*.txt", ".") == [f"{tree}/caf\ufffd.txt"]
    matches, _ = grep_files(Files(tree), "needle", ".")
    assert matches == [Match(f"{tree}/caf\ufffd.txt", 1, "needle")]


# -- searching by content


def hits(tree: Path, pattern: str, path: str = ".", **options: object) -> list[tuple[str, int, str]]:
    matches, _ = grep_files(Files(tree), pattern, path, **options)  # type: ignore[arg-type]
    return [(os.path.relpath(match.path, tree), match.line, match.content) for match in matches]


def test_every_file_is_searched_hidden_and_ignored_ones_too(tree: Path) -> None:
    assert [name for name, _, _ in hits(tree, r"^text of .*\.md$")] == [
        ".git/y.md",
        ".hidden/x.md",
        "new.md",
        "old.md",
    ]


def test_lines_are_counted_from_one_and_windows_lines_end_where_they_should(tree: Path) -> None:
    (tree / "win.txt").write_bytes(b"one\r\nneedle\r\nneedle too\r\n")
    assert hits(tree, "needle$") == [("win.txt", 2, "needle")]


def test_an_include_is_compared_with_the_file_name(tree: Path) -> None:
    (tree / "x.rs").mkdir()
    (tree / "x.rs" / "inner.txt").write_text("text of inner")
    (tree / "!odd.rs").write_text("text of odd")
    names = [name for name, _, _ in hits(tree, "text of", include="*.{rs,ts}")]
    assert names == ["!odd.rs", "src/app.ts", "src/deep/er/lib.rs", "src/main.rs"]
    assert [name for name, _, _ in hits(tree, "text of", include="!*.rs")] == ["!odd.rs"]
    assert hits(tree, "text of", "src/main.rs", include="*.ts") == []
    assert len(hits(tree, "text of", "src/main.rs", include="main.*")) == 1
    for bad in ("src/*.rs", "[", "{a", "a\0"):
        with pytest.raises(InvalidArgs, match="'include'"):
            hits(tree, "x", include=bad)


@pytest.mark.parametrize("blank", [" ", "\t", "\n", "\x0b", "\u00a0", "\u2003", "\\ ", "\\\t", "[ ]"])
def test_blanks_at_the_end_of_an_include_are_part_of_it(tree: Path, blank: str) -> None:
    """ripgrep drops them, and the policy does not: `*.rs ` would find what a rule about `*.rs` protects."""
    assert hits(tree, "text of", include=f"*.rs{blank}") == []
    (tree / f"odd.rs{blank.strip('[]').removeprefix(chr(92))}").write_text("text of odd")
    assert len(hits(tree, "text of", include=f"*.rs{blank}")) == 1
    assert hits(tree, "text of", include="   ") == []


def test_links_are_followed(tree: Path) -> None:
    (tree / "src" / "loop").symlink_to("..")
    (tree / "elsewhere").symlink_to("src/deep")
    names = [name for name, _, _ in hits(tree, "text of src/deep")]
    assert names == ["elsewhere/er/lib.rs", "src/deep/er/lib.rs"]
    assert [name for name, _, _ in hits(tree, "text of", "elsewhere")] == ["elsewhere/er/lib.rs"]


@pytest.mark.parametrize(
    "content", [b"needle\n\xff\xfe\n", b"\xe9\nneedle\n", b"needle\n\0\0\xff", "needle\n".encode("utf-16")]
)
def test_files_that_are_not_utf8_are_passed_over(tree: Path, content: bytes) -> None:
    (tree / "binary").write_bytes(content)
    (tree / "text").write_text("needle é\n")
    assert hits(tree, "needle") == [("text", 1, "needle é")]


def test_a_binary_file_found_out_late_does_not_disturb_the_rest(tree: Path) -> None:
    for name in ("a.bin", "b.bin", "c\nd.bin"):
        (tree / name).write_bytes(b"needle\n" + b"text line\n" * 100_000 + b"\0\0\xff\n")
    (tree / "text").write_text("needle\n" * 3)
    assert hits(tree, "needle") == [("text", 1, "needle"), ("text", 2, "needle"), ("text", 3, "needle")]
    assert hits(tree, "needle", "a.bin") == []


def test_long_lines_are_cut_by_characters(tree: Path) -> None:
    (tree / "long").write_text("é" * 500 + "needle\nshort needle\n")
    assert hits(tree, "needle") == [("long", 1, "é" * 200), ("long", 2, "short needle")]


@pytest.mark.parametrize(("lines", "more"), [(99, False), (100, False), (101, True), (5000, True)])
def test_there_is_more_only_when_there_is(tree: Path, lines: int, more: bool) -> None:
    (tree / "many").write_text("needle\n" * lines)
    matches, truncated = grep_files(Files(tree), "needle", ".")
    assert (len(matches), truncated) == (min(lines, 100), more)
    (tree / "many").rename(tree / "first")
    (tree / "second").write_text("needle\n")
    matches, truncated = grep_files(Files(tree), "needle", ".")
    assert (len(matches), truncated) == (min(lines + 1, 100), lines >= 100)


def test_names_with_line_feeds_and_colons(tree: Path) -> None:
    (tree / "a\nb:1:2").write_text("x\nneedle\n")
    assert hits(tree, "needle") == [("a\nb:1:2", 2, "needle")]


def test_records_are_put_together_from_any_pieces() -> None:
    whole = b"/a\nb\x001:0:x\n/c\x002:5:[Omitted long matching line]\n"
    for cut in range(len(whole)):
        *first, rest = _records(whole[:cut])
        *second, rest = _records(rest + whole[cut:])
        assert [*first, *second] == [b"/a\nb\x001:0:x", b"/c\x002:5:[Omitted long matching line]"]
        assert rest == b""


def test_one_file_can_be_searched(tree: Path) -> None:
    assert hits(tree, "text", "src/main.rs") == [("src/main.rs", 1, "text of src/main.rs")]


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "a{2", "(?=x)", r"\1", "a\nb", "a" * 200_000, "(?:x{1000}){1000}{1000}"]
)
def test_an_invalid_expression(tree: Path, pattern: str) -> None:
    with pytest.raises(BadPattern) as refused:
        hits(tree, pattern)
    assert str(refused.value)
    assert "--" not in str(refused.value)


def test_rust_syntax_is_understood_and_dashes_are_not_options(tree: Path) -> None:
    (tree / "rust").write_text("Straße 42\n--files\n")
    assert hits(tree, r"\p{L}+\s\p{Nd}{2}$") == [("rust", 1, "Straße 42")]
    assert hits(tree, r"(?i)STRASSE|straße") == [("rust", 1, "Straße 42")]
    assert hits(tree, "--files") == [("rust", 2, "--files")]


def test_an_expression_that_stalls_others_does_not_stall(tree: Path) -> None:
    (tree / "bomb").write_text("a" * 5000 + "!\n")
    assert hits(tree, "^(a+)+$") == []


def test_a_missing_place_and_a_pipe(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(NotFound, match=f"'{tree}/missing'"):
        hits(tree, "x", "missing")
    with pytest.raises(Failed, match="named pipe"):
        hits(tree, "x", "pipe")
    assert hits(tree, "nothing like this") == []


def test_a_root_and_hidden_folders_bound_what_is_shown(tree: Path) -> None:
    (tree / "src" / "out").symlink_to(tree)
    (tree / "src" / "out.rs").symlink_to(tree / "old.md")
    files = Files(tree / "src", roots=[ConfinedRoot(tree / "src")], hidden=[tree / "src" / "deep"])
    matches, more = grep_files(files, "text of", ".")
    assert not more
    assert [os.path.relpath(match.path, tree) for match in matches] == [
        "src/app.ts",
        "src/main.rs",
        "src/out/src/app.ts",
        "src/out/src/main.rs",
    ]
    for outside in ("..", str(tree), "out", "deep"):
        with pytest.raises(NotAllowed):
            grep_files(files, "text of", outside)


def test_the_users_own_ripgrep_settings_do_not_matter(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "config").write_text("--invert-match\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(tree / "config"))
    assert hits(tree, re.escape("text of old.md")) == [("old.md", 1, "text of old.md")]


def test_comments_and_ends_of_text_as_in_rust(tree: Path) -> None:
    (tree / "ends").write_bytes(b"first one\r\nsecond one\none more\n\\\\z\n")
    assert hits(tree, r"(?x) fir st \s one # a comment") == [("ends", 1, "first one")]
    assert hits(tree, "(?x) second # a comment\n \\s one # another") == [("ends", 2, "second one")]
    assert hits(tree, r"(?ix: SECOND # a comment" + "\n)") == [("ends", 2, "second one")]
    assert hits(tree, r"one\z") == [("ends", 1, "first one"), ("ends", 2, "second one")]
    assert hits(tree, r"\Aone\b") == [("ends", 3, "one more")]
    assert hits(tree, r"\\z") == [("ends", 4, r"\\z")]
    with pytest.raises(BadPattern):
        hits(tree, "(?x) ( # a comment")
    with pytest.raises(BadPattern):
        hits(tree, "( # x")
