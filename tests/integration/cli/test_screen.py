"""Output for people: times and texts."""

from __future__ import annotations

import pytest

from farhand.cli.output import Column, _fit, ago, duration, plain

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-30, "just now"), (0, "just now"), (42, "42 s ago"), (60, "1 min ago"), (3599, "59 min ago"),
        (3600, "1 h ago"), (47 * 3600, "47 h ago"), (49 * 3600, "2 days ago"),
    ],
)  # fmt: skip
def test_ago(seconds: int, words: str) -> None:
    assert ago(int((NOW - seconds) * 1000), NOW) == words


def test_times_without_a_value() -> None:
    assert ago(None) == "never"
    assert duration(None) == ""


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "<1 ms"),
        (12, "12 ms"),
        (1500, "1.5 s"),
        (59_000, "59.0 s"),
        (125_000, "2 min 5 s"),
        (3_700_000, "1 h 1 min"),
    ],
)
def test_durations(milliseconds: int, words: str) -> None:
    assert duration(milliseconds) == words


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert plain("a\x1b[2Jb\tc\nd\x9be\u202ef") == "a�[2Jb c d�e�f"
    assert plain("grüße 日本") == "grüße 日本"


@pytest.mark.parametrize(("room", "widths"), [(50, [10, 30]), (30, [10, 18]), (19, [10, 7]), (18, [10]), (5, [10])])
def test_columns_but_the_first_give_way_or_are_left_out(room: int, widths: list[int]) -> None:
    assert _fit([Column("A", "a"), Column("B", "b")], [10, 30], room) == widths
