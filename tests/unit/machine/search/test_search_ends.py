"""The end of the text in a search is the end of each line, as in Rust's regular expressions line by line."""

from __future__ import annotations

from pathlib import Path

from tests.unit.machine.search.test_grep import hits


def test_the_end_of_the_text_fits_at_the_end_of_each_line(tmp_path: Path) -> None:
    """I13: `\\z` fitted nowhere but at the end of the file."""
    (tmp_path / "ends").write_bytes(b"first one\nsecond one\none more\n")
    assert hits(tmp_path, r"one\z") == [("ends", 1, "first one"), ("ends", 2, "second one")]


def test_a_comment_may_end_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "ends").write_bytes(b"first one\nsecond one\n")
    assert hits(tmp_path, r"(?x) first \s one # a comment") == [("ends", 1, "first one")]
