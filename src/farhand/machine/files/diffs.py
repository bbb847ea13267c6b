"""The difference between two contents of a file, as text."""

from __future__ import annotations

from typing import Final

# Larger files, and pairs of files with more pairs of lines than this, are not compared: it takes too long.
MOST_DIFFED: Final = 64 * 1024
MOST_COMPARED: Final = 4_000_000


def text_diff(old: bytes | None, new: bytes | None, name: str) -> str | None:
    """Return the unified diff of a file, None standing for no file; None if it is not text, or too long."""
    import difflib  # noqa: PLC0415 - memory of an idle node

    now, then = old or b"", new or b""
    if max(len(now), len(then)) > MOST_DIFFED or b"\0" in now + then:
        return None
    try:
        before, after = now.decode().splitlines(keepends=True), then.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
    if len(before) * len(after) > MOST_COMPARED:
        return None
    name = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    first = name if old is not None else "/dev/null"
    lines = difflib.unified_diff(before, after, first, name if new is not None else "/dev/null")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
