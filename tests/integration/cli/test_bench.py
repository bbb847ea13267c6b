"""`farhand bench`: starts what it measures, reports, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from tests.integration.cli.conftest import Command


def test_it_measures_calls_commands_and_a_copy(tmp_path: Path) -> None:
    command = Command(tmp_path / "home")
    done = command("bench", "--seconds", "0.2", "--json")
    assert done.status == 0, done.err
    figures = {figure["what"]: figure for figure in done.json()["figures"]}
    calls = [figure for what, figure in figures.items() if "caller" in what]
    assert len(calls) == 4 and all(figure["rate"] > 0 < figure["p50_ms"] <= figure["p99_ms"] for figure in calls)
    assert figures["`true` by Bash, durable"]["p50_ms"] > 0
    assert figures["copy of 64 MiB into the workspace"]["rate"] > 0
    assert not (tmp_path / "home").exists(), "it has a home of its own"


def test_a_length_that_cannot_be_meant_is_named(tmp_path: Path) -> None:
    done = Command(tmp_path / "home")("bench", "--seconds", "0")
    assert done.status == 2 and "0.2" in done.err
