"""Conditional and partial requests: `If-None-Match`, `If-Range` and `Range` (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from farhand.api.server.http import Problem, Reply, Request

_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


class Range(NamedTuple):
    """The first byte, and the last one if it is given; a negative `first` counts from the end."""

    first: int
    last: int | None

    def within(self, size: int) -> tuple[int, int]:
        """Return the offset and the length in a body of this size. Raises Problem (416)."""
        first = self.first if self.first >= 0 else max(0, size + self.first)
        last = size - 1 if self.last is None else min(self.last, size - 1)
        if first > last:
            raise unsatisfiable(size)
        return first, last - first + 1


def unsatisfiable(size: int) -> Problem:
    message = f"the requested range lies outside the {size} bytes there are"
    return Problem(416, "range_not_satisfiable", message, headers=[(b"content-range", b"bytes */%d" % size)])


def requested_range(request: Request, etag: str | None = None) -> Range | None:
    """Return the range that a request asks for.

    Returns None, which means the whole body, for no range, several ranges, another unit, a malformed header, or an
    `If-Range` with another entity tag.
    """
    found = _RANGE.fullmatch((request.header(b"range") or "").strip())
    if found is None or not (found[1] or found[2]):
        return None
    condition = request.header(b"if-range")
    if condition is not None and condition.strip() != f'"{etag}"':
        return None
    if not found[1]:
        return Range(-int(found[2]), None) if int(found[2]) else Range(2**62, None)
    first, last = int(found[1]), int(found[2]) if found[2] else None
    return None if last is not None and last < first else Range(first, last)


def not_modified(request: Request, etag: str) -> bool:
    """Return whether `If-None-Match` names this entity tag, or any with `*`."""
    header = request.header(b"if-none-match")
    if header is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return f'"{etag}"' in tags or "*" in tags


def not_modified_reply(headers: list[tuple[bytes, bytes]]) -> Reply:
    """Return 304 with those of the headers that do not describe a body."""
    kept = [header for header in headers if header[0] not in (b"content-length", b"content-range")]
    return Reply(status=304, headers=kept)
