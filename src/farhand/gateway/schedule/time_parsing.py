"""Parse times from text and numbers, and compute the slots of a schedule. All functions are pure.

Times are milliseconds since 1970. Text is interpreted in a time zone; a local time that a clock change skips is
rejected, and one that occurs twice means the first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from farhand.protocol.errors import InvalidArgs
from farhand.store.tables.cron import At, Cron, Every, Schedule

MILLISECOND = timedelta(milliseconds=1)
SECOND_MS = 1000
DAY_MS = 86_400_000
# The start of the year 9999: later times have no local time in some zones.
LAST_MS = 253_370_764_800_000
MAX_EXPRESSION = 256
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

UNITS = {
    "ms": 1,
    "millisecond": 1,
    "s": SECOND_MS,
    "sec": SECOND_MS,
    "second": SECOND_MS,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hr": 3_600_000,
    "hour": 3_600_000,
    "d": DAY_MS,
    "day": DAY_MS,
    "w": 7 * DAY_MS,
    "week": 7 * DAY_MS,
}
_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_AMOUNT = rf"(?:(?P<amount>\d{{1,15}}(?:\.\d{{1,9}})?)|(?P<one>an?))\s*(?P<unit>{_UNIT})s?(?![a-z])"
_PART = re.compile(rf"\s*(?:and\s+|,\s*)?{_AMOUNT}", re.ASCII)
_NUMBER = re.compile(r"\d{10,16}", re.ASCII)
_DAY = re.compile(r"(today|tomorrow)(?:,?\s+(?:at\s+)?(.+))?", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*(am|pm|a\.m\.|p\.m\.)?", re.ASCII)
_ISO = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})(?:[t ]\s*(\d{1,2})(?::(\d{2})(?::(\d{2})(?:[.,](\d{1,9}))?)?)?)?"
    r"\s*(z|utc|gmt|[+-]\d{2}(?::?\d{2})?)?",
    re.ASCII,
)
FORMS = '"2026-03-01T09:00", "in 2 hours", "tomorrow 9am", or seconds or milliseconds since 1970'


# -- parsing ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def zone_named(name: str) -> ZoneInfo:
    """Return the time zone of this name. Raises InvalidArgs if it is not an IANA time zone."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise InvalidArgs(f"unknown time zone {name!r}; use an IANA name such as Europe/Berlin") from None


def words_of(text: str) -> str:
    """Normalize a time to lower case and single spaces. Raises InvalidArgs if the text is too long."""
    if len(text) > MAX_EXPRESSION:
        raise InvalidArgs(
            f"{text[:40]!r}… is not a time: it has {len(text)} characters, at most {MAX_EXPRESSION} are read"
        )
    return " ".join(text.lower().split())


def read_moment(text: str, now: int, zone: ZoneInfo) -> int:
    """Parse a point in time. Raises InvalidArgs if the text is ambiguous or not a time."""
    words = words_of(text)
    if _NUMBER.fullmatch(words):
        return checked(int(words) * (SECOND_MS if len(words) == 10 else 1), text)
    if words.startswith("in "):
        return checked(now + read_duration(words), text)
    if found := _DAY.fullmatch(words):
        today = local(now, zone).date()
        day = today if found[1] == "today" else today + timedelta(days=1)
        return _at_local(datetime.combine(day, clock_time(found[2] or "midnight", text)), zone)
    if found := _ISO.fullmatch(words):
        return _iso(found, text, zone)
    raise _unreadable(text)


def read_deadline(value: str | int, now: int, zone: ZoneInfo) -> int:
    """Parse a deadline; a time of day alone means its next occurrence. Raises InvalidArgs."""
    if isinstance(value, int):
        return checked(value, value)
    words = words_of(value)
    if not _CLOCK.fullmatch(words) or words.isdecimal():
        return read_moment(value, now, zone)
    for day in ("today", "tomorrow"):
        moment = read_moment(f"{day} {words}", now, zone)
        if moment > now:
            break
    return moment


def read_duration(text: str) -> int:
    """Return the milliseconds of `in 2 hours`, `1h 30m`, `an hour and 5 minutes`. Raises InvalidArgs."""
    words = words_of(text).removeprefix("in ").replace("half an hour", "30 minutes")
    place, total = 0, 0.0
    while found := _PART.match(words, place):
        total += float(found["amount"] or 1) * UNITS[found["unit"]]
        place = found.end()
    if place == 0 or words[place:].strip() or total > LAST_MS:
        raise InvalidArgs(f'{text!r} is not a duration like "in 2 hours" or "in 30 minutes"')
    return round(total)


def checked(moment: float, text: object) -> int:
    """Return the time if it is within the calendar. Raises InvalidArgs otherwise."""
    if not 0 <= moment <= LAST_MS:
        raise InvalidArgs(f"{text!r} is outside of the years 1970 to 9998")
    return round(moment)


def clock_time(words: str, text: str) -> time:
    """Return the time of day in words; `text` is what the error quotes. Raises InvalidArgs."""
    if words in ("midnight", "noon"):
        return time(12 if words == "noon" else 0)
    found = _CLOCK.fullmatch(words)
    if found is None:
        raise _unreadable(text)
    hour, half = int(found[1]), (found[4] or "").replace(".", "")
    if half:
        if not 1 <= hour <= 12:
            raise _unreadable(text)
        hour = hour % 12 + (12 if half == "pm" else 0)
    try:
        return time(hour, int(found[2] or 0), int(found[3] or 0))
    except ValueError:
        raise _unreadable(text) from None


def _iso(found: re.Match[str], text: str, zone: ZoneInfo) -> int:
    year, month, day, hour, minute, second, fraction, offset = found.groups()
    try:
        written = datetime(int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0))
        written += timedelta(microseconds=int((fraction or "0").ljust(6, "0")[:6]))
    except (ValueError, OverflowError):
        raise InvalidArgs(f"Invalid local ISO datetime: {text}") from None
    if offset is None:
        return _at_local(written, zone)
    shift = timedelta()
    if offset[0] in "+-":
        digits = offset[1:].replace(":", "").ljust(4, "0")
        shift = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        if shift >= timedelta(days=1):
            raise _unreadable(text)
        shift = -shift if offset[0] == "-" else shift
    return checked((written.replace(tzinfo=UTC) - EPOCH - shift) / MILLISECOND, text)


def _at_local(written: datetime, zone: ZoneInfo) -> int:
    if not 1970 <= written.year <= 9998:
        raise InvalidArgs(f"{written:%Y-%m-%d} is outside of the years 1970 to 9998")
    there = written.replace(tzinfo=zone)
    if _left_out(there):
        raise InvalidArgs(
            f"Unable to resolve local datetime {written:%Y-%m-%d %H:%M} in timezone {zone.key}: "
            "the clocks skip it on that day"
        )
    return checked(milliseconds(there), written)


def _unreadable(text: str) -> InvalidArgs:
    return InvalidArgs(f'Unable to parse datetime "{text[:100]}". Use {FORMS}.')


def local(moment: int, zone: ZoneInfo) -> datetime:
    return (EPOCH + moment * MILLISECOND).astimezone(zone)


def milliseconds(moment: datetime) -> int:
    return (moment - EPOCH) // MILLISECOND


def _left_out(moment: datetime) -> bool:
    """Return whether a local time does not exist because a clock change skips it."""
    back = moment.astimezone(UTC).astimezone(moment.tzinfo)
    return back.replace(tzinfo=None) != moment.replace(tzinfo=None)


# -- slots ------------------------------------------------------------------------------------------------


def check_expression(expr: str) -> None:
    """Check a cron expression. Raises InvalidArgs that names the invalid field."""
    if len(expr.split()) != 5 or len(expr) > MAX_EXPRESSION:
        raise InvalidArgs(
            "cron expression must contain exactly 5 fields (minute hour day-of-month month day-of-week), "
            f"not {expr[:100]!r}"
        )
    try:
        CronSim(expr, datetime(2026, 1, 1))
    except (CronSimError, ValueError, AssertionError) as error:
        raise InvalidArgs(f"cron expression {expr!r}: {str(error) or 'not understood'}") from None


def next_slot(schedule: Schedule, after: int, zone: ZoneInfo) -> int | None:
    """Return the first slot after `after`. `zone` is the user's, for schedules without a time zone."""
    return next(slots_after(schedule, after, zone), None)


def slots_after(schedule: Schedule, after: int, zone: ZoneInfo) -> Iterator[int]:
    """Yield every slot after `after`, in order."""
    if isinstance(schedule, At):
        if schedule.at_ms > after:
            yield schedule.at_ms
    elif isinstance(schedule, Every):
        steps = max(0, (after - schedule.anchor_ms) // schedule.every_ms + 1)
        first = schedule.anchor_ms + steps * schedule.every_ms
        for slot in itertools.count(first, schedule.every_ms):
            if slot > LAST_MS:
                return
            yield slot
    else:
        yield from _cron_slots(schedule, after, zone_named(schedule.tz) if schedule.tz else zone)


def slots_between(schedule: Schedule, after: int, until: int, zone: ZoneInfo, most: int) -> tuple[list[int], bool]:
    """Return the newest slots after `after` up to `until`, at most `most`, and whether there were more.

    The cost does not grow with the distance to `after`.
    """
    found = _up_to(schedule, after, until, zone, most + 1)
    if len(found) <= most:
        return found, False
    many, few = after, until
    found = []
    while few - many > SECOND_MS:
        middle = (many + few) // 2
        newest = _up_to(schedule, middle, until, zone, most + 1)
        if len(newest) > most:
            many = middle
        else:
            few, found = middle, newest
    return found, True


def _up_to(schedule: Schedule, after: int, until: int, zone: ZoneInfo, most: int) -> list[int]:
    return list(itertools.islice(itertools.takewhile(until.__ge__, slots_after(schedule, after, zone)), most))


def _cron_slots(schedule: Cron, after: int, zone: ZoneInfo) -> Iterator[int]:
    """Yield the slots of a cron expression.

    The library computes local calendar times; this function maps them to instants by the rules of cron. A job at fixed
    hours runs once a day: right after the gap if a clock change skips its time, and at the first occurrence if its time
    repeats. A job with `*` as its hour or minute follows elapsed time: skipped times do not run, repeated times run
    twice. (If given a zone, the library loses slots where clocks change by half an hour.)
    """
    minute, hour = schedule.expr.split()[:2]
    if minute.startswith("*") or hour.startswith("*"):
        yield from _passing_slots(schedule.expr, after, zone)
        return
    here = local(after, zone)
    begin = here.replace(tzinfo=None, fold=0)
    if _offset(after, zone) > _offset(after - DAY_MS, zone):  # a slot in the gap may have moved to after now
        begin -= timedelta(days=1, hours=1)
    last = after
    for written in _calendar(schedule.expr, begin):
        there = written.replace(tzinfo=zone)
        if _left_out(there):
            there = _after_gap(there)
        slot = milliseconds(there)
        if slot > last:
            last = slot
            yield slot


def _passing_slots(expr: str, after: int, zone: ZoneInfo) -> Iterator[int]:
    """Yield slots period by period, each with one offset from UTC and thus a regular local calendar."""
    offset = _offset(after, zone)
    begin = after
    while begin < LAST_MS:
        changed: int | None = None
        seen = max(begin, after)
        for written in _calendar(expr, (EPOCH + begin * MILLISECOND + offset).replace(tzinfo=None)):
            slot = milliseconds(written.replace(tzinfo=UTC) - offset)
            changed = _first_change(seen, slot, offset, zone)
            if changed is not None:
                break
            seen = slot
            yield slot
        if changed is None:
            return
        offset = _offset(changed, zone)
        after = changed
        begin = changed - SECOND_MS  # the first moment of the next period may be a slot


def _calendar(expr: str, begin: datetime) -> Iterator[datetime]:
    try:
        yield from CronSim(expr, begin)
    except OverflowError:  # end of the calendar
        return


def _offset(moment: int, zone: ZoneInfo) -> timedelta:
    return local(moment, zone).utcoffset() or timedelta()


def _first_change(after: int, until: int, offset: timedelta, zone: ZoneInfo) -> int | None:
    """Return the first moment after `after`, up to `until`, at which the zone's offset differs from `offset`."""
    low, high = after, after
    while _offset(high, zone) == offset or high == after:
        if high >= until:
            return None
        low, high = high, min(high + DAY_MS, until)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(middle, zone) == offset:
            low = middle
        else:
            high = middle
    return high


def _after_gap(there: datetime) -> datetime:
    """Return the first moment after the gap that contains a local time."""
    before = milliseconds(there.replace(fold=1))
    changed = _first_change(before - 1, milliseconds(there), _offset(before, there.tzinfo), there.tzinfo)  # type: ignore[arg-type]
    return there if changed is None else local(changed, there.tzinfo)  # type: ignore[arg-type]


# -- formatting -------------------------------------------------------------------------------------------


def in_words(moment: int, zone: ZoneInfo) -> str:
    """Format a time as `Friday, February 13, 2026 — 3:30 PM CST`."""
    there = local(moment, zone)
    half = "AM" if there.hour < 12 else "PM"
    return f"{there:%A, %B} {there.day}, {there.year} — {there.hour % 12 or 12}:{there:%M} {half} {there:%Z}"


def schedule_in_words(schedule: Schedule, zone: ZoneInfo) -> str:
    if isinstance(schedule, At):
        return f"once, {in_words(schedule.at_ms, zone)}"
    if isinstance(schedule, Every):
        return f"every {duration_in_words(schedule.every_ms)}"
    return f"{CronSim(schedule.expr, datetime(2026, 1, 1)).explain()} ({schedule.tz or zone.key})"


def duration_in_words(length: int) -> str:
    for unit in ("week", "day", "hour", "minute", "second"):
        if length % UNITS[unit] == 0:
            count = length // UNITS[unit]
            return unit if count == 1 else f"{count} {unit}s"
    return f"{length / SECOND_MS:g} seconds"
