"""Moments in words, and slots, above all where clocks change: Berlin, New York, and Lord Howe with its half hour."""

from __future__ import annotations

import contextlib
import itertools
from datetime import UTC, datetime, timedelta

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from farhand.gateway.schedule.time_parsing import (
    DAY_MS,
    check_expression,
    duration_in_words,
    in_words,
    local,
    milliseconds,
    next_slot,
    read_duration,
    read_moment,
    schedule_in_words,
    slots_after,
    slots_between,
    zone_named,
)
from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.cron import At, Cron, Every

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
NOW = milliseconds(datetime(2026, 11, 16, 1, 40, tzinfo=UTC))


def instant(text: str) -> int:
    return milliseconds(datetime.fromisoformat(text))


def slots(expr: str, zone: str, after: str, count: int) -> list[str]:
    there = zone_named(zone)
    found = itertools.islice(slots_after(Cron(expr), instant(after), there), count)
    return [f"{local(slot, there):%m-%d %H:%M%z}" for slot in found]


def up_to(schedule: Cron | Every | At, after: int, until: int, zone: str) -> list[int]:
    return list(itertools.takewhile(lambda slot: slot <= until, slots_after(schedule, after, zone_named(zone))))


# -- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "zone", "expected"),
    [
        ("in 2 hours", BERLIN, "2026-11-16T03:40+00:00"),
        ("In 30 minutes", BERLIN, "2026-11-16T02:10+00:00"),
        ("in 1h30m", BERLIN, "2026-11-16T03:10+00:00"),
        ("in an hour and 5 minutes", BERLIN, "2026-11-16T02:45+00:00"),
        ("in half an hour", BERLIN, "2026-11-16T02:10+00:00"),
        ("in 1.5 days", BERLIN, "2026-11-17T13:40+00:00"),
        ("in 250 ms", BERLIN, "2026-11-16T01:40:00.250+00:00"),
        ("today 17:30", BERLIN, "2026-11-16T17:30+01:00"),
        ("tomorrow", BERLIN, "2026-11-17T00:00+01:00"),
        ("tomorrow 9am", BERLIN, "2026-11-17T09:00+01:00"),
        ("Tomorrow at 9:15 PM", BERLIN, "2026-11-17T21:15+01:00"),
        ("tomorrow at noon", BERLIN, "2026-11-17T12:00+01:00"),
        ("tomorrow 12am", BERLIN, "2026-11-17T00:00+01:00"),
        ("tomorrow 12pm", BERLIN, "2026-11-17T12:00+01:00"),
        # It is still the evening of the 15th in New York, and noon of the 16th on Lord Howe.
        ("tomorrow 9am", NEW_YORK, "2026-11-16T09:00-05:00"),
        ("tomorrow 9am", LORD_HOWE, "2026-11-17T09:00+11:00"),
        ("2026-12-24 18:00", BERLIN, "2026-12-24T18:00+01:00"),
        ("2026-12-24T18", NEW_YORK, "2026-12-24T18:00-05:00"),
        ("2026-12-24", LORD_HOWE, "2026-12-24T00:00+11:00"),
        ("2026-12-24T18:00:30.5Z", BERLIN, "2026-12-24T18:00:30.500+00:00"),
        ("2026-12-24T18:00+05:30", BERLIN, "2026-12-24T18:00+05:30"),
        ("2026-12-24 18:00 UTC", BERLIN, "2026-12-24T18:00+00:00"),
        ("2026-12-24T18:00-0500", BERLIN, "2026-12-24T18:00-05:00"),
        ("1798000000", BERLIN, "2026-12-23T04:26:40+00:00"),
        ("1798000000123", BERLIN, "2026-12-23T04:26:40.123+00:00"),
        # Across a change of clocks: "tomorrow 9am" is a time of day, "in 24 hours" is a length of time.
        ("2027-03-28 09:00", BERLIN, "2027-03-28T07:00+00:00"),
        # What happens twice means the first time.
        ("2026-10-25 02:30", BERLIN, "2026-10-25T02:30+02:00"),
        ("2026-11-01 01:30", NEW_YORK, "2026-11-01T01:30-04:00"),
        ("2026-04-05 01:45", LORD_HOWE, "2026-04-05T01:45+11:00"),
    ],
)
def test_a_moment_in_words(text: str, zone: str, expected: str) -> None:
    assert read_moment(text, NOW, zone_named(zone)) == instant(expected)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "next tuesday", "in 5", "in two hours", "in -1 hours", "tomorrow 25:00", "tomorrow 13pm",
     "tomorrow 0am", "2026-02-30", "2026-13-01", "2026-03-01T25:00", "12345", "99999999999999999",
     "in 999999999999999 weeks",
     "0000-01-01", "9999-12-31 23:59", "2026-03-01T09:00+99:00", "tomorrow 9am and 10am", "in 1 fortnight",
     "１２３４５６７８９０"],
)  # fmt: skip
def test_nonsense_is_refused_and_never_guessed_at(text: str) -> None:
    with pytest.raises(InvalidArgs):
        read_moment(text, NOW, zone_named(BERLIN))


@pytest.mark.parametrize(
    ("text", "zone"),
    [("2026-03-29 02:30", BERLIN), ("2026-03-08 02:00", NEW_YORK), ("2026-10-04 02:15", LORD_HOWE)],
)
def test_a_local_time_that_the_clocks_skip_is_refused(text: str, zone: str) -> None:
    with pytest.raises(InvalidArgs, match="Unable to resolve local datetime"):
        read_moment(text, NOW, zone_named(zone))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgs):
        assert read_moment(text, NOW, zone_named(BERLIN)) >= 0


@given(st.integers(0, 10_000), st.sampled_from(["second", "minute", "hour", "day"]))
def test_a_duration_is_what_it_says(count: int, unit: str) -> None:
    length = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": DAY_MS}[unit]
    assert read_duration(f"in {count} {unit}s") == read_duration(f"{count}{unit[0]}") == count * length


def test_moments_and_schedules_in_words() -> None:
    moment = instant("2026-02-13T15:30-06:00")
    assert in_words(moment, zone_named("America/Chicago")) == "Friday, February 13, 2026 — 3:30 PM CST"
    assert in_words(instant("2026-02-13T00:05Z"), zone_named("UTC")) == "Friday, February 13, 2026 — 12:05 AM UTC"
    assert duration_in_words(90 * 60_000) == "90 minutes"
    assert duration_in_words(DAY_MS) == "day"
    assert "09:00" in schedule_in_words(Cron("0 9 * * MON-FRI", BERLIN), zone_named("UTC"))


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../etc/passwd", "/etc/localtime", "Europe", "\0", "x" * 300])
def test_an_invalid_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgs, match="time zone"):
        zone_named(name)


# -- cron expressions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expr",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "a b c d e",
     "*/0 * * * *", "5-1 * * * *", "@daily", "0 0 31 2 *", "1" * 5000 + " * * * *", "1--2 * * * *", "? * * * *"],
)  # fmt: skip
def test_an_invalid_expression_is_refused(expr: str) -> None:
    with pytest.raises(InvalidArgs, match="cron expression"):
        check_expression(expr)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("0 9 * * MON-FRI", ["11-16 09:00", "11-17 09:00", "11-18 09:00"]),
        ("0 9 * * 7", ["11-22 09:00", "11-29 09:00", "12-06 09:00"]),
        ("0 0 1 JAN,JUL *", ["01-01 00:00", "07-01 00:00", "01-01 00:00"]),
        ("*/20 8-9 * * *", ["11-16 08:00", "11-16 08:20", "11-16 08:40"]),
        ("0 12 13 * FRI", ["11-20 12:00", "11-27 12:00", "12-04 12:00"]),  # the 13th, or a Friday
        ("0 0 29 2 *", ["02-29 00:00", "02-29 00:00", "02-29 00:00"]),
    ],
)
def test_the_five_fields(expr: str, expected: list[str]) -> None:
    zone = zone_named("UTC")
    found = itertools.islice(slots_after(Cron(expr), NOW, zone), 3)
    assert [f"{local(slot, zone):%m-%d %H:%M}" for slot in found] == expected


# The clocks go forward 02:00 -> 03:00 and back 03:00 -> 02:00 in Berlin; 02:00 -> 03:00 and 02:00 -> 01:00 in New York;
# 02:00 -> 02:30 and 02:00 -> 01:30 on Lord Howe.
TABLE = [
    # At set hours: once a day, right after the gap, the first time round.
    ("30 2 * * *", BERLIN, "2026-03-28T12:00+01:00", ["03-29 03:00+0200", "03-30 02:30+0200"]),
    ("0,30 2 * * *", BERLIN, "2026-03-28T12:00+01:00", ["03-29 03:00+0200", "03-30 02:00+0200"]),
    ("0 2,3 * * *", BERLIN, "2026-03-28T12:00+01:00", ["03-29 03:00+0200", "03-30 02:00+0200"]),
    ("0 9 * * *", BERLIN, "2026-03-28T12:00+01:00", ["03-29 09:00+0200", "03-30 09:00+0200"]),
    ("30 2 * * *", BERLIN, "2026-10-24T12:00+02:00", ["10-25 02:30+0200", "10-26 02:30+0100"]),
    ("30 2 * * *", BERLIN, "2026-10-25T02:30+02:00", ["10-26 02:30+0100"]),
    ("30 2 * * *", BERLIN, "2026-10-25T02:10+01:00", ["10-26 02:30+0100"]),
    ("30 2 * * *", NEW_YORK, "2026-03-07T12:00-05:00", ["03-08 03:00-0400", "03-09 02:30-0400"]),
    ("30 1 * * *", NEW_YORK, "2026-10-31T12:00-04:00", ["11-01 01:30-0400", "11-02 01:30-0500"]),
    ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00+10:30", ["10-04 02:30+1100", "10-05 02:15+1100"]),
    ("30 2 * * *", LORD_HOWE, "2026-10-03T12:00+10:30", ["10-04 02:30+1100", "10-05 02:30+1100"]),
    ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00+11:00", ["04-05 01:45+1100", "04-06 01:45+1030"]),
    ("0 2 * * *", LORD_HOWE, "2026-04-04T12:00+11:00", ["04-05 02:00+1030", "04-06 02:00+1030"]),
    # With a star: by the time that passes; the hour that is missing is missing, the one that comes twice runs twice.
    ("0 * * * *", BERLIN, "2026-03-29T00:30+01:00", ["03-29 01:00+0100", "03-29 03:00+0200", "03-29 04:00+0200"]),
    ("0 * * * *", BERLIN, "2026-10-25T01:30+02:00", ["10-25 02:00+0200", "10-25 02:00+0100", "10-25 03:00+0100"]),
    ("*/30 2 * * *", BERLIN, "2026-03-28T12:00+01:00", ["03-30 02:00+0200", "03-30 02:30+0200"]),
    ("30 * * * *", NEW_YORK, "2026-03-08T00:40-05:00", ["03-08 01:30-0500", "03-08 03:30-0400"]),
    ("30 * * * *", NEW_YORK, "2026-11-01T01:00-04:00", ["11-01 01:30-0400", "11-01 01:30-0500", "11-01 02:30-0500"]),
    ("*/15 * * * *", LORD_HOWE, "2026-10-04T01:40+10:30", ["10-04 01:45+1030", "10-04 02:30+1100", "10-04 02:45+1100"]),
    ("30 * * * *", LORD_HOWE, "2026-10-04T01:10+10:30", ["10-04 01:30+1030", "10-04 02:30+1100", "10-04 03:30+1100"]),
    ("30 * * * *", LORD_HOWE, "2026-04-05T01:10+11:00", ["04-05 01:30+1100", "04-05 01:30+1030", "04-05 02:30+1030"]),
    ("*/15 2 * * *", LORD_HOWE, "2026-04-04T12:00+11:00", ["04-05 02:00+1030", "04-05 02:15+1030", "04-05 02:30+1030"]),
]  # fmt: skip


@pytest.mark.parametrize(("expr", "zone", "after", "expected"), TABLE)
def test_where_clocks_change(expr: str, zone: str, after: str, expected: list[str]) -> None:
    assert slots(expr, zone, after, len(expected)) == expected


PASSING = ("* * * * *", "*/15 * * * *", "*/15 2 * * *", "*/10 1-3 * * *", "30 * * * *", "*/20 */2 * * *", "* 2 * * SUN")
FIXED = ("30 2 * * *", "0,30 2 * * *", "15 1-3 * * *", "59 23 * * *", "0 0 * * *", "0 3 * * MON")
CHANGES = {
    BERLIN: ("2026-03-28", "2026-10-24"),
    NEW_YORK: ("2026-03-07", "2026-10-31"),
    LORD_HOWE: ("2026-04-04", "2026-10-03"),
    "Africa/Cairo": ("2026-04-23", "2026-10-29"),  # at midnight
    "America/Havana": ("2026-03-07", "2026-10-31"),
}


@pytest.mark.parametrize("zone", CHANGES)
@pytest.mark.parametrize("expr", PASSING)
def test_a_star_fires_at_exactly_the_minutes_that_match(expr: str, zone: str) -> None:
    """Against every minute of the days round a change of clocks, looked at one by one."""
    there = zone_named(zone)
    fields = CronSim(expr, datetime(2026, 1, 1))
    for day in CHANGES[zone]:
        begin = instant(f"{day}T00:00+00:00")
        found = up_to(Cron(expr), begin, begin + 3 * DAY_MS, zone)
        wanted = []
        for moment in range(begin + 60_000, begin + 3 * DAY_MS + 1, 60_000):
            when = local(moment, there)
            if when.minute in fields.minutes and when.hour in fields.hours and fields.match_day(when.date()):
                wanted.append(moment)
        assert found == wanted


@given(
    st.sampled_from(PASSING + FIXED),
    st.sampled_from(sorted(CHANGES)),
    st.integers(0, 1),
    st.integers(0, 3 * 24 * 60),
)
def test_slots_do_not_depend_on_where_one_begins_to_look(expr: str, zone: str, change: int, minute: int) -> None:
    begin = instant(f"{CHANGES[zone][change]}T00:00+00:00")
    later = begin + minute * 60_000
    end = later + 2 * DAY_MS
    whole = up_to(Cron(expr), begin, end, zone)
    assert whole == sorted(set(whole))
    assert up_to(Cron(expr), later, end, zone) == [slot for slot in whole if slot > later]


# -- intervals --------------------------------------------------------------------------------------------


@given(st.integers(0, 2 * NOW), st.integers(100, 10 * DAY_MS), st.integers(0, 2 * NOW))
def test_an_interval_never_drifts(anchor: int, length: int, after: int) -> None:
    schedule = Every(length, anchor)
    first, second = itertools.islice(slots_after(schedule, after, zone_named("UTC")), 2)
    assert (first - anchor) % length == 0 and second - first == length
    assert first > after and first >= anchor
    assert first == anchor or first - length <= after


def test_a_one_shot_has_one_slot() -> None:
    zone = zone_named("UTC")
    assert list(slots_after(At(NOW), NOW - 1, zone)) == [NOW]
    assert next_slot(At(NOW), NOW, zone) is None


@pytest.mark.parametrize(
    "schedule",
    [Cron("* * * * *"), Cron("* 0-5 * * *"), Cron("0 9 * * *"), Cron("* * 1 * *"), Every(60_000, 7), At(NOW - 5)],
)
def test_the_newest_slots_of_a_long_time(schedule: Cron | Every | At) -> None:
    zone = zone_named(BERLIN)
    found, more = slots_between(schedule, NOW - 60 * DAY_MS, NOW, zone, 50)
    whole = up_to(schedule, NOW - 60 * DAY_MS, NOW, BERLIN)
    assert found == whole[-50:] and more == (len(whole) > 50)


def test_a_day_of_time_passes_in_a_day_with_a_change_of_clocks() -> None:
    anchor = instant("2026-03-28T09:00+01:00")
    assert slots("0 9 * * *", BERLIN, "2026-03-28T09:00+01:00", 1) == ["03-29 09:00+0200"]
    berlin = zone_named(BERLIN)
    daily = next_slot(Every(DAY_MS, anchor), anchor, berlin)
    assert daily is not None and local(daily, berlin).hour == 10
    assert timedelta(milliseconds=daily - anchor) == timedelta(days=1)
