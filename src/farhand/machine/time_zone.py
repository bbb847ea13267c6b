"""The time zone of this machine, and times as text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

ZONE_LINK = Path("/etc/localtime")
ZONE_FILE = Path("/etc/timezone")
UTC_NAMES = ("Etc/UTC", "Etc/UCT", "Etc/Universal", "Etc/Zulu", "Universal", "Zulu", "UCT")


def utc_text(milliseconds: int, timespec: str = "seconds") -> str:
    """Return a time, in milliseconds since 1970, as text: `2026-11-16T04:10:03Z`."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def machine_zone(environ: Mapping[str, str]) -> ZoneInfo:
    """Return the zone of `TZ`, /etc/localtime or /etc/timezone; UTC if none of them names one."""
    for name in (environ.get("TZ", "").removeprefix(":"), _linked(), _written()):
        try:
            if name:
                return ZoneInfo("UTC" if name in UTC_NAMES else name)
        except (OSError, ValueError, LookupError):
            continue
    return ZoneInfo("UTC")


def _linked() -> str:
    try:
        return str(ZONE_LINK.readlink()).rpartition("zoneinfo/")[2]
    except OSError:
        return ""


def _written() -> str:
    try:
        return ZONE_FILE.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
