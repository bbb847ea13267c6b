"""The difference between two contents of a file, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# The size of a file up to which a result contains its diff.
MOST_DIFFED: Final = 64 * 1024
# Maximum pairs of lines to compare; beyond that, all lines are shown as removed and added.
MOST_COMPARED: Final = 1_000_000
CONTEXT: Final = 3


def text_diff(old: bytes | None, new: bytes | None, name: str) -> str | None:
    """Return the diff of a short file; empty if the content is the same, None if it is not text, or too long."""
    before, after = old or b"", new or b""
    if max(len(before), len(after)) > MOST_DIFFED or b"\0" in before + after:
        return None
    if before == after:
        return ""
    try:
        return unified_diff(old, new, name)
    except UnicodeDecodeError:
        return None


def unified_diff(old: bytes | None, new: bytes | None, name: str) -> str:
    """Return the unified diff of a file, None standing for no file. Raises UnicodeDecodeError if it is not text."""
    before, after = _lines(old), _lines(new)
    name = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    names = ["/dev/null" if content is None else name for content in (old, new)]
    return f"--- {names[0]}\n+++ {names[1]}\n" + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in _hunks(before, after)
    )


def _hunks(old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the hunks of a diff; if there is too much to compare, one from the first change to the last."""
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    shortest = min(len(old), len(new)) - head
    tail = next((i for i in range(shortest) if old[-1 - i] != new[-1 - i]), shortest)
    gone, come = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(gone) * len(come) <= MOST_COMPARED:
        import difflib  # noqa: PLC0415 - memory of an idle node

        hunks = difflib.unified_diff(old, new, n=CONTEXT)
        next(hunks, None), next(hunks, None)  # skip the file names
        yield from hunks
        return
    first = max(0, head - CONTEXT)
    after = old[len(old) - tail :][:CONTEXT]
    around = head - first + len(after)
    yield f"@@ -{first + 1},{len(gone) + around} +{first + 1},{len(come) + around} @@\n"
    yield from (f" {line}" for line in old[first:head])
    yield from (f"-{line}" for line in gone)
    yield from (f"+{line}" for line in come)
    yield from (f" {line}" for line in after)


def _lines(content: bytes | None) -> list[str]:
    """Return lines with their ends; only \\n ends a line."""
    parts = (content or b"").decode().split("\n")
    return [*(f"{part}\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else [])]
