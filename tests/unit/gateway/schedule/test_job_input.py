"""Every description of a job is parsed or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhand.gateway.schedule.heartbeat import nothing_in, read_clock, read_interval, worth_saying
from farhand.gateway.schedule.job_input import (
    AT_FIELDS,
    EVERY_FIELDS,
    JOB_FIELDS,
    TASK_FIELDS,
    patch_job,
    read_job,
    read_schedule,
    read_schedule_text,
    read_spec,
)
from farhand.gateway.schedule.time_parsing import next_slot, zone_named
from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.cron import At, Cron, CronJob, Every

UTC = zone_named("UTC")
NOW = 1_800_000_000_000
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def objects(fields: tuple[str, ...], **fixed: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(fields), JSON, max_size=4).map(lambda found: found | fixed)


@given(st.one_of(JSON, objects(AT_FIELDS, kind="at"), objects(EVERY_FIELDS, kind="every"), objects(("expr", "tz"))))
def test_any_schedule_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(InvalidArgs):
        schedule = read_schedule(value, NOW, UTC)
        assert next_slot(schedule, NOW - 60_001, UTC) is not None
        assert read_schedule(msgspec.to_builtins(schedule), NOW, UTC) == schedule


@given(st.text(max_size=30))
def test_any_line_is_a_schedule_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidArgs):
        assert isinstance(read_schedule_text(text, NOW, UTC), At | Every | Cron)


@given(st.one_of(JSON, objects(TASK_FIELDS, mode="task"), objects(("text",), mode="systemEvent")))
def test_any_spec_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(InvalidArgs):
        spec = read_spec(value)
        assert read_spec(msgspec.to_builtins(spec)) == spec


def job(**fields: Any) -> CronJob:
    spec = {"mode": "systemEvent", "text": "x"}
    return read_job({"name": "x", "schedule": {"kind": "every", "everyHours": 1}, "spec": spec, **fields}, NOW, UTC)


@given(objects(JOB_FIELDS))
def test_any_patch_is_applied_whole_or_not_at_all(patch: dict[str, Any]) -> None:
    before = job()
    with contextlib.suppress(InvalidArgs):
        after = patch_job(before, patch, NOW + 5, UTC)
        assert after.id == before.id and after.updated_at == NOW + 5
        assert msgspec.json.decode(msgspec.json.encode(after), type=CronJob) == after
        assert after.enabled == (after.next_at is not None)


def test_a_patch_that_does_not_touch_the_schedule_leaves_what_is_due() -> None:
    before = job()
    after = patch_job(before, {"name": "y"}, NOW + 2 * 3_600_000, UTC)
    assert (after.cursor, after.next_at) == (before.cursor, before.next_at)
    again = patch_job(before, {"schedule": {"kind": "every", "everyHours": 2}}, NOW + 7, UTC)
    assert (again.cursor, again.next_at) == (NOW + 7, NOW + 7 + 2 * 3_600_000)


def test_a_one_shot_job_that_has_run_is_not_enabled_again() -> None:
    once = job(schedule={"kind": "at", "inMs": 1000})
    off = patch_job(once, {"enabled": False}, NOW + 5, UTC)
    with pytest.raises(InvalidArgs, match="in the past"):
        patch_job(off, {"enabled": True}, NOW + 3_600_000, UTC)
    again = patch_job(off, {"enabled": True, "schedule": {"kind": "at", "in": "in 1 hour"}}, NOW + 3_600_000, UTC)
    assert again.next_at == NOW + 2 * 3_600_000


# -- heartbeats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("HEARTBEAT_OK", ""),
        ("  HEARTBEAT_OK.\n", ""),
        ("**HEARTBEAT_OK**", ""),
        ("HEARTBEAT_OK\n\nHEARTBEAT_OK", ""),
        ("", ""),
        ("No", "No"),
        ("Fire! HEARTBEAT_OK", "Fire!"),
        ("HEARTBEAT_OK\nThe disk is full", "The disk is full"),
        ("I would say HEARTBEAT_OK but the disk is full", "I would say HEARTBEAT_OK but the disk is full"),
        ("🔥", "🔥"),
        ("1", "1"),
    ],
)
def test_nothing_real_is_kept_back_for_being_short(reply: str, said: str) -> None:
    assert worth_saying(reply) == said


@pytest.mark.parametrize("text", ["", "\n \n", "# \n", "<!-- a\nb -->", "- \n* \n---\n", "- [ ]\n", "<!-- open"])
def test_a_file_without_words_is_empty(text: str) -> None:
    assert nothing_in(text)


@pytest.mark.parametrize("text", ["x", "# Tasks", "- look", "<!-- a --> b", "1"])
def test_a_file_with_words_is_not(text: str) -> None:
    assert not nothing_in(text)


def test_intervals_and_times_of_day() -> None:
    assert [read_interval(text) for text in ("30m", "2h30m")] == [1_800_000, 9_000_000]
    assert [read_interval(text) for text in ("0", "0m", "off", "")] == [0, 0, 0, 0]
    assert (read_clock("08:30").hour, read_clock("24:00").hour) == (8, 0)
    for bad in ("8", "24:01", "x", "12:60"):
        with pytest.raises(ValueError, match=r"not a time of day|must be in"):
            read_clock(bad)
