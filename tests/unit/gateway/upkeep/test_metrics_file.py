"""Samples over a restart: those of the last day come back, and a broken file costs only what is broken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farhand.gateway.nodes.metrics import MetricsHistory, Reading
from farhand.gateway.upkeep import metrics_file
from farhand.gateway.upkeep.metrics_file import DAY_MS, MetricsFile

READING = Reading(50, 1, 2, 3, 4, 0.5)


def kept(folder: Path, now: int, *moments: int) -> list[int]:
    """Run once with these new samples; the moments of all samples that were there in the end."""
    history = MetricsHistory()

    async def run() -> None:
        async with MetricsFile(folder, history, lambda: now):
            for at in moments:
                history.add("box", at, READING)

    asyncio.run(run())
    return [sample.at for sample in history.since("box", 0)]


def test_samples_of_a_day_survive(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    assert kept(folder, DAY_MS, 1, DAY_MS) == [1, DAY_MS]
    assert kept(folder, DAY_MS + 2) == [DAY_MS]
    assert kept(folder, DAY_MS + 2, DAY_MS + 2) == [DAY_MS, DAY_MS + 2]
    assert (folder.stat().st_mode & 0o777, (folder / "previous").stat().st_mode & 0o777) == (0o700, 0o600)


def test_an_old_file_is_replaced_by_the_next(tmp_path: Path) -> None:
    assert kept(tmp_path, 10, 10) == [10]
    later = DAY_MS + 20
    assert kept(tmp_path, later, later) == [later]  # the file is a day old now, and put aside
    assert sorted(file.name for file in tmp_path.iterdir()) == ["previous"]
    assert kept(tmp_path, later + 1, later + 1) == [later, later + 1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["current", "previous"]


def test_a_large_file_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "MOST_BYTES", 60)
    assert kept(tmp_path, 10, 8, 9, 10) == [8, 9, 10]
    assert [file.name for file in tmp_path.iterdir()] == ["previous"]


@pytest.mark.parametrize("damage", [b"\x00", b"\xff" * 500, b"half"])
def test_what_is_broken_is_cut_off(tmp_path: Path, damage: bytes) -> None:
    assert kept(tmp_path, 10, 10) == [10]
    with (tmp_path / "current").open("ab") as file:
        file.write(damage)
    assert kept(tmp_path, 11, 11) == [10, 11]
    assert kept(tmp_path, 12) == [10, 11]


def test_a_changed_sample_is_not_believed(tmp_path: Path) -> None:
    assert kept(tmp_path, 10, 10) == [10]
    content = bytearray((tmp_path / "current").read_bytes())
    content[-1] ^= 0xFF
    (tmp_path / "current").write_bytes(content)
    assert kept(tmp_path, 11, 11) == [11]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert kept(tmp_path / "file" / "metrics", 10, 10) == [10]
