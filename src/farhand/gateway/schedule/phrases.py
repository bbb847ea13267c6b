"""Repeating times in words: `every monday at 9`, `weekdays at 18:30`, `on the 1st of every month at noon`.

A phrase becomes a cron expression. What is not fully understood is refused, never guessed.
"""

from __future__ import annotations

import re
from typing import Final

from farhand.gateway.schedule.time_parsing import clock_time, words_of
from farhand.protocol.errors import InvalidArgs

_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NAMES: Final = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_SHORT: Final = {"tues": "tue", "thur": "thu", "thurs": "thu", "weds": "wed"}
_GROUPS: Final = {"day": "*", "daily": "*", "weekday": "MON-FRI", "weekend": "SAT,SUN"}
_REPEATS: Final = re.compile(r"(?:every|each|on|daily|weekly|monthly|weekdays?|weekends?|at)\b|\w+days?\b")
_MONTHLY: Final = (
    re.compile(r"(?:every month|monthly|each month) on the (.+)"),
    re.compile(r"(?:on )?the (.+) of (?:every|each|the) month"),
    re.compile(r"every (.+) of the month"),
)
_ORDINAL: Final = re.compile(r"(\d{1,2})(?:st|nd|rd|th)")
_BETWEEN: Final = re.compile(r"\s*,\s*(?:and\s+)?|\s+and\s+")


def read_phrase(text: str) -> str | None:
    """Return the cron expression of a phrase; None if the text does not name days and a time of day.

    Raises InvalidArgs for a phrase that names days, but without a time or with one that does not exist.
    """
    words = words_of(text)
    if not _REPEATS.match(words):
        return None
    if words.startswith("at "):  # at 9 every monday
        found = re.fullmatch(r"at (.+?) ((?:every|each|on) .+|daily|weekdays|weekends)", words)
        if found is None:
            return None
        days, times = found[2], found[1]
    else:
        days, _, times = words.partition(" at ")
    fields = _days(days.strip())
    if fields is None:
        return None
    if not times:
        raise InvalidArgs(f'{text[:100]!r} does not say at what time; write it as "{words[:60]} at 9:00"')
    return f"{_times(times, text)} {fields}"


def _times(words: str, text: str) -> str:
    """Return minute and hour. Several times of a day must share the minute, as in a cron expression."""
    moments = [clock_time(one, text) for one in _BETWEEN.split(words)]
    if len({one.minute for one in moments}) > 1 or any(one.second for one in moments):
        raise InvalidArgs(f"{text[:100]!r}: the times of one job must have the same minute, and no seconds")
    return f"{moments[0].minute} {','.join(str(hour) for hour in sorted({one.hour for one in moments}))}"


def _days(words: str) -> str | None:
    """Return day of month, month and day of week; None if the words are not days."""
    for pattern in _MONTHLY:
        if found := pattern.fullmatch(words):
            return _month_days(found[1])
    names = re.sub(r"^(?:every|each|weekly on|on)\s+", "", words)
    found_days: list[str] = []
    for name in _BETWEEN.split(names):
        group = _GROUPS.get(name) or _GROUPS.get(name.removesuffix("s"))
        day = _day(name)
        if group is None and day is None:
            return None
        found_days.append(group or str(day))
    return f"* * {'*' if '*' in found_days else ','.join(dict.fromkeys(found_days))}"


def _day(name: str) -> str | None:
    """Return `MON` for `monday`, `mondays` and `mon`."""
    plain = name.removesuffix("s") if name.endswith("days") else name
    plain = _SHORT.get(plain, plain)
    known = {**dict(zip(_NAMES, _DAYS, strict=True)), **dict(zip(_DAYS, _DAYS, strict=True))}
    return known[plain].upper() if plain in known else None


def _month_days(words: str) -> str | None:
    days = []
    for one in _BETWEEN.split(words):
        found = _ORDINAL.fullmatch(one)
        if one == "last day":
            days.append("L")
        elif found is not None and 1 <= int(found[1]) <= 31:
            days.append(str(int(found[1])))
        else:
            return None
    return f"{','.join(days)} * *"
