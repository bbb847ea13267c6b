"""Repeating times in words: understood as a whole, or refused."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from farhand.gateway.schedule.job_input import read_schedule_text, read_spec
from farhand.gateway.schedule.phrases import read_phrase
from farhand.gateway.schedule.time_parsing import milliseconds
from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.cron import At, CallSpec, Cron, Every

NOW = milliseconds(datetime(2026, 11, 16, 1, 40, tzinfo=UTC))
ZONE = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("every monday at 9", "0 9 * * MON"),
        ("Every Monday at 9:30 PM", "30 21 * * MON"),
        ("every monday and thursday at 18:00", "0 18 * * MON,THU"),
        ("mondays, wednesdays and fridays at noon", "0 12 * * MON,WED,FRI"),
        ("every weekday at 9:30", "30 9 * * MON-FRI"),
        ("weekdays at 9am", "0 9 * * MON-FRI"),
        ("every weekend at 10", "0 10 * * SAT,SUN"),
        ("every day at midnight", "0 0 * * *"),
        ("daily at 18:00", "0 18 * * *"),
        ("every day at 9 and 17", "0 9,17 * * *"),
        ("at 9 every monday", "0 9 * * MON"),
        ("on tues at 8", "0 8 * * TUE"),
        ("every month on the 1st at 9", "0 9 1 * *"),
        ("on the 15th of every month at 10:00", "0 10 15 * *"),
        ("on the 1st and 15th of each month at 7", "0 7 1,15 * *"),
        ("every month on the last day at noon", "0 12 L * *"),
    ],
)
def test_a_phrase_is_a_cron_expression(text: str, expression: str) -> None:
    assert read_phrase(text) == expression
    assert read_schedule_text(text, NOW, ZONE) == Cron(expression)
    assert read_schedule_text(text, NOW, ZONE, "Asia/Tokyo") == Cron(expression, "Asia/Tokyo")


@pytest.mark.parametrize(
    "text",
    ["every monday", "every monday at", "every monday at 25:00", "every mondya at 9", "every monday at nine", "weekly",
     "every other monday at 9", "every 2nd tuesday at 9", "every monday at 9:00 and 9:30", "every day at 9:00:30",
     "on the 32nd of every month at 9", "every month on the first at 9", "every monday at 13pm", "soon at 9", "at 9"],
)  # fmt: skip
def test_text_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgs):
        read_schedule_text(text, NOW, ZONE)


def test_a_missing_time_is_named() -> None:
    with pytest.raises(InvalidArgs, match='write it as "every friday at 9:00"'):
        read_schedule_text("every friday", NOW, ZONE)


def test_other_schedules_stay_as_they_are() -> None:
    assert isinstance(read_schedule_text("every 30 minutes", NOW, ZONE), Every)
    assert isinstance(read_schedule_text("every hour", NOW, ZONE), Every)
    assert isinstance(read_schedule_text("tomorrow at 9:15 PM", NOW, ZONE), At)
    assert read_schedule_text("0 9 * * MON-FRI", NOW, ZONE) == Cron("0 9 * * MON-FRI")


def test_a_call_is_read() -> None:
    spec = read_spec({"mode": "call", "tool": "nas__Bash", "args": {"command": "true"}, "timeoutSeconds": 9})
    assert spec == CallSpec("nas__Bash", {"command": "true"}, 9)
    assert read_spec({"args": {"command": "false"}}, spec) == CallSpec("nas__Bash", {"command": "false"}, 9)
    for wrong in ({}, {"tool": ""}, {"tool": 7}, {"tool": "x", "args": []}, {"tool": "x", "message": "y"},
                  {"tool": "x" * 2000}, {"tool": "x", "args": {"a": "b" * 200_000}}):  # fmt: skip
        with pytest.raises(InvalidArgs):
            read_spec({"mode": "call", **wrong})
