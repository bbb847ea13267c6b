"""The output of a command as text."""

from __future__ import annotations

from typing import Final

from farhand.machine.jobs.job import Job
from farhand.machine.jobs.jobs import Jobs
from farhand.machine.jobs.output import OUTPUT

# The most bytes of a character in UTF-8.
CHARACTER_BYTES: Final = 4


def last_text(jobs: Jobs, job: Job, limit: int, end: int | None = None, stream: str = OUTPUT) -> tuple[str, bool]:
    """Return the last `limit` characters of the output before byte `end`, and whether there are more."""
    chunk = jobs.tail(job, limit * CHARACTER_BYTES, end, stream)
    data = chunk.data
    if chunk.offset > 0:  # skip a partial character at the start
        begin = next((place for place, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
        data = data[begin:]
    text = data.decode("utf-8", "replace")
    return text[-limit:], len(text) > limit or chunk.offset > 0
