"""The log of a node program: JSON lines in files that take turns, read from the newest back."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from farhand.node import log as node_log
from farhand.node.log import FILE, calls, last_lines, logging_to_file


def test_files_take_turns_and_are_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "MAX_BYTES", 20_000)
    with logging_to_file(tmp_path / "logs", "n", tmp_path):
        for number in range(300):
            calls.info("line %d", number)
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert FILE in files and f"{FILE}.1" in files and len(files) <= 5
    assert all(path.stat().st_size < 21_000 for path in (tmp_path / "logs").iterdir())
    lines, truncated = last_lines(tmp_path / "logs", 250)
    assert truncated and len(lines) == 250
    assert [json.loads(line)["message"] for line in lines][-2:] == ["line 299", "node program stopped"]
    assert json.loads(lines[0])["message"] == "line 51"
    everything, truncated = last_lines(tmp_path / "logs", 5000)
    assert not truncated and json.loads(everything[0])["event"] == "node.start" and len(everything) == 302
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()} == {0o600}


def test_a_log_whose_file_has_just_made_way_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_log, "MAX_BYTES", 1000)
    with logging_to_file(tmp_path / "logs", "n", tmp_path):
        while not (tmp_path / "logs" / f"{FILE}.1").exists():
            calls.info("a line")
        lines, truncated = last_lines(tmp_path / "logs", 2)
    assert [json.loads(line)["message"] for line in lines] == ["a line"] * 2 and truncated


def test_lines_longer_than_a_block(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("a" * 200_000 + "\n" + "b" * 70_000 + "\nlast\n")
    lines, truncated = last_lines(tmp_path, 2)
    assert ([line[:1] for line in lines], len(lines[0]), truncated) == (["b", "l"], 70_000, True)
    assert last_lines(tmp_path, 3)[1] is False


def test_no_log_means_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path, 10) == ([], False)


def test_secrets_and_breaks_do_not_get_in(tmp_path: Path) -> None:
    with logging_to_file(tmp_path / "logs", "n", tmp_path):
        logging.getLogger("farhand.sdk").warning("wss://x/?token=%s\nforged", "hunter2")
    text = (tmp_path / "logs" / FILE).read_text()
    assert "hunter2" not in text and len(text.splitlines()) == 3
    assert (tmp_path / "logs" / FILE).stat().st_mode & 0o777 == 0o600
