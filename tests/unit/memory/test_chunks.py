from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farhand.memory.chunks import MOST, MemoryChunk, chunks, lines_of

NOTES = """# Home

The wifi password is hunter2.

## Cats
Mimi is black.
Momo is white.

# Work
- Deploy with make ship.
- The review is on Tuesday.
"""


def test_a_heading_starts_a_chunk_and_tells_what_is_beneath_it() -> None:
    assert chunks(NOTES) == [
        MemoryChunk(1, 3, "# Home\n\nThe wifi password is hunter2."),
        MemoryChunk(5, 7, "## Cats\nMimi is black.\nMomo is white.", "Home"),
        MemoryChunk(9, 11, "# Work\n- Deploy with make ship.\n- The review is on Tuesday."),
    ]


def test_a_long_list_is_cut_between_its_items() -> None:
    text = "# Facts\n" + "".join(f"- fact {number} {'x' * 90}\n" for number in range(20))
    found = chunks(text)
    assert len(found) > 3
    assert all(len(chunk.text) <= 500 for chunk in found)
    assert all(chunk.text.startswith("- fact") for chunk in found[1:])
    assert {chunk.headings for chunk in found[1:]} == {"Facts"}


def test_code_in_fences_is_not_taken_for_headings_and_items() -> None:
    text = "# How\n```sh\n# a comment\n- x\n\nmake ship\n```\nafter\n"
    assert chunks(text) == [MemoryChunk(1, 8, text.rstrip("\n"))]


def test_a_line_too_long_for_a_chunk_keeps_its_number() -> None:
    found = chunks("first\n\n" + "y" * (2 * MOST + 5) + "\n\nlast\n")
    assert [(chunk.start_line, chunk.end_line) for chunk in found] == [(1, 1), (3, 3), (3, 3), (3, 3), (5, 5)]
    assert "".join(chunk.text for chunk in found[1:4]) == "y" * (2 * MOST + 5)


def test_windows_line_ends_and_other_separators_do_not_shift_lines() -> None:
    found = chunks("one\r\n\r\ntwo\u2028still two\x0bstill\r\n")
    assert [(chunk.start_line, chunk.end_line, chunk.text) for chunk in found] == [
        (1, 3, "one\n\ntwo\u2028still two\x0bstill")
    ]


@given(st.text(alphabet="ab #-`~\n\r1.日\u2028", max_size=400))
def test_every_line_is_in_a_chunk_at_its_place(text: str) -> None:
    lines = lines_of(text)
    found = chunks(text)
    for chunk in found:
        assert chunk.text == "\n".join(lines[chunk.start_line - 1 : chunk.end_line])
    covered = [number for chunk in found for number in range(chunk.start_line, chunk.end_line + 1)]
    assert covered == sorted(set(covered))
    assert {number for number, line in enumerate(lines, 1) if line.strip()} <= set(covered)
